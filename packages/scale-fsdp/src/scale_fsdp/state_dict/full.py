"""Full tensors under plain names: what `state_dict()` gives and `load_state_dict()` takes.

A sharded module's state dict is that of the plain module, and loads into it; the other way round each rank takes its
own piece out of the full tensors and nothing is sent. The full tensors are made buffer by buffer: gathered, copied to
where they are wanted, and freed again. So a device holds one unit beside the shards at most, and what it is to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.flat.buffer import FlatBuffer
from scale_core.shard import Held, shard_of
from scale_core.state.torch_state_dict import asked_by_torch, saved_by_torch, view_all
from scale_fsdp.api import StateDictForm, resolve_form
from scale_fsdp.state_dict.loading import take_pieces
from scale_fsdp.state_dict.naming import check_none_apart, names_in, plain_order, ranks_in
from scale_fsdp.summon import showing_flat
from scale_fsdp.unit import Slot, Unit, flat_name_of, unit_of, units_in


@dataclass
class _Call:
    """One call of `state_dict()`, through all modules that it visits.

    Attributes:
        form: What it is to give.
        keeps: This rank gets tensors.
        local: It is to give this rank's shards in place of whole tensors.
        copies: The whole tensors so far, None on ranks that get none, by buffer and number: of a tied one only one.
    """

    form: StateDictForm
    keeps: bool
    local: bool = False
    copies: dict[tuple[FlatBuffer, int], Tensor | None] = field(default_factory=dict)

    def take(self, unit: Unit, buffer: FlatBuffer, numbers: Iterable[int]) -> None:
        """Gathers a buffer, copies these parameters out of it and frees it; all ranks do it together."""
        wanted = [number for number in dict.fromkeys(numbers) if (buffer, number) not in self.copies]
        if not wanted:
            return
        wholes = unit.gather_whole(buffer)
        device = self.form.device or buffer.shard.device
        for number in wanted:
            whole = _over_its_layer(wholes[number], buffer, number, unit.options.limit_seconds)
            self.copies[buffer, number] = whole.to(device, copy=True) if self.keeps else None

    def finish(self, module: nn.Module, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """What the whole call gives on this rank, in the order of the plain module."""
        if not self.keeps:
            return OrderedDict()
        if self.form.device is not None:
            for name, value in state.items():  # Buffers, and parameters that are not sharded.
                state[name] = value.to(self.form.device) if isinstance(value, Tensor) else value
        if isinstance(state, OrderedDict) and _is_flat(module):
            for name in plain_order(module, prefix):
                if name in state:
                    state.move_to_end(name)
        return state


_call: ContextVar[_Call | None] = ContextVar("the state_dict() that runs now", default=None)


def hook_state_dict(module: nn.Module) -> None:
    """Makes the state dict of `module` and of whatever holds it one of full tensors."""
    unit = unit_of(module)
    assert unit is not None
    module.register_state_dict_post_hook(_make_whole)
    module.register_load_state_dict_pre_hook(take_pieces)
    for inside in {slot.module for slot in unit.slots} - {module}:
        # `model.encoder.state_dict()` asks a module that is no unit, past the unit that its parameters belong to.
        inside.register_state_dict_post_hook(partial(_make_part_whole, unit))
        inside.register_load_state_dict_pre_hook(partial(take_pieces, unit=unit))
    view_all()


def full_state_dict(
    model: nn.Module, *, rank_0_only: bool = False, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Returns the state dict of the plain model: full tensors under plain names. All ranks call it together.

    One unit at a time is gathered, copied to `device` where it is wanted, and freed.

        >>> import torch
        >>> from scale_fsdp import full_state_dict, fully_shard
        >>> model = fully_shard(torch.nn.Linear(3, 2))
        >>> {name: tuple(tensor.shape) for name, tensor in full_state_dict(model, device="cpu").items()}
        {'weight': (2, 3), 'bias': (2,)}

    Args:
        model: A sharded module, or one that holds such; how it was told to give its state does not count here.
        rank_0_only: Rank 0 of the model's ranks alone gets the tensors, and the others an empty dict.
        device: Where the tensors are to be; None is where the shards are.

    Raises:
        TypeError: `rank_0_only` is not a bool.
        RuntimeError: `rank_0_only`, and a unit is over other ranks than the model.
        ScaleDistributedError: A rank did something else.
    """
    form = resolve_form(device, rank_0_only)
    if rank_0_only:
        check_none_apart(model, "full_state_dict(rank_0_only=True)")
    with _calling(_Call(form, not rank_0_only or ranks_in(model).rank == 0)) as call:
        state = model.state_dict()
    return call.finish(model, state, "")


def state_dict_of(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Gives `module.state_dict(*args, **kwargs)` in the module's own form, or as part of the call that runs already.

    Args:
        module: The sharded module.
        plain: Its `state_dict` of `nn.Module`.
        *args: As torch still takes them by position: destination, prefix, keep_vars.
        **kwargs: The same by name.

    Raises:
        RuntimeError: torch's checkpoint functions ask, and parameters are flat.
        ScaleDistributedError: A rank did something else.
    """
    if _call.get() is not None:
        return plain(*args, **kwargs)
    asked = asked_by_torch()
    if _is_flat(module) and asked is not None:
        raise RuntimeError(
            "get_model_state_dict: with flatten_parameters=True the modules have no parameters under the plain names, "
            "which torch's function looks for: call scale_fsdp.full_state_dict(model) for full tensors, or "
            "scale_core.state.sharded_state_dict(model) for torch.distributed.checkpoint.save"
        )
    unit = unit_of(module)
    assert unit is not None
    form = unit.options.form
    if asked is not None or saved_by_torch():
        check_none_apart(module, "state_dict")
    if form.rank_0_only:
        check_none_apart(module, "state_dict_on_rank_0_only")
    keeps = not form.rank_0_only or ranks_in(module).rank == 0
    if asked is not None and asked.whole and asked.on_host:  # Else torch would copy what stood on the device whole.
        form, keeps = StateDictForm(torch.device("cpu")), asked.keeps
    call = _Call(form, keeps)
    return _give(call, module, plain, *args, **kwargs)


def local_state_dict_of(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Gives the same with this rank's shards in place of whole tensors; nothing is sent."""
    with showing_flat(units_in(module)):
        return _give(_Call(StateDictForm(), True, local=True), module, plain, *args, **kwargs)


def _give(
    call: _Call,
    module: nn.Module,
    plain: Callable[..., Any],
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> Any:
    with _calling(call):
        state = plain(prefix=prefix, keep_vars=keep_vars)
    given = call.finish(module, state, prefix)
    if destination is None:
        return given
    destination.update(given)
    if hasattr(destination, "_metadata"):
        destination._metadata.update(getattr(given, "_metadata", {}))
    return destination


def _over_its_layer(gathered: Tensor, buffer: FlatBuffer, number: int, limit_seconds: float | None) -> Tensor:
    """The whole of a parameter that its layer divides along another axis, of which `gathered` is this rank's part."""
    shard = None if buffer.flatten else shard_of(buffer.exposed[number])
    own = () if shard is None else shard.axes
    axis = next((a for a in own if a.held is Held.SHARD and a.group.size > 1 and a.group != buffer.group), None)
    if shard is None or axis is None:
        return gathered
    from scale_core.state.full_tensor import whole_of_part  # Loads torch's checkpoint package, which takes a second.

    first = shard.start - buffer.spans[number].start
    part = replace(shard, start=first, stop=first + gathered.numel())
    return whole_of_part(gathered, part, axis.group, limit_seconds)


def _is_flat(module: nn.Module) -> bool:
    return any(buffer.flatten for unit in units_in(module) for buffer in unit.buffers)


@contextmanager
def _calling(call: _Call) -> Iterator[_Call]:
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)


def _make_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    unit, call = unit_of(module), _call.get()
    assert unit is not None and call is not None, "a sharded module's state_dict() was gone around"
    named = names_in(module, unit, prefix)
    if call.local:
        _show_local(state_dict, named)
        return
    # All ranks gather every buffer, whichever of its names this caller keeps.
    for number, buffer in enumerate(unit.buffers):
        call.take(unit, buffer, range(len(buffer.names)))
        if buffer.flatten:
            state_dict.pop(prefix + flat_name_of(number), None)
    for name, slot in named:
        call.take(unit, slot.buffer, [slot.number])
        copied = call.copies[slot.buffer, slot.number]
        if copied is not None and (name in state_dict or slot.buffer.flatten):
            state_dict[name] = copied
    for name, dtype in unit.buffer_dtypes.items():
        if (value := state_dict.get(f"{prefix}{name}")) is not None:
            state_dict[f"{prefix}{name}"] = value.to(dtype)


def _make_part_whole(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """The same for a module inside a unit, where it was not the unit's module, nor one around it, that was asked."""
    if _call.get() is not None:
        return
    call = _Call(StateDictForm(), keeps=True)
    for slot in unit.slots:
        if slot.module is module:
            call.take(unit, slot.buffer, [slot.number])
            state_dict[prefix + slot.attribute] = call.copies[slot.buffer, slot.number]


def _show_local(state_dict: dict[str, Any], named: Iterable[tuple[str, Slot]]) -> None:
    """What stands in the module may be whole right now; what this rank keeps is not."""
    for name, slot in named:
        if slot.buffer.flatten:
            state_dict.pop(name, None)
        elif name in state_dict:
            shard = slot.buffer.exposed[slot.number]
            state_dict[name] = shard if isinstance(state_dict[name], nn.Parameter) else shard.detach()
