"""Who has what of an optimizer's parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from scale_adascale.param_info import identity_of, plan_of
from scale_core.comm.group import Group


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(number + 1)) for number in range(3)]


def test_parameters_are_numbered_group_by_group() -> None:
    one, two, three = params()
    plan = plan_of(SGD([{"params": [two]}, {"params": []}, {"params": [three, one]}], lr=0.1), Group(), Group())
    assert all(map(lambda mine, its: mine is its, plan.params, [two, three, one]))
    assert plan.index.tolist() == [0, 2, 2] and plan.holders == plan.params
    assert plan.local_weights.tolist() == plan.total_weights.tolist() == [1.0] * 3 and not any(plan.is_shared)


def test_of_what_ranks_with_other_data_share_each_reads_some() -> None:
    plan = plan_of(SGD(params(), lr=0.1), Group(1, 2, None, "fake", (0, 1)), Group())
    assert plan.is_shared == [True] * 3
    assert plan.portions == [(0, 1), (0, 1), None]  # The longest first, to the rank that reads least so far.
    assert plan.local_weights.tolist() == plan.total_weights.tolist() == [1.0] * 3


def test_each_rank_reads_a_part_of_long_gradients_and_short_ones_are_dealt_out() -> None:
    longs, short = [nn.Parameter(torch.empty(2**17)) for _ in range(2)], [nn.Parameter(torch.ones(5)) for _ in range(6)]
    found = [
        plan_of(SGD([*short, *longs], lr=0.1), Group(rank, 3, None, "fake", (0, 1, 2)), Group()).portions
        for rank in range(3)
    ]
    for rank, portions in enumerate(found):
        assert portions[6:] == [(rank, 3)] * 2
        assert portions[:6].count((0, 1)) == 2 and portions[:6].count(None) == 4
    assert all(readers.count((0, 1)) == 1 for readers in list(zip(*found, strict=True))[:6])


def test_a_plan_is_for_these_parameters_in_these_groups_and_for_whoever_reduces_them() -> None:
    one, two, three = params()
    optimizer = SGD([one, two], lr=0.1)
    seen = [identity_of(optimizer)]
    assert plan_of(optimizer, Group(), Group()).made_for == seen[0]
    optimizer.param_groups[0]["params"][1] = three
    seen.append(identity_of(optimizer))
    optimizer.add_param_group({"params": [two]})
    seen.append(identity_of(optimizer))
    optimizer.gets_reduced_gradients = True  # type: ignore[attr-defined]
    seen.append(identity_of(optimizer))
    assert len(set(seen)) == 4
