"""What torch's own functions for state see of an optimizer that steps on shards.

`torch.distributed.checkpoint.state_dict` takes every tensor of an optimizer for a whole one, or for a DTensor, and a
shard's state is neither: that of one rank would be saved under the parameter's name and all others lost, without a
word. So an optimizer that is seen to work on shards is given two hooks of torch's: asked by those functions it says of
each tensor which elements it has, or makes it whole where they want that, and whatever it loads it cuts to its own. A
flat parameter is none that the functions could name, so for such it raises.

To everybody else its `state_dict()` is this rank's part, which says so under `SHARDS`, in plain numbers and text. It is
loaded where the same elements are held, and refused elsewhere, on all ranks.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group
from scale_core.shard import Held, Shard, elements_of, names_of_stages, shard_of, stages_of
from scale_core.state.param_ownership import flat_buffer_of, is_number

SHARDS = "shards"
"""The key of a `state_dict()` that is one rank's part: its "rank", "world_size" and, in the order of the parameters,
what is held of each: (name, shape, start, stop, ranges), or None of a whole one; see `scale_core.Shard`."""

_ASKS = "torch.distributed.checkpoint.state_dict"
_SAVES = ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader")
_BETWEEN = (
    "torch.optim",
    "torch.nn",
    "torch._dynamo",
    "torch._compile",
    "torch.utils",
    "scale_core",
    "scale_fsdp",
    "scale_tp",
    "scale_adascale",
)

# How many parameters each optimizer had when it was looked at; it may be given more.
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def view(optimizer: Any, loads: Any = None) -> None:
    """Gives an optimizer the hooks, if it has none yet, and works on shards or is about to load a part.

    Args:
        optimizer: What is no optimizer is left alone.
        loads: The state dict that it is about to load.
    """
    if not isinstance(optimizer, Optimizer):
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    is_part = isinstance(loads, Mapping) and SHARDS in loads
    if _with_ranges in optimizer._optimizer_state_dict_post_hooks.values() or (
        _seen.get(optimizer) == count and not is_part
    ):
        return
    _seen[optimizer] = count
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if is_part or any(shard_of(param) is not None for param in params) or (params and stages_of(params)):
        optimizer.register_state_dict_post_hook(_with_ranges)
        optimizer.register_load_state_dict_pre_hook(_with_own_elements)


@functools.cache
def view_all() -> None:
    """Gives the hooks to every optimizer at its first step on shards; once is enough.

    torch's functions let an optimizer step, with gradients of zero, before they ask for its state or load it.
    """
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: view(optimizer))


class Asked(NamedTuple):
    """What torch's checkpoint functions want of a `state_dict()`.

    Attributes:
        whole: Whole tensors (`full_state_dict=True`).
        on_host: On the host and, where they are whole, on global rank 0 alone (`cpu_offload=True`).
    """

    whole: bool = False
    on_host: bool = False

    @property
    def keeps(self) -> bool:
        """Whether this rank is to get the tensors."""
        return not (self.whole and self.on_host and dist.is_initialized()) or dist.get_rank() == 0


def asked_by_torch() -> Asked | None:
    """What torch's checkpoint functions want, if they have called the `state_dict()` that runs now, or else None.

    Nobody tells it who did, so that is read off the stack, and so are the options.
    """
    frame = _asking(sys._getframe(1))
    if frame is None or frame.f_globals.get("__name__") != _ASKS:
        return None
    options = frame.f_locals.get("info")
    return Asked(getattr(options, "full_state_dict", False), getattr(options, "cpu_offload", False))


def saved_by_torch() -> bool:
    """Whether `dcp.save` or `dcp.load` was given the module itself, and has called the `state_dict()` that runs now."""
    frame = _asking(sys._getframe(1))
    return frame is not None and frame.f_globals.get("__name__") in _SAVES


def _asking(frame: FrameType | None) -> FrameType | None:
    """The first caller that is neither a module's nor an optimizer's own machinery."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _with_ranges(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Says of each tensor which elements it has, where torch's checkpoint functions ask, or makes it whole.

    To others it says so beside the tensors.

    Raises:
        RuntimeError: They do, and a flat parameter is among those that the optimizer steps on.
        ScaleDistributedError: They want whole tensors, and a rank did something else.
    """
    if _keeps_whole_state(optimizer):
        return None
    asked = asked_by_torch()
    if asked is None:
        params = [param for _, param in _numbered(optimizer, state_dict)]
        names = _names_in_stages(params)
        held = tuple(_held(param, names.get(param)) for param in params)
        if not any(held):
            return None
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return {**state_dict, SHARDS: {"rank": rank, "world_size": world_size, "held": held}}
    for _, param in _numbered(optimizer, state_dict):
        shard = shard_of(param)
        if shard is not None and flat_buffer_of(param) is not None:
            raise RuntimeError(
                f"'{shard.name}' is a flat parameter, which holds several, and torch's checkpoint functions know one "
                "tensor for each: call model.gather_full_optim_state_dict(optimizer) and "
                "model.get_shard_from_optim_state_dict(full, optimizer), or scale_core.state.sharded_state_dict(model, "
                "optimizer) for torch.distributed.checkpoint.save"
            )
    from scale_core.state.chunks import LocalShard  # Loads torch's checkpoint package, which is there by now.

    def label(key: str, value: Tensor, param: Tensor, shard: Shard) -> Tensor:
        if is_number(key, value.shape, shard.shape):
            return value
        if value.shape != param.shape:
            raise RuntimeError(
                f"optimizer state {shard.name}.{key} has shape {tuple(value.shape)}, expected the shard's "
                f"{tuple(param.shape)} or a number: this optimizer needs whole parameters, so it can't step on shards"
            )
        place = (shard.shape, shard.start, shard.stop, shard.ranges)
        return LocalShard(value.detach().contiguous(), *place, written=shard.written)

    labelled = _changed(optimizer, state_dict, label)
    return _made_whole(optimizer, labelled, asked) if asked.whole else labelled


def _made_whole(optimizer: Optimizer, state_dict: dict[str, Any], asked: Asked) -> dict[str, Any]:
    from scale_core.state.full_tensor import Slots, whole_slots  # Loads torch's checkpoint package, too.

    given = {
        number: Slots(shard, param.device, state_dict["state"].get(number, {}))
        for number, param in _numbered(optimizer, state_dict)
        if (shard := shard_of(param)) is not None
    }
    whole = whole_slots(list(given.values()), keeps=asked.keeps, on_host=asked.on_host)
    slots = {number: values for number, values in zip(given, whole, strict=True) if values}
    return {**state_dict, "state": {**state_dict["state"], **slots}}


def _with_own_elements(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Takes this rank's elements out of what knows its range, and out of whole tensors.

    Raises:
        ValueError: A tensor has other elements than this rank needs, on all ranks if it is so on one.
    """
    if _keeps_whole_state(optimizer):
        return None
    if SHARDS in state_dict:
        _check_held(optimizer, state_dict)
        state_dict = _without_shards(state_dict)
    boxes = sys.modules.get("scale_core.state.chunks")  # Without it nobody can have made such a thing.

    def cut(key: str, value: Tensor, param: Tensor, shard: Shard) -> Tensor:
        if boxes is not None and isinstance(value, boxes.LocalShard):
            held = (shard.start, shard.stop, shard.ranges)
            if (value.start, value.stop, value.ranges) != held or tuple(value.shape) != shard.shape:
                raise ValueError(
                    f"optimizer state {shard.name}.{key}: expected the elements [{shard.start}, {shard.stop}) of "
                    f"{shard.shape}, got [{value.start}, {value.stop}) of {tuple(value.shape)}: load it by "
                    "torch.distributed.checkpoint.load, which exchanges them"
                )
            local: Tensor = value.tensor
            return local.view(param.shape)
        if is_number(key, value.shape, shard.shape) or value.shape == param.shape:
            return value
        if tuple(value.shape) == shard.shape:
            return elements_of(value.detach(), shard.start, shard.stop, shard.ranges).view(param.shape)
        if shard.stop - shard.start < shard.numel:
            raise ValueError(
                f"optimizer state {shard.name}.{key}: expected the whole {shard.shape} or this rank's part "
                f"{tuple(param.shape)}, got {tuple(value.shape)}: {_WHAT_TO_LOAD}"
            )
        return value

    return _changed(optimizer, state_dict, cut)


_WHAT_TO_LOAD = (
    "load on each rank what this rank has saved; or save what loads at any number of ranks: "
    "scale_core.state.sharded_state_dict(model, optimizer), by scale_core.snapshot.save_snapshot or "
    "torch.distributed.checkpoint.save; with scale-fsdp also model.gather_full_optim_state_dict(optimizer), loaded by "
    "optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full, optimizer))"
)


def _names_in_stages(params: Sequence[Tensor]) -> dict[Tensor, str]:
    """Of parameters that stand on this rank of a pipeline alone, their names in the whole model."""
    found: dict[Tensor, str] = {}
    for model in stages_of(params) if params else ():
        found |= names_of_stages(model)
    return found


def _keeps_whole_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `state_dict()` is the whole state, although its parameters are shards, as that of OSS."""
    return hasattr(optimizer, "state_holding")


def _held(param: Tensor, name: str | None) -> tuple[Any, ...] | None:
    """What `SHARDS` says of a parameter, and what it is called in a pipeline."""
    shard = shard_of(param)
    if shard is not None:
        return name or shard.name, shard.shape, shard.start, shard.stop, shard.ranges
    return None if name is None else (name, tuple(param.shape), 0, param.numel(), ())


def _check_held(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuses one rank's part of a state on a rank that holds other elements.

    Raises:
        ValueError: It is such; on all ranks that share the parameters, if on one.
    """
    saved, params = state_dict[SHARDS], [param for _, param in _numbered(optimizer, state_dict)]
    names = _names_in_stages(params)
    differing = [
        (has, param)
        for has, param in zip(saved["held"], params, strict=False)
        if has is not None and not (names.get(param, has[0]) == has[0] and _fits(has, param))
    ]
    shards = [shard for param in params if (shard := shard_of(param)) is not None]
    groups: dict[Group, None] = {axis.group: None for shard in shards for axis in shard.axes if axis.held is Held.SHARD}
    groups.update(dict.fromkeys(model.group for model in stages_of(params)) if params else {})
    # With every group, whatever the first one says: the others wait for it.
    told = [(group, exchange([len(differing)], group)) for group in groups if group.process_group is not None]
    others = any(row[0] and rank != group.rank for group, rows in told for rank, row in enumerate(rows))
    of = f"rank {saved['rank']} of {saved['world_size']}"
    if differing:
        (name, shape, start, stop, _), param = differing[0]
        shard = shard_of(param)
        here = f"all of {tuple(param.shape)}" if shard is None else f"[{shard.start}, {shard.stop}) of {shard.shape}"
        here = f"'{names[param]}', {here}" if param in names else here
        raise ValueError(
            f"this optimizer state is the part of {of}, and this rank holds other elements: it has [{start}, {stop}) "
            f"of '{name}' {shape}, and in its place here is {here}: {_WHAT_TO_LOAD}"
        )
    if others:
        raise ValueError(
            f"this optimizer state is the part of {of}. It fits this rank, but not all others, which were given a part "
            f"that is not theirs: {_WHAT_TO_LOAD}"
        )


def _fits(saved: Sequence[Any], param: Tensor) -> bool:
    """Whether a state of the elements `saved`, an entry of `SHARDS`, can be loaded for a parameter."""
    _, shape, start, stop, ranges = saved
    shard = shard_of(param)
    if shard is not None and (shape, start, stop, ranges) == (shard.shape, shard.start, shard.stop, shard.ranges):
        return True
    is_whole = (start, stop, ranges) == (0, math.prod(shape), ())
    full = tuple(param.shape) if shard is None else shard.shape
    return is_whole and shape == full and flat_buffer_of(param) is None


def _without_shards(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a plain one; where one rank had all elements of a parameter, its tensors have the whole's shape."""
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    state = dict(state_dict["state"])
    for number, has in zip(numbers, state_dict[SHARDS]["held"], strict=False):
        if has is None or number not in state or has[2:] != (0, math.prod(has[1]), ()):
            continue
        state[number] = {
            key: value.view(has[1]) if isinstance(value, Tensor) and value.shape == (has[3],) else value
            for key, value in state[number].items()
        }
    return {**{key: value for key, value in state_dict.items() if key != SHARDS}, "state": state}


def _changed(
    optimizer: Optimizer, state_dict: Mapping[str, Any], change: Callable[[str, Tensor, Tensor, Shard], Tensor]
) -> dict[str, Any]:
    """The state with each tensor of a shard changed, of flat ones none; the given one stays as it is."""
    state = dict(state_dict["state"])
    for number, param in _numbered(optimizer, state_dict):
        shard = shard_of(param)
        if number not in state or shard is None or flat_buffer_of(param) is not None:
            continue
        state[number] = {
            key: change(key, value, param, shard) if isinstance(value, Tensor) else value
            for key, value in state[number].items()
        }
    return {**state_dict, "state": state}


def _numbered(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yields each parameter with what stands for it in the state dict: a number, or a name."""
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(saved["params"], group["params"], strict=False)
