"""`consolidate_shard_weights`: full weights from each rank's shards, also from those that FairScale has saved.

The files that FairScale wrote describe shards by `param_metadata` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scale_fsdp.state_dict.local import consolidate_shards


def consolidate_shard_weights(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, Any]:
    """The plain model's state dict, on the CPU, from each rank's `local_state_dict()` and `local_metadata_dict()`.

    Args:
        shard_weights: The weights of each rank, as FairScale has saved them, in the order of the ranks.
        shard_metadata: The metadata of each rank, in the same order.
        with_module_buffers: With the module's buffers, which are taken from the first rank.
        strict: Every parameter must be there; otherwise parameters that the first rank lacks are left out.

    Raises:
        ValueError: They are not one for each rank, or of different models; a parameter is missing, or is another one on
            each rank, as an expert.
    """
    if not shard_weights or len(shard_weights) != len(shard_metadata):
        raise ValueError(
            f"Require metadata for each shard and non-empty shards: got {len(shard_weights)} of local_state_dict() and "
            f"{len(shard_metadata)} of local_metadata_dict()"
        )
    if any("parameters" in metadata for metadata in shard_metadata):
        return consolidate_shards(shard_weights, shard_metadata, with_module_buffers, strict)
    first = shard_metadata[0]
    full: dict[str, Any] = {}
    for number in range(len(first["param_metadata"])):
        by_rank = [metadata["param_metadata"][number] for metadata in shard_metadata]
        full.update(_params_of_wrapper(shard_weights, by_rank, strict))
    if with_module_buffers:
        for name in first["buffer_names"]:
            if name in shard_weights[0] or strict:
                full[name] = shard_weights[0][name]
    return full


def _params_of_wrapper(
    shard_weights: Sequence[Mapping[str, Any]], by_rank: Sequence[Mapping[str, Any]], strict: bool
) -> dict[str, Tensor]:
    """The full parameters of one wrapper, of which each rank has an entry of `param_metadata`."""
    wrapper, full = by_rank[0], {}
    prefix = f"{wrapper['fsdp_path']}." if wrapper["fsdp_path"] else ""
    for entry, described in wrapper["params"].items():
        key = prefix + entry
        if not strict and key not in shard_weights[0]:
            continue
        chunks = [
            _without_padding(key, entry, weights, metadata)
            for weights, metadata in zip(shard_weights, by_rank, strict=True)
        ]
        if wrapper["no_broadcast_optim_state"]:  # Each rank has all of it.
            if not all(torch.equal(chunk, chunks[0]) for chunk in chunks):
                raise ValueError(
                    f"'{key}' is another parameter on each rank, as an expert is, and FairScale kept the first "
                    "rank's alone: save model.state_dict() on each rank there, which has its own"
                )
            chunks = chunks[:1]
        for name, param in _split(key, torch.cat(chunks), described):
            full[prefix + name] = param
    for source, other in wrapper["shared_param_info"]:
        if prefix + source in full:
            full[prefix + other] = full[prefix + source]
    return full


def _without_padding(key: str, entry: str, weights: Mapping[str, Any], wrapper: Mapping[str, Any]) -> Tensor:
    """One rank's chunk of a parameter, flat, on the CPU."""
    if key not in weights or entry not in wrapper["params"]:
        raise ValueError(
            f"'{key}' is missing in the weights or the metadata of a rank: give both from all ranks of one "
            "run, or strict=False to leave out the parameters that the first rank lacks"
        )
    chunk: Tensor = weights[key].detach().to("cpu").reshape(-1)
    return chunk[: chunk.numel() - wrapper["params"][entry]["padding"]]


def _split(key: str, flat: Tensor, described: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of a flat one by their names in the wrapper."""
    numels = described["numels"]
    if flat.numel() != sum(numels):
        raise ValueError(
            f"'{key}': expected {sum(numels)} elements on all ranks together, got {flat.numel()}: "
            "give the files of all ranks of one run"
        )
    for name, shape, part in zip(described["names"], described["shapes"], flat.split(numels), strict=True):
        yield name, part.view(tuple(shape))


__all__ = ["consolidate_shard_weights"]
