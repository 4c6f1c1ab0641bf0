"""Full state dict: full tensors under the plain module's names.

Buffer by buffer is gathered, copied where this rank keeps it, and freed. So a device holds the shards, one unit
at most, and the tensors to keep. Loading sends nothing: each rank takes its elements out of the full tensors. So does
a write to the tensors of `model.state_dict()`, which are `GatheredTensor`s.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.dtensor import is_dtensor
from scale_core.flat.buffer import FlatBuffer
from scale_core.shard import Placement, on_local_tensors, shard_of, wait_for
from scale_core.sharded_tensor.full_tensor import gather_full_param, gather_shard
from scale_core.sharded_tensor.tensor import is_sharded, local_tensor
from scale_core.state.gathered_tensor import Gather, GatheredTensor, converted, plain_tensor
from scale_core.state.torch_state_dict import saved_by_torch, torch_request
from scale_fsdp.api import StateDictConfig, resolve_state_dict_config
from scale_fsdp.runtime.checks import check_not_in_use, check_not_replaced
from scale_fsdp.runtime.flattened_parameter import flat_param_name
from scale_fsdp.runtime.param_registry import managed_modules
from scale_fsdp.runtime.unit import ParamSlot, Unit, unit_of, units_in
from scale_fsdp.state_dict.loading import copying_pre_hook, local_elements, shard_pre_hook
from scale_fsdp.state_dict.naming import check_same_ranks, model_group, param_names, plain_order
from scale_fsdp.summon import gather_full_params, with_flat_params


class _BufferGather(Gather[FlatBuffer]):
    """The gather of a flat buffer, whose tensors write to this rank's shard."""

    def __init__(self, unit: Unit, buffer: FlatBuffer) -> None:
        super().__init__(buffer)
        self._unit = weakref.ref(unit)

    def version(self, owner: FlatBuffer) -> int:
        return owner.version

    def local_part(self, owner: FlatBuffer, number: int, full: Tensor) -> tuple[Tensor, Tensor]:
        return local_elements(owner, number, full), owner.pieces[number]

    def load(self, owner: FlatBuffer, number: int, full: Tensor) -> None:
        unit = self._unit()
        check_not_in_use([] if unit is None else [unit], f"a write to '{owner.names[number]}' of a state dict")
        owner.release()
        owner.wait_sent()
        super().load(owner, number, full)


class _SummonedParam(Gather[nn.Module]):
    """A full parameter inside `summon_full_params`, whose memory the state dict shares."""

    reason = (
        "summon_full_params() is over, inside of which state_dict() was called, and the model has its shards again. "
        "Write inside, or call state_dict() outside"
    )

    def __init__(self, slot: ParamSlot) -> None:
        self._attribute = slot.attribute
        super().__init__(slot.module)

    def version(self, owner: nn.Module) -> int:
        param = owner._parameters.get(self._attribute)
        return 0 if param is None else cast(int, param.untyped_storage()._cdata)

    def local_part(self, owner: nn.Module, number: int, full: Tensor) -> tuple[Tensor, Tensor]:
        return full, owner.get_parameter(self._attribute)

    def is_current(self, number: int, full: Tensor) -> bool:
        owner = self._owner()
        return owner is None or self.is_of(owner)


class _GatherOnRank0(Gather[Unit]):
    """The gather of a state dict that only rank 0 has, so that the other ranks would not write."""

    reason = (
        "only rank 0 has this state dict, because of state_dict_on_rank_0_only=True, so the shards of the other ranks "
        "would keep their values. Write on all ranks: with torch.no_grad(), model.summon_full_params(): "
        "param.copy_(value). To change a copy, write value.clone()"
    )

    def version(self, owner: Unit) -> int:
        return 0

    def is_of(self, owner: Unit) -> bool:
        return False

    def is_current(self, number: int, full: Tensor) -> bool:
        return False

    def local_part(self, owner: Unit, number: int, full: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("nothing is written to a part of the ranks")


@dataclass
class _StateDictCall:
    """One call of `state_dict()`, through all modules that it visits."""

    form: StateDictConfig  # device, and whether rank 0 alone gets tensors
    keeps: bool  # this rank gets tensors
    local: bool = False  # this rank's shards in place of full tensors
    copies: bool = False  # tensors that do not write to the model
    # One for all names of a tied parameter; None if not kept.
    full_tensors: dict[tuple[FlatBuffer, int], Tensor | None] = field(default_factory=dict)
    gathers: dict[FlatBuffer, Gather[Any]] = field(default_factory=dict)

    def gather(self, unit: Unit, buffer: FlatBuffer, indices: Iterable[int]) -> None:
        """Gathers a buffer, copies these parameters out of it and frees it; all ranks together."""
        missing = [index for index in dict.fromkeys(indices) if (buffer, index) not in self.full_tensors]
        if missing:
            params, device = gather_full_params(unit, buffer), self.form.device or buffer.shard.device
            if buffer not in self.gathers:
                self.gathers[buffer] = _GatherOnRank0(unit) if self._is_on_rank_0(unit) else _BufferGather(unit, buffer)
            for index in missing:
                full = gather_other_axis(params[index], buffer, index, unit.options.limit_seconds)
                copy = full.to(device, copy=True) if self.keeps else None
                self.full_tensors[buffer, index] = self._writing_to(self.gathers[buffer], copy, buffer, index)

    def show(self, unit: Unit, slot: ParamSlot, param: Tensor) -> Tensor | None:
        """Returns the tensor of a parameter that stands in its module in full, inside `summon_full_params`."""
        buffer, index = slot.buffer, slot.number
        if (buffer, index) not in self.full_tensors:
            is_copy = self.copies or self._is_on_rank_0(unit)
            copy = param.detach().to(self.form.device or param.device, copy=is_copy) if self.keeps else None
            gather = _GatherOnRank0(unit) if self._is_on_rank_0(unit) else _SummonedParam(slot)
            self.full_tensors[buffer, index] = self._writing_to(gather, copy, buffer, index)
        return self.full_tensors[buffer, index]

    def _is_on_rank_0(self, unit: Unit) -> bool:
        return self.form.rank_0_only and unit.options.mesh_info.whole.size > 1

    def _writing_to(self, gather: Gather[Any], full: Tensor | None, buffer: FlatBuffer, index: int) -> Tensor | None:
        if full is None or self.copies:
            return full
        return GatheredTensor.of(full, gather, index, buffer.names[index])

    def finish(self, module: nn.Module, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """The result of the call on this rank, in the order of the plain module."""
        if not self.keeps:
            return OrderedDict()
        gathered = {id(full) for full in self.full_tensors.values()}
        for name, value in state.items():  # buffers, and parameters that are not sharded
            if isinstance(value, Tensor) and id(value) not in gathered:
                state[name] = self._in_form(name, value)
        if isinstance(state, OrderedDict) and _has_flat_params(module):
            for name in plain_order(module, prefix):
                if name in state:
                    state.move_to_end(name)
        return state

    def _in_form(self, name: str, value: Tensor) -> Tensor:
        device = self.form.device or value.device
        return plain_tensor(value).to(device, copy=True) if self.copies else converted(value, name, device=device)


def register_state_dict_hooks(unit: Unit) -> None:
    """Makes the state dict of a unit's modules, of modules around them and inside them, one of full tensors."""
    for module in unit.modules:
        module.register_state_dict_post_hook(_unshard_hook)
        module.register_load_state_dict_pre_hook(shard_pre_hook)
    for inside in {slot.module for slot in unit.slots}.difference(unit.modules):  # for `model.encoder.state_dict()`
        inside.register_state_dict_post_hook(partial(_unshard_inner_hook, unit))
        inside.register_load_state_dict_pre_hook(partial(shard_pre_hook, unit=unit))
    managed = {child for module in unit.modules for _, child in managed_modules(module)}
    for unsharded in managed.difference(unit.modules, (slot.module for slot in unit.slots)):
        if not isinstance(unsharded, torch.jit.ScriptModule):  # It takes no hooks.
            unsharded.register_load_state_dict_pre_hook(copying_pre_hook)


@checked_arguments
@on_local_tensors
def full_state_dict(
    model: nn.Module, *, rank_0_only: bool = False, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Returns the state dict of the plain model: full tensors under plain names. All ranks call it together.

    One unit at a time is gathered, copied to `device` if this rank keeps it, and freed. All tensors are copies, buffers
    as well: unlike the tensors of `model.state_dict()`, a write to them does not change the model.

        >>> import torch
        >>> from scale_fsdp import full_state_dict, fully_shard
        >>> model = fully_shard(torch.nn.Linear(3, 2))
        >>> {name: tuple(tensor.shape) for name, tensor in full_state_dict(model, device="cpu").items()}
        {'weight': (2, 3), 'bias': (2,)}

    Args:
        model: A sharded module, or one that holds such; its `state_dict_*` options do not count here.
        rank_0_only: Only rank 0 of the model's ranks gets the tensors, and the others an empty dict.
        device: Device of the tensors; None is the device of the shards.

    Raises:
        TypeError: `rank_0_only` is not a bool.
        RuntimeError: `rank_0_only`, and a unit is over other ranks than the model.
        ScaleDistributedError: A rank did something else.

    See also: [the guide to state dicts](../guides/saving.md).
    """
    form = resolve_state_dict_config(device, rank_0_only)
    wait_for(*model.parameters())
    if rank_0_only:
        check_same_ranks(model, "full_state_dict(rank_0_only=True)")
    keeps = not rank_0_only or model_group(model).rank == 0
    with _active_call(_StateDictCall(form, keeps, copies=True), model) as call:
        state = model.state_dict()
    return call.finish(model, state, "")


@on_local_tensors
def state_dict_of(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`module.state_dict(*args, **kwargs)` in the module's own form, or as part of the call that runs already."""
    unit = unit_of(module)
    assert unit is not None
    if unit.state_dict_call is not None:
        return plain(*args, **kwargs)
    request = torch_request()
    if _has_flat_params(module) and request is not None:
        raise RuntimeError(
            "get_model_state_dict finds no plain names with flatten_parameters=True: call "
            "scale_fsdp.full_state_dict(model) for full tensors, or scale_core.state.sharded_state_dict(model)"
        )
    form = unit.options.state_dict_config
    if request is not None or saved_by_torch():
        check_same_ranks(module, "state_dict")
    if form.rank_0_only:
        check_same_ranks(module, "state_dict_on_rank_0_only")
    keeps = not form.rank_0_only or model_group(module).rank == 0
    if request is not None and request.whole and request.on_host:  # torch would copy full tensors from the device
        form, keeps = StateDictConfig(torch.device("cpu")), request.keeps
    copies = request is not None and request.whole  # As torch gives them of DTensors.
    return _call_state_dict(_StateDictCall(form, keeps, copies=copies), module, plain, *args, **kwargs)


@on_local_tensors
def local_state_dict_of(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same with this rank's shards in place of full tensors; nothing is sent."""
    with with_flat_params(units_in(module)):
        return _call_state_dict(_StateDictCall(StateDictConfig(), True, local=True), module, plain, *args, **kwargs)


def _call_state_dict(
    call: _StateDictCall,
    module: nn.Module,
    plain: Callable[..., Any],
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> Any:
    with _active_call(call, module):
        state = plain(prefix=prefix, keep_vars=keep_vars)
    state = call.finish(module, state, prefix)
    if destination is None:
        return state
    destination.update(state)
    if hasattr(destination, "_metadata"):
        destination._metadata.update(getattr(state, "_metadata", {}))
    return destination


@on_local_tensors
def gather_other_axis(piece: Tensor, buffer: FlatBuffer, index: int, limit_seconds: float | None) -> Tensor:
    """Returns the full tensor where its layer divides the parameter along another axis, and otherwise the piece."""
    shard = None if buffer.flatten else shard_of(buffer.sharded_params[index])
    for axis in () if shard is None else shard.axes:
        if axis.placement is Placement.SHARD and axis.group.size > 1 and axis.group != buffer.group:
            assert shard is not None
            start = shard.start - buffer.spans[index].start
            part = replace(shard, start=start, stop=start + piece.numel())
            return gather_full_param(piece, part, axis.group, limit_seconds)
    return piece


def _has_flat_params(module: nn.Module) -> bool:
    return any(buffer.flatten for unit in units_in(module) for buffer in unit.buffers)


@contextmanager
def _active_call(call: _StateDictCall, module: nn.Module) -> Iterator[_StateDictCall]:
    units = units_in(module)
    for unit in units:
        unit.state_dict_call = call
    try:
        yield call
    finally:
        for unit in units:
            unit.state_dict_call = None


@on_local_tensors
def _unshard_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    unit = unit_of(module)
    assert unit is not None and unit.state_dict_call is not None, "state_dict() of a sharded module was bypassed"
    call = cast(_StateDictCall, unit.state_dict_call)
    check_not_replaced([unit])
    named = param_names(module, unit, prefix)
    if call.local:  # The modules may have full parameters right now.
        for name, slot in named:
            if slot.buffer.flatten:
                state_dict.pop(name, None)
            elif name in state_dict:
                shard = slot.buffer.sharded_params[slot.number]
                state_dict[name] = shard if isinstance(state_dict[name], nn.Parameter) else shard.detach()
        return
    # All ranks gather every buffer, whichever of its names this one keeps.
    for number, buffer in enumerate(unit.buffers):
        if not unit.in_summon:
            call.gather(unit, buffer, range(len(buffer.names)))
        if buffer.flatten:
            state_dict.pop(prefix + flat_param_name(number), None)
    for name, slot in named:
        _unshard_entry(call, unit, slot, state_dict, name)
    # A buffer to which a program has added shards, as `module.fisher += param.grad**2`, has become sharded.
    for path, inner in managed_modules(module, prefix.rstrip(".")):
        for attribute, tensor in inner._buffers.items():
            name = f"{path}.{attribute}".lstrip(".")
            if tensor is not None and is_sharded(tensor) and name in state_dict:
                record = shard_of(tensor)
                assert record is not None
                state_dict[name] = gather_shard(local_tensor(tensor), record)
    position = unit.modules.index(module)
    for (number, name), dtype in unit.buffer_dtypes.items():
        if number == position and (value := state_dict.get(f"{prefix}{name}")) is not None:
            state_dict[f"{prefix}{name}"] = converted(value, f"{prefix}{name}", dtype=dtype)


@on_local_tensors
def _unshard_inner_hook(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """The post hook of a module inside a unit: for calls of its own `state_dict()`."""
    if unit.state_dict_call is not None:
        return
    call = _StateDictCall(StateDictConfig(), keeps=True)
    for slot in unit.slots:
        if slot.module is module:
            _unshard_entry(call, unit, slot, state_dict, prefix + slot.attribute)


def _unshard_entry(call: _StateDictCall, unit: Unit, slot: ParamSlot, state_dict: dict[str, Any], name: str) -> None:
    """Puts the full tensor of a parameter under one of its names; all ranks together."""
    param = slot.module._parameters.get(slot.attribute)
    if unit.in_summon and param is not None and not is_dtensor(param):
        if isinstance(state_dict.get(name), nn.Parameter):  # `keep_vars`
            return
        full = call.show(unit, slot, param)
    else:
        call.gather(unit, slot.buffer, [slot.number])
        full = call.full_tensors[slot.buffer, slot.number]
    if full is not None and (name in state_dict or slot.buffer.flatten):
        state_dict[name] = full
