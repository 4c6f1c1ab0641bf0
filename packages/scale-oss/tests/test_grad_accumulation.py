"""grad_accumulation.py: gradients add up in `param.grad` as in plain PyTorch, to the bit, and outlive a pass that
fails.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_core.hooks.autograd import after_gradient
from scale_oss.grad_accumulation import GradAccumulation


class Holder:
    """A parameter whose passes are followed, as a reducer does."""

    def __init__(self) -> None:
        self.param = nn.Parameter(torch.linspace(0.1, 0.9, 7))
        self.accumulation = GradAccumulation(self.begin)
        self.num_begun = 0
        after_gradient(self.param, lambda _: self.accumulation.seen.update({id(self.param): self.param}))

    def begin(self) -> None:
        self.num_begun += 1

    def add(self, step: int, power: int = 1) -> None:
        """A backward pass; its gradient is a sum of `power` ones, each of which comes by itself."""
        loss(self.param, step, power).backward()


def loss(param: nn.Parameter, step: int, power: int = 1) -> Tensor:
    x = torch.full((7,), 1 / (3 + step), requires_grad=True)
    for _ in range(power):
        x = checkpoint(lambda x: x * param / 7, x, use_reentrant=True) if power > 1 else x * param / 7
    return (x * 1e5).sum()


def grad_of(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad.clone()


@pytest.mark.fault(77)
@pytest.mark.parametrize("power", [1, 2, 3])
def test_sums_are_those_of_plain_pytorch_to_the_bit(power: int) -> None:
    holder, plain = Holder(), nn.Parameter(torch.linspace(0.1, 0.9, 7))
    for step in range(4):
        holder.add(step, power)
        holder.accumulation.merge()
        holder.accumulation.watch(holder.param)
        loss(plain, step, power).backward()
        assert torch.equal(grad_of(holder.param), grad_of(plain)), (step, power)
    assert holder.num_begun == 3  # Nothing stood there before the first pass.


@pytest.mark.parametrize("power", [1, 2])
def test_a_pass_that_fails_leaves_the_sum_as_it_was(power: int) -> None:
    holder = Holder()
    holder.add(0, power)
    holder.accumulation.rollback()
    assert holder.param.grad is None
    holder.add(1, power)
    holder.accumulation.merge()
    holder.accumulation.watch(holder.param)
    before = grad_of(holder.param)
    holder.add(2, power)
    holder.accumulation.rollback()
    assert torch.equal(grad_of(holder.param), before)


def test_the_reduction_gets_a_sum_once_and_can_give_it_back() -> None:
    holder = Holder()
    holder.add(0)
    holder.accumulation.merge()
    holder.accumulation.watch(holder.param)
    before = grad_of(holder.param)
    holder.add(1)
    holder.param.grad = None  # It was packed.
    taken = holder.accumulation.pop(holder.param)
    assert taken is not None and torch.equal(taken, before) and holder.accumulation.pop(holder.param) is None
    holder.accumulation.rollback()
    assert torch.equal(grad_of(holder.param), before)
    holder.accumulation.stash(holder.param, copied=True)
    grad_of(holder.param)
    assert holder.param.grad is not None
    holder.param.grad.zero_()  # It was used up.
    holder.accumulation.rollback()
    assert torch.equal(grad_of(holder.param), before)
    holder.accumulation.stash(holder.param, copied=False)
    holder.param.grad = None
    holder.accumulation.clear()
    assert holder.param.grad is None


def test_clearing_a_sum_or_looking_at_gradients_is_allowed() -> None:
    holder, plain = Holder(), nn.Parameter(torch.linspace(0.1, 0.9, 7))
    holder.add(0)
    holder.accumulation.merge()
    holder.accumulation.watch(holder.param)
    before = grad_of(holder.param)
    torch.autograd.grad(loss(holder.param, 1), holder.param)  # Its hooks run, and no gradient comes.
    holder.accumulation.merge()
    assert torch.equal(grad_of(holder.param), before)
    holder.param.grad = None
    holder.add(2)
    holder.accumulation.merge()
    loss(plain, 2).backward()
    assert torch.equal(grad_of(holder.param), grad_of(plain))


def test_a_sum_stays_the_tensor_that_it_was() -> None:
    holder, plain = Holder(), nn.Parameter(torch.linspace(0.1, 0.9, 7))
    for step in range(2):
        first = holder.param.grad, plain.grad
        holder.add(step)
        holder.accumulation.merge()
        holder.accumulation.watch(holder.param)
        loss(plain, step).backward()
    assert plain.grad is first[1], "torch adds to the tensor that is there"
    assert holder.param.grad is first[0] and torch.equal(grad_of(holder.param), grad_of(plain))


def test_sparse_gradients_add_up() -> None:
    param, plain = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    holder = Holder()
    for number, row in enumerate((1, 3, 1)):
        for each in (param, plain):
            index = torch.tensor([row])
            out = each[index] if number == 2 else nn.functional.embedding(index, each, sparse=True)
            (out * (number + 0.5)).sum().backward()
        holder.accumulation.merge()
        holder.accumulation.watch(param)
        assert param.grad is not None and plain.grad is not None
        assert torch.equal(param.grad.to_dense(), plain.grad.to_dense()) and param.grad.layout == plain.grad.layout


class Remember(torch.autograd.Function):
    """Notes where its gradient is made."""

    made: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        doubled = grad * 2
        Remember.made.append(doubled.data_ptr())
        return doubled


def test_a_gradient_is_still_taken_over_and_not_copied() -> None:
    holder = Holder()
    holder.accumulation.watch(holder.param)
    Remember.apply(holder.param).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert holder.param.grad is not None and holder.param.grad.data_ptr() == Remember.made[-1]


def test_nobody_is_kept_alive() -> None:
    holder = Holder()
    holder.accumulation.watch(holder.param)
    kept = holder.param
    accumulation = weakref.ref(holder.accumulation)
    kept._post_accumulate_grad_hooks.clear()  # type: ignore[union-attr]  # of this test
    del holder
    gc.collect()
    assert accumulation() is None
    kept.grad = torch.ones(7)
    (kept * 2).sum().backward()
