"""Hearing of gradients, until nobody wants to."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from scale_adascale.grad_hooks import Hearing
from scale_core.autograd_hooks import local_grads_wanted
from scale_core.microbatch_grads import Listener, SampledStep, sampled_steps_wanted


class Ears:
    def __init__(self) -> None:
        self.heard: list[tuple[int, list[float]]] = []
        self.steps: list[SampledStep] = []
        self.hearing = Hearing(self.take, self.begins)

    def take(self, number: int, grad: Tensor) -> None:
        assert not grad.requires_grad
        self.heard.append((number, grad.tolist()))

    def begins(self, step: SampledStep) -> Listener | None:
        self.steps.append(step)
        return None


def two() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))]


def test_each_gradient_is_heard_by_the_number_of_its_parameter_and_steps_that_are_announced() -> None:
    ears, (one, other) = Ears(), two()
    other.requires_grad_(False)
    ears.hearing.listen([one, other])
    assert ears.hearing.is_listening and ears.hearing.can_hear and ears.hearing.num_params == 2
    (one * other * 3).backward()
    assert ears.heard == [(0, [6.0])]
    assert ears.hearing.is_hooked(one) and not ears.hearing.is_hooked(other)
    step = SampledStep([one])
    step.begin()
    assert ears.steps == [step] and not step.is_heard
    assert ears.hearing.numbers_of([torch.ones(1), other]) == {1}


def test_what_was_unfrozen_or_put_in_the_place_of_another_is_heard_from_the_next_time_on() -> None:
    ears, (one, other) = Ears(), two()
    other.requires_grad_(False)
    ears.hearing.listen([one, other])
    other.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"was unfrozen after.*optimizer\.zero_grad\(\)"):
        ears.hearing.check()
    ears.hearing.listen([one, other])
    ears.hearing.check()
    new = nn.Parameter(torch.tensor([5.0]))
    ears.hearing.listen([new, other])
    (one * other * new).backward()
    assert sorted(ears.heard) == [(0, [2.0]), (1, [5.0])]


def test_hooks_of_others_that_come_later_are_refused_until_it_listens_again() -> None:
    ears, (one, other) = Ears(), two()
    ears.hearing.listen([one, other])
    one.register_hook(lambda grad: grad * 10)
    with pytest.raises(RuntimeError, match="registered after AdaScale's"):
        ears.hearing.check()
    ears.hearing.listen([one, other])
    ears.hearing.check()
    (one * other).backward()
    assert (0, [20.0]) in ears.heard


@pytest.mark.parametrize("how", ["stopped", "gone"])
def test_nothing_is_heard_by_whoever_has_stopped_or_is_gone(how: str) -> None:
    ears, params = Ears(), two()
    ears.hearing.listen(params)
    heard = ears.heard
    assert local_grads_wanted() and sampled_steps_wanted()
    if how == "stopped":
        ears.hearing.stop()
    else:
        del ears
    gc.collect()
    assert not local_grads_wanted() and not sampled_steps_wanted()
    (params[0] * params[1]).backward()
    assert heard == []
