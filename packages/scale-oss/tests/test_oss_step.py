"""oss.py: what is stepped on bucket by bucket becomes what it becomes at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oss_cases import Lamb, differing, plain_params, train
from torch import nn
from torch.optim import Optimizer

from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_oss import OSS
from scale_oss.oss import step_bucket_by_bucket

KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "one by one": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "all together": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
}


def groups_of(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    wide = [param for param in params.values() if param.ndim > 1]
    return [{"params": wide, "lr": 0.02}, {"params": [param for param in params.values() if param.ndim < 2]}]


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_in_turn_are_stepped_as_all_at_once(kind: str) -> None:
    cls, kwargs = KINDS[kind]
    mine, theirs = plain_params(), plain_params()
    ours, plain = OSS(groups_of(mine), cls, bucket_numel=40, **kwargs), cls(groups_of(theirs), **kwargs)
    assert len(ours.buckets) > 3
    turns: list[int] = []
    ours.optim.register_step_pre_hook(lambda *_: turns.append(sum(bucket.needs_gather for bucket in ours.buckets)))
    for step in range(3):
        for each, params in ((ours, mine), (plain, theirs)):
            train(each, params.values(), [step], without=[1])
            each.param_groups[0]["lr"] *= 0.5
    assert not differing(dict(mine), dict(theirs))
    assert not differing(ours.state_dict(all_ranks=True), plain.state_dict())
    assert turns == [*range(len(ours.buckets), 0, -1)] * 3  # Each was sent before the next one was stepped on.


def test_an_optimizer_of_which_nothing_is_known_takes_one_step() -> None:
    params = plain_params({"first": (3, 3), "second": (4, 2)})
    ours = OSS(params.values(), Lamb, bucket_numel=4)
    assert len(ours.buckets) == 2
    train(ours, params.values(), range(3))
    assert ours.param_groups[0]["count"] == 3


def test_what_was_being_stepped_on_when_it_failed_is_not_sent() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optim = torch.optim.SGD(params, lr=0.1)
    sent: list[int] = []
    for param in params:
        param.grad = torch.ones(2)
    groups = optim.param_groups

    def fail_from_the_second_on(*_: object) -> None:
        if sent:
            raise ZeroDivisionError

    optim.register_step_pre_hook(fail_from_the_second_on)
    with pytest.raises(ZeroDivisionError):
        step_bucket_by_bucket(optim, [params[:1], params[1:]], sent.append, Contract(Group()), {})
    assert sent == [0] and optim.param_groups is groups
    assert params[0].tolist() == pytest.approx([0.9, 0.9]) and params[1].tolist() == [1, 1]
