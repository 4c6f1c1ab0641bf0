"""What a sharded module takes: full tensors, of which each rank keeps its piece, or its own shards as they are.

torch loads module by module and tells in the end what did not fit. Here all that can be compared beforehand is, so that
a state of another model changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.consistency.execution_order import unit_title
from scale_core.shard import elements_of, shard_of
from scale_fsdp import guards as guard
from scale_fsdp.state_dict.naming import all_names, names_in, plain_order
from scale_fsdp.unit import Slot, Unit, flat_name_of, unit_of, units_in

LOCAL = "scale_fsdp.local"
"""The key in torch's metadata of a state dict under which that of one rank alone says whose it is."""

# What stands in a state dict in the place of full tensors already, while it is being loaded.
_pieces: WeakIdKeyDictionary = WeakIdKeyDictionary()

_local: ContextVar[bool] = ContextVar("this rank's own shards are being loaded", default=False)


def load_whole(
    module: nn.Module, plain: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """Loads full tensors into a sharded module by `plain`, the `load_state_dict` of `nn.Module`.

    Raises:
        RuntimeError: What torch would find after it has loaded the rest; nothing has been written then. Or the
            parameters are in use.
        ValueError: `assign` was asked for, or the state is that of one rank alone.
    """
    refuse_assign(assign)
    refuse_in_use(module, "load_state_dict")
    if LOCAL in getattr(state_dict, "_metadata", {}).get("", {}):
        raise ValueError(
            "load_state_dict: expected full tensors, got what local_state_dict() gives of one rank alone: call "
            "load_local_state_dict(state_dict), or consolidate_shard_weights(...) with those of all ranks before"
        )
    if problems := _problems(module, state_dict, strict):
        lines = "".join(f"\n\t{problem}" for problem in problems)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}, of which nothing was loaded:{lines}"
        )
    return plain(state_dict, strict)


@contextmanager
def loading_local() -> Iterator[None]:
    """Inside, a module's `load_state_dict` takes what its parameters are on this rank."""
    token = _local.set(True)
    try:
        yield
    finally:
        _local.reset(token)


def take_pieces(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    *,
    unit: Unit | None = None,
) -> None:
    """What runs before torch loads a module: puts this rank's pieces in the place of full tensors.

    The arguments but the last are those of torch's hooks.

    Args:
        module: A unit's module, or one inside of a unit: that may be loaded past the unit that its parameters are of.
        state_dict: What is loaded; changed.
        prefix: What the module's names begin with in it.
        local_metadata: Says whether `assign` was asked for.
        strict: Not looked at.
        missing_keys: Names of flat parameters' members that are not given are added.
        unexpected_keys: Not looked at.
        error_msgs: What does not fit is added.
        unit: That of a module inside.
    """
    inside = unit is not None
    unit = unit or unit_of(module)
    assert unit is not None
    if inside:
        found = [(prefix + slot.attribute, slot) for slot in unit.slots if slot.module is module]
        named = [(name, slot) for name, slot in found if name in state_dict and state_dict[name] not in _pieces]
        if not named or _local.get():
            return
    else:
        named = names_in(module, unit, prefix)
    refuse_assign(local_metadata.get("assign_to_params_buffers", False))
    refuse_in_use(unit.module, "load_state_dict")
    for buffer in dict.fromkeys([*unit.buffers, *(slot.buffer for _, slot in named)]):
        buffer.release()  # What was gathered before is not true any more.
    if _local.get():
        return
    for name, slot in named:
        _take_piece(state_dict, name, slot, missing_keys, error_msgs)
    for number, buffer in enumerate(() if inside else unit.buffers):
        if buffer.flatten:
            state_dict[prefix + flat_name_of(number)] = buffer.exposed[0]  # Its pieces are loaded already.


def _take_piece(
    state_dict: dict[str, Any], name: str, slot: Slot, missing_keys: list[str], error_msgs: list[str]
) -> None:
    """Puts this rank's piece of one parameter in the place of the full tensor; a flat one is loaded at once."""
    buffer, number = slot.buffer, slot.number
    whole = state_dict.get(name)
    if whole is buffer.exposed_of(number):  # torch.distributed.checkpoint has filled up what was not given.
        del state_dict[name]
        whole = None
    if whole is None:
        if buffer.flatten:
            missing_keys.append(name)
        return
    problem = _misfit(name, whole, slot)
    if problem:
        error_msgs.append(problem)
    if buffer.flatten:
        del state_dict[name]
        if not problem:
            buffer.load(number, whole)
        return
    span = buffer.spans[number]
    piece = buffer.pieces[number] if problem else _piece_of(whole.detach(), slot).view(span.shape)
    state_dict[name] = piece
    _pieces[piece] = None


def _piece_of(whole: Tensor, slot: Slot) -> Tensor:
    """This rank's elements of the full tensor, or of the part of it that the layer has on this rank; one dimension."""
    buffer, span = slot.buffer, slot.buffer.spans[slot.number]
    shard = shard_of(buffer.exposed[slot.number])
    if shard is not None and tuple(whole.shape) == shard.shape:
        return elements_of(whole, shard.start, shard.stop, shard.ranges)
    return whole.reshape(-1)[span.start : span.stop]


def refuse_in_use(module: nn.Module, what: str) -> None:
    """Refuses to change parameters that somebody computes with, or looks at, as a whole; and such as have no memory.

    Raises:
        RuntimeError: That is so.
    """
    units = units_in(module)
    guard.refuse_in_use(units, what)
    for unit in units:
        if any(buffer.is_meta for buffer in unit.buffers):
            raise RuntimeError(
                f"{what}: the parameters of {unit_title(unit.name)} are on the meta device and have no memory yet: "
                "call model.to_empty(device=...) before"
            )


def refuse_assign(assign: bool) -> None:
    """Refuses to put other tensors into the place of the shards.

    Raises:
        ValueError: `assign` was asked for.
    """
    if assign:
        raise ValueError(
            "load_state_dict(assign=True) would replace the local shards: call load_state_dict(state_dict)"
        )


def _problems(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> list[str]:
    """What does not fit, in torch's words; nothing where a module may change the state before it takes it."""
    if not all(_takes_as_given(child) for child in module.modules()):
        return []
    named = all_names(module)
    buffers = dict(_persistent_buffers(module))
    problems = []
    if strict:
        # A state of an old version lacks some buffers by right; only the module itself knows which.
        # torch.distributed.checkpoint fills up what was not given by what the model has.
        if missing := [n for n, slot in named.items() if n not in state_dict or _is_own(slot, state_dict[n])]:
            hidden = any(named[name].buffer.flatten for name in missing)
            # torch's set_model_state_dict(broadcast_from_rank0=True) hands on what it finds in the modules.
            hint = " Where flatten_parameters=True hides names, load the full tensors on every rank." if hidden else ""
            problems.append(f"Missing key(s) in state_dict: {_quoted(missing)}.{hint}")
        known = named.keys() | plain_order(module).keys()
        if unexpected := [name for name in state_dict if name not in known and not _is_flat(name)]:
            problems.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    places: dict[str, Slot | Tensor] = {**named, **buffers}
    for name, place in places.items():
        if name in state_dict and not _is_own(named.get(name), state_dict[name]):
            problem = _misfit(name, state_dict[name], place)
            problems += [problem] if problem else []
    return problems


def _takes_as_given(module: nn.Module) -> bool:
    """Whether a module loads just what it is given: no foreign hook renames it, and its class is not the user's own."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    ours = all(getattr(hook, "func", hook).__module__.startswith("scale_fsdp.") for hook in hooks)
    return ours and type(module)._load_from_state_dict.__module__.startswith("torch.")


def _is_own(slot: Slot | None, value: Any) -> bool:
    return slot is not None and value is slot.buffer.exposed_of(slot.number)


def _is_flat(name: str) -> bool:
    return name.rpartition(".")[2].startswith("flat_param_")


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def _misfit(name: str, value: Any, place: Slot | Tensor) -> str:
    """What is wrong with a value for a parameter or a buffer; "" where nothing is."""
    shape = tuple(place.shape) if isinstance(place, Tensor) else place.buffer.layout.entries[place.number].shape
    shard = None if isinstance(place, Tensor) or place.buffer.flatten else shard_of(place.buffer.exposed[place.number])
    if shard is not None and isinstance(value, Tensor) and tuple(value.shape) == shard.shape:
        return ""  # Of what a layer divides along another axis, the part of this rank is taken.
    if not isinstance(value, Tensor):
        return f"'{name}': expected a tensor of shape {shape}, got {type(value).__name__}"
    if tuple(value.shape) != shape:
        return f"size mismatch for {name}: expected the full shape {shape}, got {tuple(value.shape)}"
    return ""


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
