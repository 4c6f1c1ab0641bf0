"""Combinations on two ranks, in one start: LocalSGD beside others, and AdaScale where sequences are divided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from scale_adascale import AdaScale
from scale_checkpoint import checkpoint_wrapper
from scale_core.comm.group import Group
from scale_core.testing import run_ranks
from scale_oss import LocalSGD
from scale_tp import context_parallel, split_sequence

EVERY, STEPS, MICRO_BATCHES = 2, 6, 2
Around = Callable[[nn.Module], nn.Module]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)).double()


def backward(model: nn.Module, step: int, rank: int) -> None:
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        (model(x).square().mean() / MICRO_BATCHES).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    gains = []
    for step in steps:
        backward(model, step, rank)
        gains.append(optimizer.gain() if isinstance(optimizer, AdaScale) else 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return gains


def measured(optimizer: SGD) -> AdaScale:
    """Each rank measures its own micro-batches, since nobody averages gradients."""
    return AdaScale(optimizer, num_gradients_to_accumulate=MICRO_BATCHES, process_group=Group())


def optimizer_of(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.3)


def in_one_process(wrap: Callable[[SGD], torch.optim.Optimizer]) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Two models that are averaged after so many steps; the gains of both, and the last average."""
    models = [layers() for _ in range(2)]
    optimizers = [wrap(optimizer_of(model)) for model in models]
    gains: list[list[float]] = [[], []]
    for first in range(0, STEPS, EVERY):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            gains[rank] += train(model, optimizer, range(first, first + EVERY), rank)
        for params in zip(*(model.parameters() for model in models), strict=True):
            mean = (params[0].detach() + params[1].detach()) / 2
            for param in params:
                param.detach().copy_(mean)
    return gains, models[0].state_dict()


def compare(wrap: Callable[[SGD], torch.optim.Optimizer], around: Around) -> list[float]:
    """Trains with LocalSGD over both ranks; returns the gains."""
    model, rank = layers(), dist.get_rank()
    model[1] = around(model[1])
    optimizer = optimizer_of(model)
    stepped = wrap(optimizer)
    local = LocalSGD(model, optimizer, sync_every=EVERY)
    gains = train(model, stepped, range(STEPS), rank)
    expected_gains, expected = in_one_process(wrap)
    assert local.num_syncs == STEPS // EVERY
    assert gains == pytest.approx(expected_gains[rank], rel=1e-9)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=name)
    return gains


def gradients_that_nobody_averages() -> None:
    """AdaScale over the ranks of LocalSGD finds that they step by other gradients."""
    model = layers()
    optimizer = optimizer_of(model)
    stepped = AdaScale(optimizer, num_gradients_to_accumulate=MICRO_BATCHES)
    LocalSGD(model, optimizer, sync_every=EVERY)
    backward(model, 0, dist.get_rank())
    with pytest.raises(RuntimeError, match=r"expected the ranks \[0, 1\] to have the same averaged gradients"):
        stepped.step()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def parts_of_sequences() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = AdaScale(optimizer_of(model))
    called = DistributedDataParallel(model)
    part, refusal = split_sequence(torch.randn(2, 8, 4), dist.group.WORLD), r"ranks \[0, 1\] have parts of the same seq"
    with context_parallel(dist.group.WORLD), pytest.raises(RuntimeError, match=refusal):
        called(part).square().mean().backward()
    optimizer.zero_grad()
    with context_parallel(dist.group.WORLD):
        loss = called(part).square().mean()
    with pytest.raises(RuntimeError, match=refusal):
        loss.backward()
    optimizer.zero_grad()
    called(torch.randn(2, 8, 4)).square().mean().backward()  # Whole sequences are measured.
    optimizer.step()


def two_ranks() -> None:
    gains = compare(measured, lambda module: module)
    assert max(gains) > 1.01
    compare(measured, checkpoint_wrapper)
    compare(lambda optimizer: optimizer, checkpoint_wrapper)
    gradients_that_nobody_averages()
    parts_of_sequences()


@pytest.mark.composition("scale-checkpoint", "LocalSGD")
@pytest.mark.composition("scale-adascale", "LocalSGD")
@pytest.mark.composition("scale-adascale", "scale-checkpoint", "LocalSGD")
@pytest.mark.composition("scale-adascale", "context parallel", refused=True)
def test_on_two_ranks() -> None:
    run_ranks(two_ranks, 2)
