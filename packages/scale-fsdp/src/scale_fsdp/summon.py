"""Whole copies of parameters in the places of their shards: to look at, to change, to initialise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import nn

from scale_core.flat.buffer import FlatBuffer
from scale_core.optim.step_checks import mark_copies
from scale_fsdp.unit import Unit, flat_name_of, set_param

Wholes: TypeAlias = dict[FlatBuffer, list[nn.Parameter]]

_applying: ContextVar[Wholes | None] = ContextVar("what apply() has gathered around the unit it is at", default=None)


@contextmanager
def summoned(units: Iterable[Unit], *, keep: bool) -> Iterator[None]:
    """Inside, the parameters of these units are whole, in the dtype that they are trained in. All ranks enter together.

    Args:
        units: None of them in use.
        keep: Take over what was changed: of each parameter, each rank takes its own piece.
    """
    units, wholes = list(units), dict[FlatBuffer, list[nn.Parameter]]()
    for unit in units:
        _summon(unit, wholes)
    try:
        yield
    finally:
        for unit in units:
            _dismiss(unit)
        if keep:
            _take_pieces(wholes, wholes)


@contextmanager
def showing_flat(units: Iterable[Unit]) -> Iterator[None]:
    """Inside, summoned units show their flat parameters too, as this rank's own state has them."""
    hidden = [unit for unit in units if unit.in_summon]
    for unit in hidden:
        _show_flat(unit, shown=True)
    try:
        yield
    finally:
        for unit in hidden:
            _show_flat(unit, shown=False)


@contextmanager
def applying(unit: Unit) -> Iterator[None]:
    """Inside, the unit's parameters are whole; in the end, what rank 0 has made of them is taken over.

    Another unit may be opened so inside this one.
    """
    around = _applying.get()
    wholes: Wholes = {} if around is None else around
    token = _applying.set(wholes)
    before = set(wholes)
    _summon(unit, wholes)
    own = [buffer for buffer in wholes if buffer not in before]
    try:
        yield
        for buffer in own:
            unit.options.ranks.share(wholes[buffer])
        _take_pieces(wholes, own)
    finally:
        for buffer in own:
            del wholes[buffer]
        _dismiss(unit)
        _applying.reset(token)


def _summon(unit: Unit, wholes: Wholes) -> None:
    """Gathers what is not among the wholes yet, what others lend to the unit as well, and shows it."""
    for owner in (unit, *unit.shared_owners):
        for buffer in owner.buffers:
            if buffer not in wholes:
                trains = buffer.trains and buffer.dtype.is_floating_point
                wholes[buffer] = [nn.Parameter(tensor, requires_grad=trains) for tensor in owner.gather_whole(buffer)]
                mark_copies(wholes[buffer], buffer)
    unit.in_summon = True
    _show_flat(unit, shown=False)
    for module, attribute, buffer, number in unit.slots:
        if buffer in wholes:
            set_param(module, attribute, wholes[buffer][number])


def _dismiss(unit: Unit) -> None:
    unit.in_summon = False
    _show_flat(unit, shown=True)
    unit.to_sharded()


def _show_flat(unit: Unit, *, shown: bool) -> None:
    """Puts a unit's flat parameters into its module, or None: beside whole ones, each element would be there twice."""
    for number, buffer in enumerate(unit.buffers if unit.options.flatten else ()):
        unit.module._parameters[flat_name_of(number)] = buffer.exposed[0] if shown else None


@torch.no_grad()
def _take_pieces(wholes: Wholes, buffers: Iterable[FlatBuffer]) -> None:
    for buffer in buffers:
        buffer.release()
        for index, tensor in enumerate(wholes[buffer]):
            buffer.load(index, tensor)
