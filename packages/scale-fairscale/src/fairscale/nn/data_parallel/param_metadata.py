"""`param_metadata` of `local_metadata_dict`: which parameters each wrapper's shards hold, in FairScale's form.

Files that FairScale has written hold nothing else, and become whole weights again here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scale_fsdp.runtime.unit import Unit
from scale_fsdp.state_dict.local import consolidate_shards


def param_metadata(units: Iterable[tuple[str, Unit, bool]], own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an entry for each wrapper, the outermost first.

    Args:
        units: Of each wrapper its path, its unit, and `no_broadcast_optim_state`.
        own: What scale-fsdp says of their parameters.
    """
    found: list[dict[str, Any]] = []
    for path, unit, no_broadcast in units:
        params: dict[str, dict[str, list[Any]]] = {}
        shared: list[tuple[str, str]] = []
        held = {id(buffer) for buffer in unit.buffers}
        paths = {id(child): name for name, child in unit.module.named_modules()}
        for slot in unit.slots:
            if id(slot.buffer) not in held or id(slot.module) not in paths:
                continue
            name = f"{paths[id(slot.module)]}.{slot.attribute}".lstrip(".")
            described = own["parameters"].get(f"{path}.{name}".lstrip("."))
            if described is None:  # Another name of a tied one.
                first = own["tied"].get(f"{path}.{name}".lstrip("."), "")
                if first and first.startswith(path):
                    shared.append((first.removeprefix(path).lstrip("."), name))
                continue
            backing = described["entry"].removeprefix(f"{path}.") if path else described["entry"]
            entry = params.setdefault(backing, {"names": [], "shapes": [], "numels": [], "padding": []})
            entry["names"].append(name)
            entry["shapes"].append(tuple(described["shape"]))
            entry["numels"].append(slot.buffer.layout.entries[slot.number].numel)
            entry["padding"].append(0)
        found.append(
            {
                "fsdp_path": path,
                "params": params,
                "no_broadcast_optim_state": no_broadcast,
                "shared_param_info": shared,
            }
        )
    return found


def consolidate_shard_weights(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, Any]:
    """The plain model's state dict, on the CPU, from each rank's `local_state_dict()` and `local_metadata_dict()`.

    Args:
        shard_weights: Of each rank; those that FairScale has saved, in the order of the ranks.
        shard_metadata: Of each rank, in the same order.
        with_module_buffers: With the module's buffers, which are those of the first.
        strict: Every parameter must be there; otherwise those that the first rank lacks are left out.

    Raises:
        ValueError: They are not one for each rank, or of different models; a parameter is missing, or is another one on
            each rank, as an expert.
    """
    if not shard_weights or len(shard_weights) != len(shard_metadata):
        raise ValueError(
            f"Require metadata for each shard and non-empty shards: got {len(shard_weights)} of local_state_dict() and "
            f"{len(shard_metadata)} of local_metadata_dict()"
        )
    if any("parameters" in each for each in shard_metadata):
        return consolidate_shards(shard_weights, shard_metadata, with_module_buffers, strict)
    first = shard_metadata[0]
    whole: dict[str, Any] = {}
    for number, wrapper in enumerate(first["param_metadata"]):
        prefix = f"{wrapper['fsdp_path']}." if wrapper["fsdp_path"] else ""
        for entry, described in wrapper["params"].items():
            key = prefix + entry
            if not strict and key not in shard_weights[0]:
                continue
            chunks = [
                _without_padding(key, entry, weights, metadata["param_metadata"][number])
                for weights, metadata in zip(shard_weights, shard_metadata, strict=True)
            ]
            if wrapper["no_broadcast_optim_state"]:  # It is whole on each rank.
                if not all(torch.equal(chunk, chunks[0]) for chunk in chunks):
                    raise ValueError(
                        f"'{key}' is another parameter on each rank, as an expert is, and FairScale kept the first "
                        "rank's alone: save model.state_dict() on each rank there, which has its own"
                    )
                chunks = chunks[:1]
            flat = torch.cat(chunks)
            if flat.numel() != sum(described["numels"]):
                raise ValueError(
                    f"'{key}': expected {sum(described['numels'])} elements on all ranks together, got {flat.numel()}: "
                    "give the files of all ranks of one run"
                )
            parts = flat.split(described["numels"])
            for name, shape, part in zip(described["names"], described["shapes"], parts, strict=True):
                whole[prefix + name] = part.view(tuple(shape))
        for source, other in wrapper["shared_param_info"]:
            if prefix + source in whole:
                whole[prefix + other] = whole[prefix + source]
    if with_module_buffers:
        for name in first["buffer_names"]:
            if name in shard_weights[0] or strict:
                whole[name] = shard_weights[0][name]
    return whole


def _without_padding(key: str, entry: str, weights: Mapping[str, Any], wrapper: Mapping[str, Any]) -> Tensor:
    """One rank's chunk of a parameter, flat, on the CPU."""
    if key not in weights or entry not in wrapper["params"]:
        raise ValueError(
            f"'{key}' is missing in the weights or the metadata of a rank: give those of all ranks of one run, or "
            "strict=False to leave out what the first one lacks"
        )
    chunk: Tensor = weights[key].detach().to("cpu").reshape(-1)
    return chunk[: chunk.numel() - wrapper["params"][entry]["padding"]]


__all__ = ["consolidate_shard_weights", "param_metadata"]
