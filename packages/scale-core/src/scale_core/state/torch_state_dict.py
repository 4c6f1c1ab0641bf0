"""Optimizer state of shards for torch's own functions: `optimizer.state_dict()` and `get_state_dict`.

`torch.distributed.checkpoint.state_dict` takes every tensor of an optimizer for a full one, or for a DTensor, and a
shard's state is neither: one rank's would be saved under the parameter's name and all others silently lost. So an
optimizer on shards gets three hooks of torch: for those functions the first makes each tensor a `LocalShard`, or a full
tensor; the second cuts loaded tensors to this rank's elements; the third makes loaded state sharded. A flat parameter
has no name in those functions, so it raises. For all others `state_dict()` is this rank's shard, described under
`SHARDS` in plain numbers and text; it is loaded where the same elements are held, and refused elsewhere, on all ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from scale_core.comm.collectives import HOST, exchange
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event
from scale_core.flat.packing import group_in_buckets
from scale_core.optim.step_hooks import mark_state
from scale_core.optim.traits import is_known_elementwise, is_per_param_number
from scale_core.shard import Placement, Shard, elements_of, names_of_stages, on_local_tensors, shard_of, stages_of
from scale_core.sharded_tensor.full_tensor import Part, gather_full_param, gather_parts
from scale_core.sharded_tensor.tensor import is_sharded
from scale_core.state.full_optim_state import ParamState, gather_optim_states
from scale_core.state.param_ownership import (
    ParamSlice,
    flat_buffer_of,
    not_elementwise,
    param_slices,
)
from scale_core.tree import map_tensors

SHARDS = "shards"
"""The key of a `state_dict()` that is one rank's shard: its "rank", "world_size" and, in the order of the parameters,
what is held of each: (name, shape, start, stop, ranges), or None of a whole one; see `scale_core.shard.Shard`."""

_BUCKET_NUMEL = 25_000_000  # Elements that are on a device at a time while they are gathered
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
    "fairscale.",
)


@on_local_tensors
def install_hooks(optimizer: Any, *, refuses_parts: bool = False) -> None:
    """Registers the state-dict hooks of an optimizer on shards, once; of another one, that it refuses a part."""
    if not isinstance(optimizer, Optimizer):
        return
    if _with_ranges in optimizer._optimizer_state_dict_post_hooks.values():
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_sharded_here = any(shard_of(param) is not None for param in params) or bool(params and stages_of(params))
    has_load_hook = _with_own_elements in optimizer._optimizer_load_state_dict_pre_hooks.values()
    if not has_load_hook and (is_sharded_here or refuses_parts):
        optimizer.register_load_state_dict_pre_hook(_with_own_elements)
    if is_sharded_here:
        optimizer.register_state_dict_post_hook(_with_ranges)
        optimizer.register_load_state_dict_post_hook(_mark_loaded)


def _mark_loaded(optimizer: Optimizer) -> None:
    """Load hook: a tensor loaded for a shard is sharded, as the optimizer's own state."""
    if not (is_known_elementwise(type(optimizer)) or _keeps_whole_state(optimizer)):
        for param, values in optimizer.state.items():
            if is_sharded(param):
                mark_state(param, values)


class StateDictRequest(NamedTuple):
    """The options of torch's checkpoint functions."""

    whole: bool = False  # Full tensors (`full_state_dict=True`)
    on_host: bool = False  # On the host and, if they are full, on global rank 0 alone (`cpu_offload=True`)

    @property
    def keeps(self) -> bool:
        """Whether this rank gets the tensors."""
        return not (self.whole and self.on_host and dist.is_initialized()) or dist.get_rank() == 0

    def keeps_with(self, group: Group) -> bool:
        """Whether a rank of this one's group gets them."""
        return not (self.whole and self.on_host and dist.is_initialized()) or 0 in group.ranks


def torch_request() -> StateDictRequest | None:
    """The options of torch's checkpoint functions, if they have called the current `state_dict()`, or None."""
    # torch passes nothing to `state_dict()`, so its caller and the options are read off the stack. Without them the
    # shards of one rank would be saved as full tensors.
    frame = _outer_caller(sys._getframe(1))
    if frame is None or frame.f_globals.get("__name__") != _ASKS:
        return None
    options = frame.f_locals.get("info")
    return StateDictRequest(getattr(options, "full_state_dict", False), getattr(options, "cpu_offload", False))


def saved_by_torch() -> bool:
    """Whether `dcp.save` or `dcp.load` was given the module itself and has called the current `state_dict()`."""
    frame = _outer_caller(sys._getframe(1))
    return frame is not None and frame.f_globals.get("__name__") in _SAVES


def _outer_caller(frame: FrameType | None) -> FrameType | None:
    """The first caller outside of the machinery of modules and optimizers."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame


@on_local_tensors
def _with_ranges(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """State-dict hook: `LocalShard`s or full tensors for torch's checkpoint functions, `SHARDS` for others."""
    # To others it says so next to the tensors.
    if _keeps_whole_state(optimizer):
        return None
    request = torch_request()
    if request is None:
        params = [param for _, param in _params_by_key(optimizer, state_dict)]
        names = _names_in_stages(params)
        entries = tuple(_shard_entry(param, names.get(param)) for param in params)
        if not any(entries):
            return None
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return {**state_dict, SHARDS: {"rank": rank, "world_size": world_size, "held": entries}}
    for _, param in _params_by_key(optimizer, state_dict):
        shard = shard_of(param)
        if shard is not None and flat_buffer_of(param) is not None:
            raise RuntimeError(
                f"'{shard.name}' is a flat parameter, which holds several, and torch's checkpoint functions know one "
                "tensor for each: call scale_fsdp.full_optim_state_dict(model, optimizer) and "
                "scale_fsdp.shard_optim_state_dict(full, model, optimizer), or "
                "scale_core.state.sharded_state_dict(model, optimizer) for torch.distributed.checkpoint.save"
            )
    from scale_core.state.local_shard import LocalShard  # Loads torch's checkpoint package, which is there by now.

    def label(key: str, value: Tensor, param: Tensor, shard: Shard) -> Tensor:
        if is_per_param_number(key, value.shape, shard.shape):
            return value
        if value.shape != param.shape:
            raise not_elementwise(f"{shard.name}.{key}", value.shape, param.shape)
        location = (shard.shape, shard.start, shard.stop, shard.ranges)
        return LocalShard(value.detach().contiguous(), *location, written=shard.written)

    labelled = _map_shards(optimizer, state_dict, label)
    return _made_whole(optimizer, state_dict, labelled, request) if request.whole else labelled


def _made_whole(
    optimizer: Optimizer, state_dict: dict[str, Any], labelled: dict[str, Any], asked: StateDictRequest
) -> dict[str, Any]:
    by_axes: dict[_Axes, dict[Any, ParamSlice]] = {}
    for number, param in _params_by_key(optimizer, state_dict):
        for holding in () if shard_of(param) is None else param_slices(param, ""):
            by_axes.setdefault(_axes_of(holding), {})[number] = holding
    state = dict(labelled["state"])
    for (group, other), slices in by_axes.items():
        contract = Contract(group)
        local_parts = [(holding.name, Part(holding.start, holding.stop, holding.ranges)) for holding in slices.values()]
        parts = gather_parts(local_parts, contract, Event("optimizer state", ""))
        keeps = asked.keeps if other is None else asked.keeps_with(other)
        states = []
        for (number, holding), its_parts in zip(slices.items(), parts, strict=True):
            values = state_dict["state"].get(number, {})
            its = (holding, its_parts) if other is None else _within_piece(holding, its_parts)
            states.append(ParamState(its[0], group, its[1], holding.owner.device, values))
        device = HOST if asked.on_host and other is None else None
        for run in group_in_buckets([math.prod(state.held.shape) for state in states], _BUCKET_NUMEL):
            bucket = [states[index] for index in run]
            full_states = gather_optim_states(bucket, contract, keeps=keeps, device=device)
            for state_index, values in zip(run, full_states, strict=False):
                number = list(slices)[state_index]
                if other is not None:
                    its_piece = _Piece(slices[number], tuple(states[state_index].held.shape), parts[state_index], other)
                    values = {key: map_tensors(its_piece.whole, value) for key, value in values.items()}
                if values and asked.keeps:
                    state[number] = map_tensors(Tensor.cpu, values) if asked.on_host else values
    return {**labelled, "state": state}


class _Axes(NamedTuple):
    """The ranks between which a parameter is cut: the ranks of a unit, and along another axis the ranks of a layer."""

    group: Group
    other: Group | None


def _axes_of(holding: ParamSlice) -> _Axes:
    shard = shard_of(holding.owner)
    assert shard is not None
    groups = shard.divided_groups
    if len(groups) > 2:
        raise RuntimeError(
            f"the optimizer state of '{shard.name}' is cut along {len(groups)} axes of the mesh, and gathered "
            "along 2 at most: take scale_core.state.sharded_state_dict(model, optimizer) for "
            "torch.distributed.checkpoint.save"
        )
    return _Axes(groups[0] if groups else Group(), groups[1] if len(groups) > 1 else None)


def _within_piece(holding: ParamSlice, parts: Sequence[Part]) -> tuple[ParamSlice, list[Part]]:
    """The elements of the ranks of a unit in the flat piece that they have together."""
    first = _first_of(parts)
    within = [part._replace(start=part.start - first, stop=part.stop - first, ranges=()) for part in parts]
    shape = (max(part.stop for part in within),)
    start, stop = holding.start - first, holding.stop - first
    return replace(holding, shape=shape, start=start, stop=stop, ranges=()), within


def _first_of(parts: Sequence[Part]) -> int:
    return min((part.start for part in parts if part.numel), default=parts[0].start)


class _Piece(NamedTuple):
    """The common part of a unit's ranks of a parameter that ranks along another axis divide."""

    holding: ParamSlice
    shape: tuple[int, ...]  # Flat
    parts: Sequence[Part]  # Of its ranks
    other: Group

    def whole(self, tensor: Tensor) -> Tensor:
        """The full tensor of a state that is this piece of it; numbers are as they are."""
        if tuple(tensor.shape) != self.shape:
            return tensor
        shard = shard_of(self.holding.owner)
        assert shard is not None
        first = _first_of(self.parts)
        return gather_full_param(tensor, replace(shard, start=first, stop=first + tensor.numel()), self.other)


@on_local_tensors
def _with_own_elements(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Load hook: takes this rank's elements out of `LocalShard`s and full tensors."""
    if _keeps_whole_state(optimizer):
        return None
    if SHARDS in state_dict:
        _check_shards(optimizer, state_dict)
        state_dict = _without_shards(state_dict)
    module = sys.modules.get("scale_core.state.local_shard")  # Not imported: there are no such tensors.

    def cut(key: str, value: Tensor, param: Tensor, shard: Shard) -> Tensor:
        if module is not None and isinstance(value, module.LocalShard):
            current = (shard.start, shard.stop, shard.ranges)
            if (value.start, value.stop, value.ranges) != current or tuple(value.shape) != shard.shape:
                raise ValueError(
                    f"optimizer state {shard.name}.{key}: expected the elements [{shard.start}, {shard.stop}) of "
                    f"{shard.shape}, got [{value.start}, {value.stop}) of {tuple(value.shape)}: load it by "
                    "torch.distributed.checkpoint.load, which exchanges them"
                )
            local: Tensor = value.tensor
            return local.view(param.shape)
        if is_per_param_number(key, value.shape, shard.shape) or value.shape == param.shape:
            return value
        if tuple(value.shape) == shard.shape:
            return elements_of(value.detach(), shard.start, shard.stop, shard.ranges).view(param.shape)
        if shard.stop - shard.start < shard.numel:
            raise ValueError(
                f"optimizer state {shard.name}.{key}: expected the full {shard.shape} or this rank's shard "
                f"{tuple(param.shape)}, got {tuple(value.shape)}: {_WHAT_TO_LOAD}"
            )
        return value

    return _map_shards(optimizer, state_dict, cut)


_WHAT_TO_LOAD = (
    "load on each rank what this rank has saved; or save what loads at any number of ranks: "
    "scale_core.state.sharded_state_dict(model, optimizer), by scale_snapshot.save_snapshot or "
    "torch.distributed.checkpoint.save; with scale-fsdp also full_optim_state_dict(model, optimizer), loaded by "
    "optimizer.load_state_dict(shard_optim_state_dict(full, model, optimizer))"
)


def _names_in_stages(params: Sequence[Tensor]) -> dict[Tensor, str]:
    """The names in the full model of parameters in this rank's pipeline stages."""
    names: dict[Tensor, str] = {}
    for model in stages_of(params) if params else ():
        names |= names_of_stages(model)
    return names


def _keeps_whole_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer on shards has the full state in its `state_dict()`, as OSS."""
    return hasattr(optimizer, "sharded_state")


def _shard_entry(param: Tensor, name: str | None) -> tuple[Any, ...] | None:
    """The entry of a parameter in `SHARDS`; `name` is that in a pipeline."""
    shard = shard_of(param)
    if shard is not None:
        return name or shard.name, shard.shape, shard.start, shard.stop, shard.ranges
    return None if name is None else (name, tuple(param.shape), 0, param.numel(), ())


def _check_shards(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuses one rank's shard of a state on a rank that holds other elements."""
    saved, params = state_dict[SHARDS], [param for _, param in _params_by_key(optimizer, state_dict)]
    names = _names_in_stages(params)
    differing = [
        (has, param)
        for has, param in zip(saved["held"], params, strict=False)
        if has is not None and not (names.get(param, has[0]) == has[0] and _fits(has, param))
    ]
    shards = [shard for param in params if (shard := shard_of(param)) is not None]
    groups: dict[Group, None] = {
        axis.group: None for shard in shards for axis in shard.axes if axis.placement is Placement.SHARD
    }
    groups.update(dict.fromkeys(model.group for model in stages_of(params)) if params else {})
    # With every group, whatever the first one says: the others wait for it.
    rows_by_group = [(group, exchange([len(differing)], group)) for group in groups if group.process_group is not None]
    others = any(row[0] and rank != group.rank for group, rows in rows_by_group for rank, row in enumerate(rows))
    saved_rank = f"rank {saved['rank']} of {saved['world_size']}"
    if differing:
        (name, shape, start, stop, _), param = differing[0]
        shard = shard_of(param)
        expected = (
            f"all of {tuple(param.shape)}" if shard is None else f"[{shard.start}, {shard.stop}) of {shard.shape}"
        )
        expected = f"'{names[param]}', {expected}" if param in names else expected
        raise ValueError(
            f"this optimizer state is the shard of {saved_rank}, and this rank holds other elements: it has [{start}, "
            f"{stop}) of '{name}' {shape}, and in its place here is {expected}: {_WHAT_TO_LOAD}"
        )
    if others:
        raise ValueError(
            f"this optimizer state is the shard of {saved_rank}. It fits this rank, but not all others, which were "
            f"given another rank's shard: {_WHAT_TO_LOAD}"
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
    """The state as a plain one; where one rank had all elements of a parameter, in its full shape."""
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


def _map_shards(
    optimizer: Optimizer, state_dict: Mapping[str, Any], change: Callable[[str, Tensor, Tensor, Shard], Tensor]
) -> dict[str, Any]:
    """A copy of the state with each tensor of a shard changed, of flat parameters none."""
    state = dict(state_dict["state"])
    for number, param in _params_by_key(optimizer, state_dict):
        shard = shard_of(param)
        if number not in state or shard is None or flat_buffer_of(param) is not None:
            continue
        state[number] = {
            key: change(key, value, param, shard) if isinstance(value, Tensor) else value
            for key, value in state[number].items()
        }
    return {**state_dict, "state": state}


def _params_by_key(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yields each parameter with its key in the state dict: a number, or a name."""
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(saved["params"], group["params"], strict=False)
