"""backward.py: a gradient that is gone says so to whoever wants it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_fsdp.offload.backward import ConsumedGradient


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
