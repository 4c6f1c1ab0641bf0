"""step_hooks.py: steps of optimizers are told apart by what decides them, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from scale_core.optim.step_differences import describe_difference
from scale_core.optim.step_hooks import OptimizerSteps, have_diverged

WEIGHT, BIAS = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
NAMED = [("weight", WEIGHT), ("bias", BIAS), ("empty", nn.Parameter(torch.ones(0)))]


def steps_of(*optimizers: Optimizer) -> OptimizerSteps:
    steps = OptimizerSteps()
    for optimizer in optimizers:
        steps.add(optimizer)
    return steps


def groups(*rates: Any) -> list[dict[str, Any]]:
    return [{"params": [param], "lr": rate} for param, rate in zip((WEIGHT, BIAS), rates, strict=True)]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (lambda: SGD(groups(0.1, 0.1), lr=0.1), True),
        (lambda: SGD(groups(0.1, 0.1), lr=0.2), True),  # It is that of the groups.
        (lambda: SGD(groups(0.1, 0.1), foreach=False), True),
        (lambda: SGD(groups(Fraction(1, 10), torch.tensor(0.1, dtype=torch.float64)), foreach=False), True),
        (lambda: SGD(groups(0.1, 0.2)), False),
        (lambda: SGD(groups(0.1, 0.1), momentum=0.9), False),
        (lambda: SGD([WEIGHT, BIAS], lr=0.1), False),
        (lambda: Adam(groups(0.1, 0.1)), False),
    ],
)
def test_fingerprints_are_equal_where_the_steps_are(other: Callable[[], Optimizer], equal: bool) -> None:
    steps, others = steps_of(SGD(groups(0.1, 0.1))), steps_of(other())
    assert (steps.status() == others.status()) is equal
    assert OptimizerSteps().status() == 0 != steps.status()


def test_the_number_of_steps_and_their_order_count() -> None:
    sgd, adam = SGD([WEIGHT], lr=0.1), Adam([BIAS], lr=0.1)
    variants = [steps_of(*optimizers) for optimizers in ((sgd,), (sgd, sgd), (sgd, adam), (adam, sgd))]
    assert len({steps.status() for steps in variants}) == 4
    assert OptimizerSteps.differ([steps.status() for steps in variants[:2]])


class Around(SGD):
    """Steps another one, as wrappers do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([WEIGHT], lr=0.5)
        self.parts = [inner]


def test_a_step_stands_for_those_that_it_consists_of() -> None:
    inner = Adam([WEIGHT])
    outer = Around(inner)
    assert steps_of(inner, inner, outer).status() == steps_of(outer).status()
    assert steps_of(SGD([BIAS]), outer).status() != steps_of(outer).status()


def test_values_without_a_text_of_their_own_are_left_out() -> None:
    class Odd(SGD):
        def __init__(self) -> None:
            super().__init__([WEIGHT], lr=0.1)
            self.defaults["hook"] = self.param_groups[0]["hook"] = object()
            self.param_groups[0]["seconds"] = id(self)  # No hyperparameter.

    assert steps_of(Odd()).status() == steps_of(Odd()).status()


def test_lists_and_tensors_of_one_element_are_compared() -> None:
    """As of DAdaptAdan, which keeps a tensor [1] in its groups, and SCION, which keeps dictionaries and lists."""

    def built(betas: list[float], weighted: float) -> Optimizer:
        optimizer = SGD(groups(0.1, 0.1))
        optimizer.defaults.update(betas=betas, weighted=None)
        for group in optimizer.param_groups:
            group.update(betas=betas, weighted=torch.tensor([weighted]))
        return optimizer

    status = steps_of(built([0.9, 0.99], 0.5)).status()
    assert status == steps_of(built([0.9, 0.99], 0.5)).status()
    assert (
        status != steps_of(built([0.9, 0.98], 0.5)).status() and status != steps_of(built([0.9, 0.99], 0.25)).status()
    )


def test_the_first_parameter_that_differs_is_named() -> None:
    ranks = [
        steps_of(SGD(groups(0.1, 0.3), momentum=0.9)).by_name(NAMED),
        steps_of(SGD(groups(0.1, 0.4), momentum=0.9)).by_name(NAMED),
        steps_of(SGD([WEIGHT], lr=0.1, momentum=0.9)).by_name(NAMED[:1]),
    ]
    said = describe_difference(ranks)
    assert said.startswith(
        "the ranks have stepped differently on 'bias' since they last compared: rank 0: SGD with lr=0.3; rank 1: SGD "
        "with lr=0.4; rank 2: no element. Each rank has updated"
    )
    assert describe_difference([ranks[0], ranks[2]]) == ""  # One has a part that the other has not.


def test_other_kinds_and_numbers_are_described() -> None:
    once, twice = SGD([WEIGHT], lr=0.1), AdamW([WEIGHT], lr=0.1)
    ranks = [steps_of(once), steps_of(twice, twice), OptimizerSteps()]
    said = describe_difference([steps.by_name(NAMED[:1]) for steps in ranks])
    assert "rank 0: SGD with" in said and "rank 1: 2 steps, AdamW with" in said and "rank 2: no step" in said
    assert "'empty'" not in str([steps.by_name(NAMED) for steps in ranks])


def diverge(*ranks: list[Optimizer | None]) -> bool:
    """Whether steps of ranks with the optimizers of each are found to have diverged after a change on the first one."""
    steps = [OptimizerSteps() for _ in ranks]
    for change in (1.0, 0.5):
        for optimizers, mine in zip(ranks, steps, strict=True):
            for optimizer in filter(None, optimizers):
                mine.add(optimizer)
        statuses = [mine.status() for mine in steps]
        for mine in steps:
            mine.end(statuses)
        first = ranks[0][0]
        assert first is not None
        for group in first.param_groups:
            group["lr"] = change * 0.5
    return have_diverged(statuses)


def test_what_has_stepped_alike_has_to_go_on_so() -> None:
    one, other = SGD([WEIGHT], lr=0.1), SGD([BIAS], lr=0.1)
    assert diverge([one], [other])
    one.param_groups[0]["lr"] = 0.1
    assert diverge([one], [other], [None])


def test_what_began_differently_may_go_on_so() -> None:
    assert not diverge([SGD([WEIGHT], lr=0.2)], [SGD([BIAS], lr=0.1)])
    assert not diverge([SGD(groups(0.1, 0.1))], [SGD([BIAS], lr=0.1)])
    assert not diverge([SGD([WEIGHT], lr=0.0)], [SGD([BIAS], lr=0.0)])  # A warmup of rates that differ.


def test_a_rank_that_has_stepped_has_to_go_on() -> None:
    steps, others = steps_of(SGD([WEIGHT], lr=0.1)), steps_of(SGD([BIAS], lr=0.1))
    statuses = [steps.status(), others.status()]
    for mine in (steps, others):
        mine.end(statuses)
    steps.add(SGD([WEIGHT], lr=0.1))
    assert have_diverged([steps.status(), others.status()])
    assert not have_diverged([steps.status(), OptimizerSteps().status()])
