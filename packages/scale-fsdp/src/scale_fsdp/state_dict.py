"""Full tensors under plain names: what `state_dict()` gives and `load_state_dict()` takes.

A sharded module's state dict is that of the plain module, and loads into it; the other way round each rank takes its
own piece out of the full tensors and nothing is sent.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from scale_fsdp.unit import Slot, Unit, flat_name_of, paths_in, unit_of


def hook_state_dict(module: nn.Module) -> None:
    """Makes the state dict of `module` and of whatever holds it one of full tensors."""
    module.register_state_dict_post_hook(_make_whole)
    module.register_load_state_dict_pre_hook(_take_pieces)


def _make_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    unit = unit_of(module)
    assert unit is not None
    places = _names_in(module, unit, prefix)
    for number, buffer in enumerate(unit.buffers):
        # All ranks gather every buffer, whichever of its names this caller keeps.
        wholes = unit.gather_whole(buffer)
        for name, slot in places:
            if slot.buffer is buffer and (name in state_dict or buffer.flatten):
                state_dict[name] = wholes[slot.number].clone()
        if buffer.flatten:
            state_dict.pop(prefix + flat_name_of(number), None)
    for name, slot in places:
        if slot.buffer not in unit.buffers and (name in state_dict or slot.buffer.flatten):
            state_dict[name] = unit.gather_whole(slot.buffer)[slot.number].clone()


def _take_pieces(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    unit = unit_of(module)
    assert unit is not None
    if local_metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            "load_state_dict(assign=True) would replace the local shards: call load_state_dict(state_dict)"
        )
    for buffer in unit.buffers:
        buffer.release()  # What was gathered before is not true any more.
    for name, slot in _names_in(module, unit, prefix):
        entry, span = slot.buffer.layout.entries[slot.number], slot.buffer.spans[slot.number]
        whole = state_dict.get(name)
        if whole is None:
            if slot.buffer.flatten:
                missing_keys.append(name)
            continue
        if not isinstance(whole, Tensor):
            error_msgs.append(f"'{name}': expected a tensor of shape {entry.shape}, got {type(whole).__name__}")
            state_dict[name] = slot.buffer.pieces[slot.number]
        elif tuple(whole.shape) != entry.shape:
            error_msgs.append(
                f"size mismatch for {name}: expected the full shape {entry.shape}, got {tuple(whole.shape)}"
            )
            state_dict[name] = slot.buffer.pieces[slot.number]
        elif slot.buffer.flatten:
            slot.buffer.load(slot.number, state_dict.pop(name))
        else:
            state_dict[name] = whole.detach().reshape(-1)[span.start : span.stop].view(span.shape)
    for number, buffer in enumerate(unit.buffers):
        if buffer.flatten:
            state_dict[prefix + flat_name_of(number)] = buffer.exposed[0]  # Its pieces are loaded already.


def _names_in(module: nn.Module, unit: Unit, prefix: str) -> list[tuple[str, Slot]]:
    """The unit's parameters by their names in a state dict in which `module` stands under `prefix`."""
    paths = paths_in(module)
    named = []
    for slot in unit.slots:
        path = paths[id(slot.module)]
        named.append((prefix + (f"{path}.{slot.attribute}" if path else slot.attribute), slot))
    return named
