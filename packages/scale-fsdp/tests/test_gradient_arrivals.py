"""gradient_arrivals.py: who is told when a gradient is there, and how long."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from scale_core.backward import report_reduced_grads
from scale_core.shard import Shard, mark
from scale_fsdp.offload.gradient_arrivals import GradientArrivals


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[Tensor, bool]] = []
        self.arrivals = GradientArrivals(self.tell)

    def tell(self, param: Tensor) -> None:
        self.heard.append((param, param.grad is not None))


def test_a_plain_parameter_is_heard_of_once_per_pass() -> None:
    listener, weight, other = Listener(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    listener.arrivals.watch([weight, other])
    listener.arrivals.watch([weight, other])
    (weight * weight).sum().backward()
    assert [(param is weight, there) for param, there in listener.heard] == [(True, True)]


def test_one_that_is_frozen_is_watched_from_when_it_trains() -> None:
    listener, weight = Listener(), nn.Parameter(torch.ones(2), requires_grad=False)
    listener.arrivals.watch([weight])
    weight.requires_grad_(True)
    weight.sum().backward()
    assert not listener.heard
    listener.arrivals.watch([weight])
    weight.sum().backward()
    assert len(listener.heard) == 1


def test_a_shard_is_heard_of_from_whoever_reduces_it_and_gets_no_hook() -> None:
    listener, shard, foreign = Listener(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for param in (shard, foreign):
        mark(param, Shard("weight", (4,), 0, 2))
    listener.arrivals.watch([shard])
    assert not shard._post_accumulate_grad_hooks
    report_reduced_grads([foreign, shard])
    assert [param is shard for param, _ in listener.heard] == [True]


def test_with_the_listener_everything_goes() -> None:
    listener, weight, shard = Listener(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    mark(shard, Shard("weight", (4,), 0, 2))
    heard = listener.heard
    listener.arrivals.watch([weight, shard])
    del listener
    gc.collect()
    assert not weight._post_accumulate_grad_hooks
    weight.sum().backward()
    report_reduced_grads([shard])
    assert not heard
