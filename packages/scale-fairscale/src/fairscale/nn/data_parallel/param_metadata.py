"""`param_metadata` of `local_metadata_dict`: which parameters each wrapper's shards hold, in FairScale's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel


def param_metadata(model: FullyShardedDataParallel, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an entry for each wrapper, the outermost first.

    Args:
        model: The outermost one.
        own: What scale-fsdp says of its parameters.
    """
    from fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel

    found: list[dict[str, Any]] = []
    for path, wrapper in model.named_modules():
        if not isinstance(wrapper, FullyShardedDataParallel):
            continue
        params: dict[str, dict[str, list[Any]]] = {}
        held = {id(buffer) for buffer in wrapper._unit.buffers}
        paths = {id(child): name for name, child in wrapper.sharded_module.named_modules()}
        for slot in wrapper._unit.slots:
            if id(slot.buffer) not in held or id(slot.module) not in paths:
                continue
            name = f"{paths[id(slot.module)]}.{slot.attribute}".lstrip(".")
            described = own["parameters"].get(f"{path}.{name}".lstrip("."))
            if described is None:  # Another name of a tied one.
                continue
            backing = described["entry"].removeprefix(f"{path}.") if path else described["entry"]
            entry = params.setdefault(backing, {"names": [], "shapes": [], "numels": [], "padding": []})
            numel = slot.buffer.layout.entries[slot.number].numel
            entry["names"].append(name)
            entry["shapes"].append(tuple(described["shape"]))
            entry["numels"].append(numel)
            entry["padding"].append(0)
        found.append(
            {
                "fsdp_path": path,
                "params": params,
                "no_broadcast_optim_state": wrapper.no_broadcast_optim_state,
                "shared_param_info": [(name, first) for name, first in own["tied"].items() if name.startswith(path)],
            }
        )
    return found


__all__ = ["param_metadata"]
