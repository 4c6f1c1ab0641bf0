"""autograd_hooks.py: a listener is told of each gradient once, by numbers, and lives no longer for it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from scale_core.autograd_hooks import GradientListeners


class Unit:
    def __init__(self, *params: list[nn.Parameter]) -> None:
        self.params, self.told = list(params), list[tuple[int, int]]()
        self.listeners = GradientListeners(self.tell)

    def tell(self, number: int, index: int) -> None:
        assert self.params[number][index].grad is not None
        self.told.append((number, index))


def param(*, trains: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.ones(2), requires_grad=trains)


def test_each_parameter_that_trains_is_listened_to_once() -> None:
    frozen = param(trains=False)
    unit = Unit([param()], [frozen, param()])
    for _ in range(2):
        unit.listeners.listen(unit.params)
    (unit.params[0][0] * unit.params[1][1] * frozen).sum().backward()
    assert sorted(unit.told) == [(0, 0), (1, 1)]
    frozen.requires_grad_()
    unit.listeners.listen(unit.params)
    frozen.sum().backward()
    assert unit.told[2:] == [(1, 0)]


def test_parameters_that_come_in_the_place_of_others_are_listened_to_when_those_are_forgotten() -> None:
    unit = Unit([param()])
    unit.listeners.listen(unit.params)
    unit.params[0][0] = param()
    unit.listeners.forget()
    unit.listeners.listen(unit.params)
    unit.params[0][0].sum().backward()
    assert unit.told == [(0, 0)]


def test_a_listener_is_not_kept_alive_by_its_parameters() -> None:
    params = [param()]
    unit = Unit(params)
    unit.listeners.listen(unit.params)
    held = weakref.ref(unit)
    del unit
    gc.collect()
    assert held() is None
