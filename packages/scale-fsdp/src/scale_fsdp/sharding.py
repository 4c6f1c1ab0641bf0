"""`fully_shard`: makes a unit of a module, in place.

The module keeps its class (a dynamic subclass adds the methods of `ShardedModule`), its names and its methods; what
`parameters()` yields are the local shards under the original names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.collectives import broadcast
from scale_core.contract import Contract
from scale_core.flat import Dtypes, FlatBuffer
from scale_core.group import Group, GroupLike, group_of
from scale_core.layout import Atom, FlatLayout
from scale_core.stepping import mark_replaced
from scale_fsdp.guard import guard_modules, guarded_forward
from scale_fsdp.module import ShardedModule
from scale_fsdp.precision import MixedPrecision, resolve_precision
from scale_fsdp.state_dict import hook_state_dict
from scale_fsdp.unit import Slot, Unit, flat_name_of, paths_in, unit_of, units_in

M = TypeVar("M", bound=nn.Module)


class _Home(NamedTuple):
    """Where a parameter that was sharded already lives."""

    unit: Unit
    buffer: int
    number: int


# Original parameters, and the local shards that took their place, to the unit that owns them: so that one which is
# shared between units is found again, whatever object the other unit still holds.
_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def fully_shard(
    module: M,
    process_group: GroupLike = None,
    *,
    reshard_after_forward: bool = True,
    mixed_precision: bool | MixedPrecision = False,
    flatten_parameters: bool = False,
    atom: Atom | Callable[[str, tuple[int, ...]], Atom] = "auto",
    sync_module_states: bool = True,
    limit_seconds: float | None = None,
    compute_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    fp32_reduce_scatter: bool | None = None,
) -> M:
    """Shards a module's parameters over the ranks, in place, as one unit; returns the same module.

    Modules inside it that are units already keep their own parameters: shard the children first, then the whole. Each
    unit is gathered as a whole before its forward and its backward and released after, so a unit is what must fit
    beside the shards: a transformer block is a good one. Build the optimizer afterwards.

        >>> import torch
        >>> from scale_fsdp import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> for layer in model:
        ...     _ = fully_shard(layer)
        >>> model = fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(3, 4)).sum().backward()
        >>> optimizer.step()

    Args:
        module: The module; must not be a unit yet.
        process_group: The ranks to shard over: a process group or a one-dimensional DeviceMesh. None is the default
            group, or a world of one where torch.distributed is not initialised.
        reshard_after_forward: Release the parameters between forward and backward: less memory, half as much again
            to send. The unit by which the model is entered stays gathered, since its backward comes first.
        mixed_precision: A policy; True is fp16 parameters and reduction.
        flatten_parameters: Show the optimizer one flat tensor per dtype and kind (trained or frozen) in place of
            one local shard per parameter.
        atom: What must not be cut between two ranks: "auto", "element", "row", "parameter", `Block(k)`, or a
            function from a parameter's name and shape to one of them.
        sync_module_states: Begin with rank 0's parameters and buffers on all ranks. Where it is off, all ranks must
            have built equal ones.
        limit_seconds: The longest that a rank waits for another one before all of them raise. None is the process
            group's own time limit, at most ten minutes. The outermost unit's counts.
        compute_dtype: FairScale's spelling of `MixedPrecision(param_dtype=...)`.
        buffer_dtype: FairScale's spelling of `MixedPrecision(buffer_dtype=...)`.
        fp32_reduce_scatter: FairScale's spelling of `MixedPrecision(reduce_dtype=torch.float32)`.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: The module is a unit already, or a container that is never called; arguments that contradict
            each other.
        ContractError: The ranks are about to shard different modules.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: expected an nn.Module, got {type(module).__name__}")
    if unit_of(module) is not None:
        raise ValueError(f"this {type(module).__name__} is sharded already: call fully_shard once per module")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"an {type(module).__name__} is never called, so it can't be gathered before it runs: "
            "shard its members, for member in container: fully_shard(member)"
        )
    if flatten_parameters and flat_name_of(0) in module._parameters:
        raise ValueError(
            f"this {type(module).__name__} has a parameter named {flat_name_of(0)}, a name that "
            "flatten_parameters=True needs for its own: rename it, or leave flatten_parameters out"
        )
    group = group_of(process_group)
    precision = resolve_precision(
        mixed_precision, compute_dtype=compute_dtype, buffer_dtype=buffer_dtype, fp32_reduce_scatter=fp32_reduce_scatter
    )
    places = list(_places(module))
    own, borrowed = _own_and_borrowed(places)
    _check_not_meta(own)
    if group.size > 1:
        _agree(module, group, own, limit_seconds)
        if sync_module_states:
            _broadcast(module, group, own)
    buffers, slots = _make_buffers(own, group, precision, flatten_parameters, atom)
    lenders = list(dict.fromkeys(home.unit for _, home in borrowed))
    slots += [Slot(p.module, p.attribute, home.unit.buffers[home.buffer], home.number) for p, home in borrowed]
    unit = Unit(module, slots, buffers, lenders, precision, reshard_after_forward, limit_seconds)
    for lender in lenders:
        lender.lends = True
    _remember(unit, own)
    _cast_buffers(module, precision)
    if flatten_parameters:
        for number, buffer in enumerate(buffers):
            module.register_parameter(flat_name_of(number), buffer.exposed[0])
    object.__setattr__(module, "__class__", _sharded_class(cast(Hashable, type(module))))
    module.register_forward_pre_hook(unit.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(unit.after_forward, with_kwargs=True, always_call=True)
    guard_modules(unit)
    hook_state_dict(module)
    _name_units(module)
    return module


class _ParamPlace(NamedTuple):
    """One place in the module tree that holds a parameter."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


def _places(module: nn.Module) -> Iterator[_ParamPlace]:
    """Yields each place outside of nested units that holds a parameter; a shared one stands in several."""
    for path, child in _outside_units(module, ""):
        for attribute, param in child._parameters.items():
            if param is not None:
                yield _ParamPlace(f"{path}.{attribute}".lstrip("."), child, attribute, param)


def _outside_units(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    seen = set()
    stack = [(path, module)]
    while stack:
        here, current = stack.pop()
        if id(current) in seen or (current is not module and unit_of(current) is not None):
            continue
        seen.add(id(current))
        yield here, current
        children = [
            (f"{here}.{name}".lstrip("."), child) for name, child in current._modules.items() if child is not None
        ]
        stack.extend(reversed(children))


def _own_and_borrowed(places: Sequence[_ParamPlace]) -> tuple[list[_ParamPlace], list[tuple[_ParamPlace, _Home]]]:
    own, borrowed = [], []
    for place in places:
        home: _Home | None = _homes.get(place.param)
        if home is None:
            own.append(place)
        else:
            borrowed.append((place, home))
    return own, borrowed


def _check_not_meta(own: Sequence[_ParamPlace]) -> None:
    for place in own:
        if place.param.is_meta:
            raise ValueError(
                f"'{place.name}' is on the meta device and has no values to shard: call module.to_empty(device=...) "
                "and initialise it first"
            )


def _agree(module: nn.Module, group: Group, own: Sequence[_ParamPlace], limit_seconds: float | None) -> None:
    lines = [type(module).__name__]
    lines += [f"{p.name} {tuple(p.param.shape)} {p.param.dtype} trains={p.param.requires_grad}" for p in own]
    Contract(group, limit_seconds).agree(f"the module given to fully_shard ({type(module).__name__})", lines)


def _broadcast(module: nn.Module, group: Group, own: Sequence[_ParamPlace]) -> None:
    tensors = [place.param.data for place in own]
    tensors += [b.data for _, child in _outside_units(module, "") for b in child._buffers.values() if b is not None]
    for tensor in dict.fromkeys(tensors):
        if tensor.numel():
            whole = tensor.contiguous()
            # As bytes: transports know few dtypes, and a copy needs none.
            broadcast(whole.reshape(-1).view(torch.uint8), group).wait()
            if not whole.is_set_to(tensor):
                tensor.copy_(whole)


def _make_buffers(
    own: Sequence[_ParamPlace],
    group: Group,
    precision: MixedPrecision,
    flatten: bool,
    atom: Atom | Callable[[str, tuple[int, ...]], Atom],
) -> tuple[list[FlatBuffer], list[Slot]]:
    """One buffer per dtype, device and kind (trained or frozen), so that what is frozen is never reduced."""
    members: dict[tuple[torch.dtype, torch.device, bool], dict[nn.Parameter, str]] = {}
    for place in own:
        param = place.param
        members.setdefault((param.dtype, param.device, param.requires_grad), {}).setdefault(param, place.name)
    buffers, where = [], {}
    for (dtype, _, _), named in members.items():
        params, names = list(named), list(named.values())
        floating = dtype.is_floating_point
        dtypes = Dtypes(precision.param_dtype, precision.reduce_dtype) if floating else Dtypes()
        layout = FlatLayout.plan(names, [tuple(param.shape) for param in params], group.size, atom)
        buffer = FlatBuffer(names, params, layout, group, dtypes, flatten)
        buffers.append(buffer)
        where.update({param: (buffer, index) for index, param in enumerate(params)})
    slots = [Slot(place.module, place.attribute, *where[place.param]) for place in own]
    return buffers, slots


def _remember(unit: Unit, own: Sequence[_ParamPlace]) -> None:
    numbers = {id(buffer): number for number, buffer in enumerate(unit.buffers)}
    for place, slot in zip(own, unit.slots, strict=False):
        mark_replaced(place.param, slot.buffer, slot.number)
        home = _Home(unit, numbers[id(slot.buffer)], slot.number)
        _homes[place.param] = home
        if not slot.buffer.flatten:
            _homes[slot.buffer.exposed[slot.number]] = home


def _cast_buffers(module: nn.Module, precision: MixedPrecision) -> None:
    if precision.buffer_dtype is None:
        return
    for _, child in _outside_units(module, ""):
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(precision.buffer_dtype)


def _name_units(outermost: nn.Module) -> None:
    """Gives every unit inside, and each of its parameters, the qualified name that it has from here."""
    paths = paths_in(outermost)
    for unit in units_in(outermost):
        unit.name = paths[id(unit.module)]
        unit.root = None  # A new outermost module: its first forward makes a new root.
        for number, buffer in enumerate(unit.buffers):
            names: dict[int, str] = {}
            for slot in unit.slots:
                if slot.buffer is buffer:
                    names.setdefault(slot.number, f"{paths[id(slot.module)]}.{slot.attribute}".lstrip("."))
            flat_name = f"{unit.name}.{flat_name_of(number)}".lstrip(".")
            buffer.rename([names[index] for index in range(len(buffer.names))], unit.name, flat_name)


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": guarded_forward(cls)}
    return type(cls.__name__, (ShardedModule, cls), names)
