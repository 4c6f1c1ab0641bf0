"""`param_metadata` of `local_metadata_dict`: which parameters each wrapper's shards hold, in FairScale's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scale_fsdp.runtime.unit import Unit


def param_metadata(units: Iterable[tuple[str, Unit, bool]], own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an entry for each wrapper, the outermost first.

    Args:
        units: Of each wrapper its path, its unit, and `no_broadcast_optim_state`.
        own: What scale-fsdp says of their parameters.
    """
    metadata: list[dict[str, Any]] = []
    for path, unit, no_broadcast in units:
        params: dict[str, dict[str, list[Any]]] = {}
        shared: list[tuple[str, str]] = []
        buffer_ids = {id(buffer) for buffer in unit.buffers}
        paths = {id(child): name for name, child in unit.module.named_modules()}
        for slot in unit.slots:
            if id(slot.buffer) not in buffer_ids or id(slot.module) not in paths:
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
        metadata.append(
            {
                "fsdp_path": path,
                "params": params,
                "no_broadcast_optim_state": no_broadcast,
                "shared_param_info": shared,
            }
        )
    return metadata


__all__ = ["param_metadata"]
