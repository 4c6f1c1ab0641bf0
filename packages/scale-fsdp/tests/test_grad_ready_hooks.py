"""offload/backward.py: hooks that see each gradient when it is ready, and what is left of one that was used."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scale_core.hooks.gradients import (
    call_grad_published_hooks,
    call_reduced_grad_hooks,
    has_reduced_grad_hooks,
    is_consumed_in_backward,
)
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_fsdp.offload.backward import ConsumedGradient, GradReadyHooks


class Listener:
    def __init__(self, *, at_once: bool = False) -> None:
        self.heard: list[tuple[Tensor, bool]] = []
        self.arrivals = GradReadyHooks(self.tell, at_once=at_once)

    def tell(self, param: Tensor, grad: Tensor) -> None:
        self.heard.append((param, param.grad is grad))


def test_a_plain_parameter_is_heard_of_once_per_pass() -> None:
    listener, weight, other = Listener(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    listener.arrivals.register([weight, other])
    listener.arrivals.register([weight, other])
    (weight * weight).sum().backward()
    assert [(param is weight, there) for param, there in listener.heard] == [(True, True)]


def test_one_that_is_frozen_is_watched_from_when_it_trains() -> None:
    listener, weight = Listener(), nn.Parameter(torch.ones(2), requires_grad=False)
    listener.arrivals.register([weight])
    weight.requires_grad_(True)
    weight.sum().backward()
    assert not listener.heard
    listener.arrivals.register([weight])
    weight.sum().backward()
    assert len(listener.heard) == 1


def test_a_shard_is_reported_by_its_reduction_without_a_hook() -> None:
    listener, shard, foreign = Listener(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for param in (shard, foreign):
        set_shard(param, Shard("weight", (4,), 0, 2))
    listener.arrivals.register([shard])
    assert not shard._post_accumulate_grad_hooks
    grad = torch.ones(2)
    call_reduced_grad_hooks([foreign, shard], [torch.ones(2), grad])
    assert listener.heard == [(shard, False)]
    shard.grad = grad
    call_grad_published_hooks([foreign, shard])
    assert [(param is shard, there) for param, there in listener.heard] == [(True, False), (True, True)]


def test_who_uses_a_gradient_at_once_hears_when_it_is_there() -> None:
    listener, shard, other = Listener(at_once=True), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for param in (shard, other):
        set_shard(param, Shard("weight", (4,), 0, 2))
    gc.collect()  # Of what other tests have left.
    assert not has_reduced_grad_hooks()
    listener.arrivals.register([shard])
    assert has_reduced_grad_hooks() and is_consumed_in_backward(shard) and not is_consumed_in_backward(other)
    call_reduced_grad_hooks([shard], [torch.ones(2)])
    assert not listener.heard
    shard.grad = torch.ones(2)
    call_grad_published_hooks([shard])
    assert listener.heard == [(shard, True)]
    del listener
    gc.collect()
    assert not is_consumed_in_backward(shard)


def test_with_the_listener_everything_goes() -> None:
    listener, weight, shard = Listener(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    set_shard(shard, Shard("weight", (4,), 0, 2))
    heard = listener.heard
    listener.arrivals.register([weight, shard])
    del listener
    gc.collect()
    assert not weight._post_accumulate_grad_hooks
    weight.sum().backward()
    call_grad_published_hooks([shard])
    call_reduced_grad_hooks([shard], [torch.ones(2)])
    assert not heard


# A gradient that is gone says so to whoever wants it.


def used() -> nn.Parameter:
    param = nn.Parameter(torch.ones(3, 4))
    param.grad = ConsumedGradient(param)
    return param


def scale_and_step(param: nn.Parameter) -> None:
    scaler = ShardedGradScaler()
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([param], lr=0.1))


WANTS: dict[str, Callable[[nn.Parameter], object]] = {
    "torch's clipping": lambda param: torch.nn.utils.clip_grad_norm_([param], 1.0),
    "clipping by value": lambda param: torch.nn.utils.clip_grad_value_([param], 1.0),
    "scale-core's clipping": lambda param: clip_grad_norm_([param], 1.0),
    "a scaler": scale_and_step,
    "another backward": lambda param: (param * 2).sum().backward(),
    "a look": lambda param: param.grad.norm().item(),  # type: ignore[union-attr]
    "another optimizer": lambda param: torch.optim.SGD([param], lr=0.1).step(),
    "a sum": lambda param: param.grad + 1,  # type: ignore[operator]
    "a stack": lambda param: torch.stack([param.grad]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("want", WANTS)
def test_whoever_wants_it_learns_what_has_happened(want: str) -> None:
    param = used()
    with pytest.raises(RuntimeError, match=r"gradient of a parameter of shape \(3, 4\) was used .*overlap_step=False"):
        WANTS[want](param)
    assert torch.equal(param, torch.ones(3, 4))


def test_it_looks_like_the_gradient_and_has_no_memory() -> None:
    grad = used().grad
    assert grad is not None and grad.shape == (3, 4) and grad.dtype == torch.float32 and not grad.is_sparse
    assert grad.untyped_storage().nbytes() == 0
    assert repr(grad) == "ConsumedGradient(a parameter of shape (3, 4))"


def test_it_can_be_dropped_and_names_a_shard() -> None:
    param = used()
    torch.optim.SGD([param], lr=0.1).zero_grad()
    assert param.grad is None
    set_shard(param, Shard("head.weight", (3, 4), 0, 12))
    param.grad = ConsumedGradient(param)
    with pytest.raises(RuntimeError, match=r"the gradient of 'head\.weight' was used"):
        param.grad.mul_(2)
