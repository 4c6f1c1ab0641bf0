"""nonfinite.py: who computes the first infinity or NaN is named, and the step is aborted on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from shard_arguments import shard_arguments
from torch import Tensor, nn

from scale_check.exact import assert_equal
from scale_check.simulate import simulate
from scale_core import StepError
from scale_core.comm.group import group_of
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardOptions, fully_shard

WIDTH = 4


class _Poison(torch.autograd.Function):
    """The identity, through which every gradient becomes infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


class Block(nn.Module):
    """Spoils its output or its gradient, once, where `spoils` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.spoils = ""

    def forward(self, x: Tensor) -> Tensor:
        spoils, self.spoils = self.spoils, ""
        hidden = torch.tanh(self.first(x))
        if spoils == "backward":
            hidden = _Poison.apply(hidden)
        x = x + self.second(hidden)
        return x / 0 if spoils == "forward" else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sharded(**kwargs: Any) -> nn.Module:
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, **shard_arguments(**kwargs))


def data(step: int, micro: int = 0) -> Tensor:
    seed = 100 * step + 10 * micro + group_of().rank
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, step: int, num_micro: int, spoil: tuple[int, str] | None) -> None:
    """One step; block 1 spoils what it computes in one of the micro-batches."""
    for micro in range(num_micro):
        if spoil is not None and micro == spoil[0]:
            model.blocks[1].spoils = spoil[1]
        with model.no_sync() if micro < num_micro - 1 else nullcontext():
            model(data(step, micro)).square().mean().backward()


WORDS = {
    "forward": "an output of unit 'blocks.1' is not finite on rank 1, and the first",
    "backward": "the local gradient of 'blocks.1.first.bias', a parameter of unit 'blocks.1', is not finite on rank 1",
}


@pytest.mark.fault(71)
@pytest.mark.parametrize("at_step, num_micro, at_micro", [(0, 1, 0), (2, 1, 0), (0, 2, 0), (2, 2, 0), (2, 2, 1)])
@pytest.mark.parametrize("where", WORDS)
@pytest.mark.ranks(2, in_turn=True)
def test_all_ranks_abort_the_step_and_one_says_where(where: str, at_step: int, num_micro: int, at_micro: int) -> None:
    """Rank 1 computes something that is not finite; both raise, and train on as a model that never met it."""
    model, beside = sharded(error_if_nonfinite=True), sharded()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, beside)]
    for step in range(at_step + 2):
        for each, optimizer in zip((model, beside), optimizers, strict=True):
            if step != at_step:
                train(each, step, num_micro, None)
                optimizer.step()
                optimizer.zero_grad()
            elif each is model:
                mine = group_of().rank == 1
                with pytest.raises(FloatingPointError if mine else StepError) as caught:
                    train(each, step, num_micro, (at_micro, where) if mine else None)
                text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
                assert WORDS[where] in text and "because rank 1 failed" in text, text
                assert all(param.grad is None for param in each.parameters())
                each.zero_grad()  # What waits from the micro-batches before.
    assert_equal(model, beside)


@pytest.mark.ranks(2)
def test_what_waited_under_no_sync_is_kept_in_the_first_step_too() -> None:
    """In the first step all are told at once where all is compared, and in the end where it is not any more."""
    for spoilt in (1, 2):
        model, beside = sharded(error_if_nonfinite=True), sharded()
        mine = group_of().rank == 1
        with pytest.raises(FloatingPointError if mine else StepError):
            train(model, 0, 4, (spoilt, "backward") if mine else None)
        for micro in range(3):
            # Told at once, no rank keeps the pass; otherwise the other one has it, and the spoilt one leaves nothing.
            keeps = micro < spoilt or (spoilt == 2 and not mine)
            with beside.no_sync():
                (beside(data(0, micro)).square().mean() if keeps else (beside(data(0, micro)) * 0).sum()).backward()
        for each in (model, beside):
            each(data(1)).square().mean().backward()
        for param, expected in zip(model.parameters(), beside.parameters(), strict=True):
            assert param.grad is not None and expected.grad is not None and torch.equal(param.grad, expected.grad)


@contextmanager
def refused(match: str) -> Iterator[None]:
    with pytest.raises(FloatingPointError, match=match):
        yield


@pytest.mark.parametrize("wrap", ["function", "wrapper", "meta", "half"])
def test_however_a_model_is_wrapped_it_is_looked_at(wrap: str) -> None:
    model: nn.Module
    if wrap == "meta":
        with torch.device("meta"):
            model = Net()
        model = fully_shard(model, options=ShardOptions(error_if_nonfinite=True))
    elif wrap == "wrapper":
        model = FullyShardedDataParallel(Net(), error_if_nonfinite=True)
    elif wrap == "half":
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fully_shard(Net(), options=ShardOptions(error_if_nonfinite=True), mp_policy=half)
    else:
        model = sharded(error_if_nonfinite=True)
    for where, words in (("forward", "an output of"), ("backward", r"the local gradient of 'blocks.1.first.bias'")):
        model(data(0)).square().mean().backward()
        model.zero_grad()
        model.blocks[1].spoils = where
        with refused(f"{words}.* is not finite on rank 0.*: skip the batch"):
            model(data(0)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())


def test_it_is_off_by_default_and_for_what_is_not_trained() -> None:
    model = sharded()
    model.blocks[1].spoils = "forward"
    model(data(0)).square().mean().backward()
    assert not all(bool(param.grad.isfinite().all()) for param in model.parameters())
    model = sharded(error_if_nonfinite=True)
    model.blocks[1].spoils = "forward"
    with torch.no_grad():
        assert not model(data(0)).isfinite().all()


def test_a_parameter_that_is_not_finite_itself_is_named() -> None:
    model = sharded(error_if_nonfinite=True)
    with torch.no_grad():
        model.blocks[2].second.weight[1, 3] = float("nan")
    with refused("an output of unit 'blocks.2' .*'blocks.2.second.weight' itself is not finite on this rank.*snapshot"):
        model(data(0))


def test_sparse_gradients_and_integers_are_looked_at_as_they_are() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.table(x), x, torch.empty(0)

    model = fully_shard(Lookup(), options=ShardOptions(error_if_nonfinite=True))
    model(torch.tensor([1, 1]))[0].sum().backward()
    model.zero_grad()
    with refused("the local gradient of 'table.weight', a parameter of the root unit,"):
        (model(torch.tensor([1, 1]))[0] * torch.tensor(float("inf"))).sum().backward()


@pytest.mark.simulation
def test_a_simulation_takes_everything_for_finite() -> None:
    with simulate(rank=0, world_size=2):
        model = sharded(error_if_nonfinite=True)
        for _ in range(2):
            model(torch.randn(3, WIDTH)).square().mean().backward()


def test_anything_but_a_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="error_if_nonfinite: expected True or False, got 'nan'"):
        fully_shard(copy.deepcopy(Net()), options=ShardOptions(error_if_nonfinite="nan"))  # type: ignore[arg-type]  # what a user may write
