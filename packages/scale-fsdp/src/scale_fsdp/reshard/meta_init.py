"""Deferred initialization: values for modules built on the meta device, one unit at a time.

When such a module becomes a unit, its parameters and buffers get memory on the device that it computes on, and values
by its own `reset_parameters` or the user's `init`; then its shards are cut out of them and they are freed. What
`__init__` would have written is unknown, so whatever is left without values is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.parameters import copy_attributes
from scale_fsdp.options import Init
from scale_fsdp.runtime.checks import Uninitialized
from scale_fsdp.runtime.param_registry import ParamModuleInfo, managed_modules
from scale_fsdp.runtime.unit import set_param


def should_initialize(
    parts: Iterable[tuple[nn.Module, Sequence[ParamModuleInfo]]],
    init: Init,
    group: Group,
    limit_seconds: float | None = None,
    *,
    sync: bool,
) -> bool:
    """Whether this rank initializes its meta tensors: unless it has nothing there, or rank 0 sends all values.

    Raises ValueError on all ranks if one of them would be left without values, before any has changed anything; without
    `sync` on that rank alone.
    """
    problem, on_meta = None, False
    for module, infos in parts:
        on_meta = on_meta or any(info.param.is_meta for info in infos) or any(True for _ in _meta_buffers(module))
        problem = problem or _missing_init(module, infos, init)
    if not sync:  # Each rank makes its own values, in any order, and nothing is sent.
        if problem is not None:
            raise ValueError(problem)
        return on_meta
    contract = Contract(group, limit_seconds)
    with contract.waiting("initialization"):
        rows = exchange([on_meta, problem is not None], group, limit_seconds=contract.limit_seconds)
    if not rows[0][0]:
        return False
    if problem is not None:
        raise ValueError(problem)
    failing = [rank for rank, (_, fails) in enumerate(rows) if fails]
    if failing:
        raise ValueError(
            f"rank {failing[0]} has a parameter or buffer on the meta device that nothing initializes; its own error "
            "says which: pass options=ShardOptions(init=...), or build the model under torch.device('meta') on all "
            "ranks but rank 0"
        )
    return on_meta


def materialize(
    module: nn.Module, own: Sequence[ParamModuleInfo], device: torch.device, init: Init, *, fill: bool
) -> dict[nn.Parameter, Tensor]:
    """Allocates the meta tensors of a unit-to-be, and initializes it if `fill`; returns the values by parameter.

    Buffers get theirs in place, parameters stay on meta. A module is initialized after those in it, as in a
    constructor. Raises ValueError, and leaves the module as it was, if nothing was written to one of them.
    """
    first = _first_param_places(own)

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    values = {param: nn.Parameter(empty(param), param.requires_grad) for param in first}
    for param, value in values.items():
        copy_attributes(param, value)  # An initialization may look at them.
    buffers = list(_meta_buffers(module))
    memory = {info.param: empty(info.param) for info in buffers}
    for buffer_info in buffers:
        buffer_info.module._buffers[buffer_info.attribute] = memory[buffer_info.param]
    try:
        if fill:
            blanks = {tensor: Uninitialized.of(tensor) for tensor in (*values.values(), *memory.values())}
            with torch.no_grad(), _temporary_params(first, values):
                owners = {id(owner) for _, owner, *_ in (*first.values(), *buffers)}
                for _, child in _children_first(module):
                    if id(child) in owners:
                        reset = partial(init, child) if callable(init) else _reset_function(child)
                        assert reset is not None, "checked before"
                        reset()
                _collect_reassigned(first, values)
            filled = [(info, values[param], values[param]) for param, info in first.items()]
            now = [(info, memory[info.param], info.module._buffers.get(info.attribute)) for info in buffers]
            for buffer_info, tensor, in_place in [*filled, *now]:
                if not blanks[tensor].is_filled(in_place):
                    prefix = "the buffer " if buffer_info.attribute in buffer_info.module._buffers else ""
                    raise ValueError(
                        f"{prefix}'{buffer_info.name}' is on the meta device, and neither init nor the "
                        f"reset_parameters() of its {type(buffer_info.module).__name__} has written to it: let one of "
                        "them do so, or build that module outside of torch.device('meta')"
                    )
    except BaseException:
        for buffer_info in buffers:
            buffer_info.module._buffers[buffer_info.attribute] = buffer_info.param
        raise
    return dict(values)


def _missing_init(module: nn.Module, own: Sequence[ParamModuleInfo], init: Init) -> str | None:
    """The error about a module that nothing would initialize."""
    if init is not None:
        return None
    names: dict[int, tuple[str, str]] = {}
    for name, owner, attribute, _ in (*_first_param_places(own).values(), *_meta_buffers(module)):
        names.setdefault(id(owner), (name, attribute))
    for _, child in _children_first(module):
        if id(child) in names and _reset_function(child) is None:
            name, attribute = names[id(child)]
            return (
                f"'{name}' is on the meta device, and its {type(child).__name__} has no reset_parameters() that would "
                f"give '{attribute}' its values: pass options=ShardOptions(init=...), a function of a module, or False "
                "for a checkpoint"
            )
    return None


def _first_param_places(own: Sequence[ParamModuleInfo]) -> dict[nn.Parameter, ParamModuleInfo]:
    first: dict[nn.Parameter, ParamModuleInfo] = {}
    for info in own:
        if info.param.is_meta:
            first.setdefault(info.param, info)
    return first


def _meta_buffers(module: nn.Module) -> Iterator[ParamModuleInfo]:
    """Yields each place outside of nested units that holds a buffer on meta."""
    for path, child in managed_modules(module):
        for attribute, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield ParamModuleInfo(f"{path}.{attribute}".lstrip("."), child, attribute, cast(nn.Parameter, buffer))


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The unit's modules in the order in which their constructors end."""
    children = {id(child): (path, child) for path, child in managed_modules(module)}
    seen: set[int] = set()

    def visit(current: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(current) in seen or id(current) not in children:
            return
        seen.add(id(current))
        for child in current.children():
            yield from visit(child)
        yield children[id(current)]

    return visit(module)


def _reset_function(module: nn.Module) -> Callable[[], Any] | None:
    """The module's own initialization; nn.MultiheadAttention and others have it under a private name."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], Any] | None = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


@contextmanager
def _temporary_params(
    first: Mapping[nn.Parameter, ParamModuleInfo], values: Mapping[nn.Parameter, nn.Parameter]
) -> Iterator[None]:
    """Inside, the first module that has a parameter has the tensor with memory; others keep it on meta."""
    for param, info in first.items():
        set_param(info.module, info.attribute, values[param])
    try:
        yield
    finally:
        for param, info in first.items():
            set_param(info.module, info.attribute, param)


def _collect_reassigned(
    first: Mapping[nn.Parameter, ParamModuleInfo], values: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Copies parameters that an initialization has assigned instead of writing to them."""
    for param, info in first.items():
        now = info.module._parameters.get(info.attribute)
        if now is not None and now is not values[param] and not now.is_meta:
            if now.shape != param.shape:
                raise ValueError(
                    f"init has assigned a parameter of shape {tuple(now.shape)} to '{info.name}', expected "
                    f"{tuple(param.shape)}"
                )
            values[param].copy_(now)
