"""microbatch_grads.py: who listens is told of a step's samples, of its end or of its failure, and of nothing
afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.hooks.gradients import gradient_hooks
from scale_core.hooks.microbatch_grads import (
    MicrobatchStep,
    StepObserver,
    StepSignature,
    on_microbatch_steps,
    pipeline_ranks,
    register_pipeline,
)


class Heard:
    """Writes down what it is told."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def begins(self, step: MicrobatchStep) -> StepObserver:
        self.heard.append(f"{self.name} begins")
        return StepObserver(self.ended, self.failed, self.whole)

    def ended(self, weights: Sequence[float]) -> None:
        assert sum(weights) == 1.0
        self.heard.append(f"{self.name} ended with {len(weights)}")

    def failed(self) -> None:
        self.heard.append(f"{self.name} failed")

    def whole(self, param: Tensor, grad: Tensor) -> None:
        self.heard.append(f"{self.name} got {grad.sum().item():g} of {tuple(param.shape)}")


def test_a_step_tells_all_who_listen_to_it_until_it_ends() -> None:
    heard: list[str] = []
    first, second = Heard("first", heard), Heard("second", heard)
    assert not gradient_hooks.microbatch_steps
    handles = [on_microbatch_steps(callback) for callback in (first.begins, lambda step: None, second.begins)]
    assert gradient_hooks.microbatch_steps
    param = nn.Parameter(torch.ones(2))
    step = MicrobatchStep([param], [param])
    assert not step.has_observers
    step.begin()
    assert step.has_observers and step.sample is None
    with step.micro_batch(3):
        assert step.sample == 3
    assert step.sample is None
    step.report_grad(param, torch.ones(2))
    step.end([0.25] * 4)
    step.fail()
    step.end([0.2] * 5)
    ended = ["first ended with 4", "second ended with 4"]
    assert heard == ["first begins", "second begins", "first got 2 of (2,)", "second got 2 of (2,)", *ended]
    for handle in handles:
        handle.remove()
    heard.clear()
    other = MicrobatchStep([param])
    other.begin()
    other.end([1.0])
    assert heard == [] and not other.has_observers and not gradient_hooks.microbatch_steps


def test_an_observer_that_refuses_fails_the_step_for_others() -> None:
    heard: list[str] = []

    def refuses(step: MicrobatchStep) -> StepObserver:
        raise ValueError("not this one")

    handles = [on_microbatch_steps(Heard("first", heard).begins), on_microbatch_steps(refuses)]
    step = MicrobatchStep([])
    with pytest.raises(ValueError, match="not this one"):
        step.begin()
    step.end([1.0])
    for handle in handles:
        handle.remove()
    assert heard == ["first begins", "first failed"]


def test_no_sample_is_left_where_a_pass_of_it_fails() -> None:
    step = MicrobatchStep([])
    with pytest.raises(ArithmeticError), step.micro_batch(0):
        raise ArithmeticError
    assert step.sample is None


def test_parameters_are_told_apart_by_identity() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    step = MicrobatchStep([one, other], [one], [other])
    assert one in step.in_parts and other not in step.in_parts
    assert other in step.counted_elsewhere and one not in step.counted_elsewhere


def test_a_module_announces_while_it_lives_for_its_parameters() -> None:
    module = nn.Linear(2, 2)
    before = module.weight
    ranks = Group(0, 2, None, "fake", (0, 1))
    register_pipeline(module, ranks)
    assert pipeline_ranks([torch.ones(1), before]) == (ranks, ranks)
    module.weight = after = nn.Parameter(torch.ones(2, 2))
    assert pipeline_ranks([before]) is None and pipeline_ranks([after]) == (ranks, ranks)
    register_pipeline(module, ranks, Group())
    assert pipeline_ranks([after]) == (ranks, Group())
    del module
    gc.collect()
    assert pipeline_ranks([after]) is None


def test_samples_of_unequal_size_end_with_their_weights() -> None:
    found: list[Sequence[float]] = []
    terms = StepSignature((0, 3), "two of these")
    listeners = [StepObserver(found.append, print, print), StepObserver(found.append, print, print, terms)]
    handles = [on_microbatch_steps(lambda step, each=each: each) for each in listeners]  # type: ignore[misc]
    step = MicrobatchStep([])
    step.begin()
    assert step.terms == [terms]
    step.end([0.25, 0.75])
    assert found == [[0.25, 0.75]] * 2 and step.terms == []
    for handle in handles:
        handle.remove()
