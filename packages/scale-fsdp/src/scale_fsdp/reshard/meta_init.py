"""Values for what was built on the meta device, one unit at a time, so that a model is never whole anywhere.

A module under `torch.device("meta")` has shapes and no memory. When it becomes a unit, its parameters and buffers get
memory on the device that it computes on, and values by its own `reset_parameters` or by what the user gives; then its
shards are cut out of them and they are freed. Nobody can know what `__init__` would have written, so what is left
without values is found and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event
from scale_fsdp.checks import Blank
from scale_fsdp.param_registry import ParamPlace, modules_of_unit
from scale_fsdp.unit import set_param

Init: TypeAlias = Callable[[nn.Module], Any] | Literal[False] | None


class _BufferPlace(NamedTuple):
    name: str
    module: nn.Module
    attribute: str
    buffer: Tensor


def check_init(init: Init) -> None:
    """Checks the argument of that name.

    Raises:
        TypeError: It is none of those that mean something.
    """
    if init is not None and init is not False and not callable(init):
        raise TypeError(
            f"init: expected a function of a module, None (its own reset_parameters) or False (no values yet), got "
            f"{init!r}"
        )


def who_initialises(
    parts: Iterable[tuple[nn.Module, Sequence[ParamPlace]]],
    init: Init,
    group: Group,
    limit_seconds: float | None = None,
    *,
    sync: bool,
) -> bool:
    """Whether this rank gives values to what it has on meta; it need not where rank 0 has all values and sends them.

    All ranks learn here if one of them can't, before any has changed anything.

    Args:
        parts: The units-to-be, each with the places of its own parameters.
        init: As given to `fully_shard`.
        group: The ranks, which call this together.
        limit_seconds: As given to `fully_shard`.
        sync: Rank 0's values are sent to all.

    Raises:
        ValueError: This rank, or another one, has something on meta that nobody would initialise.
    """
    problem, on_meta = None, False
    for module, own in parts:
        on_meta = on_meta or any(place.param.is_meta for place in own) or any(True for _ in _meta_buffers(module))
        problem = problem or _problem(module, own, init)
    contract = Contract(group, limit_seconds)
    with contract.waiting(Event("initialisation", "")):
        rows = exchange([on_meta, problem is not None], group, limit_seconds=contract.limit_seconds)
    if sync and not rows[0][0]:
        return False
    if problem is not None:
        raise ValueError(problem)
    failing = [rank for rank, (_, fails) in enumerate(rows) if fails]
    if failing:
        raise ValueError(
            f"rank {failing[0]} has a parameter or buffer on the meta device that nothing initialises; its own error "
            "says which: pass init=, or build the model under torch.device('meta') on all ranks but rank 0"
        )
    return on_meta


def materialise(
    module: nn.Module, own: Sequence[ParamPlace], device: torch.device, init: Init, *, fill: bool
) -> dict[nn.Parameter, Tensor]:
    """Gives memory and values to what is on the meta device in a unit-to-be; buffers get it in their places.

    A module is initialised after those in it, as in a constructor, and a tied parameter by the first that has it.

    Args:
        module: The unit-to-be.
        own: Its own parameters, which stay where they are, on meta.
        device: Where the memory is.
        init: As given to `fully_shard`.
        fill: Give values; otherwise only memory, for those of another rank.

    Returns:
        The values of each parameter that is on meta, by that.

    Raises:
        ValueError: Nothing was written to one of them; names it. The module is then as it was.
    """
    first = _first_places(own)
    values = {param: nn.Parameter(_memory(param, device), param.requires_grad) for param in first}
    buffers = list(_meta_buffers(module))
    memory = {place.buffer: _memory(place.buffer, device) for place in buffers}
    for place in buffers:
        place.module._buffers[place.attribute] = memory[place.buffer]
    try:
        if fill:
            blanks = {tensor: Blank.of(tensor) for tensor in (*values.values(), *memory.values())}
            with torch.no_grad(), _standing_in(first, values):
                _initialise(module, {id(owner) for _, owner, *_ in (*first.values(), *buffers)}, init)
                _take_assigned(first, values)
            _check_filled(first, values, blanks)
            for place in buffers:
                _check_buffer(place, blanks[memory[place.buffer]])
    except BaseException:
        for place in buffers:
            place.module._buffers[place.attribute] = place.buffer
        raise
    return dict(values)


def _problem(module: nn.Module, own: Sequence[ParamPlace], init: Init) -> str | None:
    """What in a unit-to-be nobody would initialise."""
    if init is not None:
        return None
    names: dict[int, tuple[str, str]] = {}
    for name, owner, attribute, _ in (*_first_places(own).values(), *_meta_buffers(module)):
        names.setdefault(id(owner), (name, attribute))
    for _, child in _children_first(module):
        if id(child) in names and _reset_of(child) is None:
            name, attribute = names[id(child)]
            return (
                f"'{name}' is on the meta device, and its {type(child).__name__} has no reset_parameters() that would "
                f"give '{attribute}' its values: pass init=, a function that is called with each module that directly "
                "has parameters or buffers on meta, and writes their values; or init=False to load a checkpoint later"
            )
    return None


def _first_places(own: Sequence[ParamPlace]) -> dict[nn.Parameter, ParamPlace]:
    first: dict[nn.Parameter, ParamPlace] = {}
    for place in own:
        if place.param.is_meta:
            first.setdefault(place.param, place)
    return first


def _meta_buffers(module: nn.Module) -> Iterator[_BufferPlace]:
    for path, child in modules_of_unit(module):
        for attribute, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield _BufferPlace(f"{path}.{attribute}".lstrip("."), child, attribute, buffer)


def _memory(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The unit's modules in the order in which constructors end."""
    found = {id(child): (path, child) for path, child in modules_of_unit(module)}
    seen: set[int] = set()

    def visit(current: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(current) in seen or id(current) not in found:
            return
        seen.add(id(current))
        for child in current.children():
            yield from visit(child)
        yield found[id(current)]

    return visit(module)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The module's own initialisation; some of torch's modules hide theirs, such as nn.MultiheadAttention."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], Any] | None = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


def _initialise(module: nn.Module, owners: set[int], init: Init) -> None:
    for _, child in _children_first(module):
        if id(child) in owners:
            reset = _reset_of(child)
            if callable(init):
                init(child)
            else:
                assert reset is not None, "checked before"
                reset()


@contextmanager
def _standing_in(
    first: Mapping[nn.Parameter, ParamPlace], values: Mapping[nn.Parameter, nn.Parameter]
) -> Iterator[None]:
    """Inside, what has memory stands where its parameter stood first; in its other places nothing can be written."""
    for param, place in first.items():
        set_param(place.module, place.attribute, values[param])
    try:
        yield
    finally:
        for param, place in first.items():
            set_param(place.module, place.attribute, param)


def _take_assigned(first: Mapping[nn.Parameter, ParamPlace], values: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Copies what an initialisation has assigned in place of writing it."""
    for param, place in first.items():
        now = place.module._parameters.get(place.attribute)
        if now is not None and now is not values[param] and not now.is_meta:
            if now.shape != param.shape:
                raise ValueError(
                    f"init has assigned a parameter of shape {tuple(now.shape)} to '{place.name}', expected "
                    f"{tuple(param.shape)}"
                )
            values[param].copy_(now)


def _check_filled(
    first: Mapping[nn.Parameter, ParamPlace],
    values: Mapping[nn.Parameter, nn.Parameter],
    blanks: Mapping[Tensor, Blank],
) -> None:
    for param, place in first.items():
        if not blanks[values[param]].is_filled(values[param]):
            raise ValueError(
                f"'{place.name}' is on the meta device, and neither init nor the reset_parameters() of its "
                f"{type(place.module).__name__} has written to it: let one of them do so"
            )


def _check_buffer(place: _BufferPlace, blank: Blank) -> None:
    if not blank.is_filled(place.module._buffers.get(place.attribute)):
        raise ValueError(
            f"the buffer '{place.name}' is on the meta device, where what __init__ wrote to it is lost, and neither "
            f"init nor the reset_parameters() of its {type(place.module).__name__} has written to it: let one of them "
            "do so, or build that module outside of torch.device('meta')"
        )
