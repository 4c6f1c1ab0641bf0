"""overlap.py: pieces that travel beside the products are the layers without overlap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scale_core import pending
from scale_core.group import Group, group_of
from scale_core.testing import run_ranks
from scale_tp.overlap import gather_linear, linear_scatter
from scale_tp.split_sizes import even_sizes

POSITIONS, FEATURES = 7, 6


def _whole() -> tuple[Tensor, list[Tensor], Tensor]:
    """[positions, batch, features], two weights to 5 and 4 features, and one back to 3."""
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return drawn(POSITIONS, 2, FEATURES), [drawn(5, FEATURES), drawn(4, FEATURES)], drawn(3, 9)


def _loss(output: Tensor, first: int = 0) -> Tensor:
    """A sum in which each element has a weight of its own, by its place in the whole output."""
    numbers = torch.arange(output.numel(), dtype=output.dtype).view_as(output) + first * output[:1].numel()
    return (output * numbers.sin()).sum()


def _plain() -> tuple[Tensor, list[Tensor]]:
    x, columns, row = _whole()
    leaves = [tensor.requires_grad_() for tensor in (x, *columns, row)]
    inside = torch.cat([x @ weight.mT for weight in columns], -1).tanh()
    output = inside @ row.mT
    return output.detach(), list(torch.autograd.grad(_loss(output), leaves))


def _divided(group: Group, pieces: int, ask: bool) -> tuple[Tensor, list[Tensor], list[list[int]]]:
    """This rank's part of the same; the features between are divided."""
    x, columns, row = _whole()
    sizes = even_sizes(POSITIONS, group.size)
    shares = [torch.arange(weight.shape[0]).tensor_split(group.size)[group.rank].tolist() for weight in columns]
    inner = shares[0] + [5 + index for index in shares[1]]
    part = x.split(sizes)[group.rank].clone()
    leaves = [
        tensor.requires_grad_()
        for tensor in (part, *(weight[share] for weight, share in zip(columns, shares, strict=True)), row[:, inner])
    ]
    known = None if ask else sizes
    gathered = gather_linear(leaves[0], leaves[1:3], group, sizes=known, pieces=pieces)
    output = linear_scatter(torch.cat(gathered, -1).tanh(), leaves[3], group, sizes=known, pieces=pieces)
    grads = torch.autograd.grad(_loss(output, sum(sizes[: group.rank])), leaves)
    return output.detach(), list(grads), [*shares, inner]


def _equals_plain() -> None:
    group = group_of()
    expected, (of_x, *of_columns, of_row) = _plain()
    sizes = even_sizes(POSITIONS, group.size)
    for pieces, ask in ((1, True), (2, False), (3, False), (9, False)):  # more pieces than positions, too
        output, (of_part, *of_weights), (*shares, inner) = _divided(group, pieces, ask)
        close = {"rtol": 1e-13, "atol": 1e-12}
        torch.testing.assert_close(output, expected.split(sizes)[group.rank], **close)
        torch.testing.assert_close(of_part, of_x.split(sizes)[group.rank], **close)
        for found, whole, share in zip(of_weights, of_columns, shares, strict=False):
            torch.testing.assert_close(found, whole[share], **close)
        torch.testing.assert_close(of_weights[-1], of_row[:, inner], **close)


def _transfers_begin_before_the_products() -> None:
    """A log of what begins, what is waited for and what is multiplied: of each round, the product stands between."""
    group, log = group_of(), []
    begin, wait = pending.Pending.__init__, pending.Pending.wait

    def logged_begin(self: pending.Pending, op: str, *args: object, **kwargs: object) -> None:
        log.append("begin")
        begin(self, op, *args, **kwargs)  # type: ignore[arg-type]

    def logged_wait(self: pending.Pending, *args: object) -> Tensor:
        log.append("wait")
        return wait(self, *args)  # type: ignore[arg-type]

    class Multiplied(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
            if "mm" in str(func):
                log.append("multiply")
            return func(*args, **(kwargs or {}))

    pending.Pending.__init__, pending.Pending.wait = logged_begin, logged_wait  # type: ignore[method-assign]
    try:
        x = torch.randn(4, 1, 3)
        with Multiplied(), torch.no_grad():
            gather_linear(x, [torch.randn(2, 3)], group, sizes=[4, 4], pieces=2)
            gathered, log[:] = list(log), []
            linear_scatter(torch.randn(8, 1, 3), torch.randn(2, 3), group, sizes=[4, 4], pieces=2)
    finally:
        pending.Pending.__init__, pending.Pending.wait = begin, wait  # type: ignore[method-assign]
    assert gathered == ["begin", "begin", "multiply", "wait", "multiply", "multiply", "wait", "multiply"]
    assert log == ["multiply", "begin", "multiply", "multiply", "begin", "multiply", "wait", "wait"]


def _two() -> None:
    _equals_plain()
    _transfers_begin_before_the_products()


def test_pieces_on_their_way_change_no_number_and_begin_before_the_products() -> None:
    run_ranks(_two, 2)
    run_ranks(_equals_plain, 3)


def test_on_one_rank_nothing_is_sent() -> None:
    expected, grads = _plain()
    output, found, _ = _divided(Group(), 2, True)
    torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)
    for mine, whole in zip(found, grads, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-13, atol=1e-12)


def test_more_pieces_do_not_make_a_gradient_in_half_precision_worse() -> None:
    """Each piece is rounded, and their sum once more: what was added before is not rounded with each."""
    generator = torch.Generator().manual_seed(0)
    x, weight, up = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((512, 16), (8, 16), (512, 8)))
    exact = up.double().T @ x.double()
    rounded = (exact.bfloat16() - exact).norm()
    for pieces in (1, 4, 32):
        for gathers in (True, False):
            leaf = weight.clone().requires_grad_()
            if gathers:
                (output,) = gather_linear(x, [leaf], Group(), sizes=[512], pieces=pieces)
            else:
                output = linear_scatter(x, leaf, Group(), pieces=pieces)
            (found,) = torch.autograd.grad((output * up).sum(), leaf)
            assert found.dtype == torch.bfloat16
            assert (found - exact).norm() <= (1.05 if pieces == 1 else 1.5) * rounded, pieces


def test_sizes_and_pieces_that_make_no_sense_are_refused() -> None:
    group = Group(1, 2, None, "fake", (0, 1))
    x, weight = torch.zeros(3, 1, 2), torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"expected pieces of at least 1, got 0"):
        gather_linear(x, [weight], group, pieces=0)
    with pytest.raises(ValueError, match=r"of which rank 1 has the 3 positions of its input, got \[3, 4\]"):
        gather_linear(x, [weight], group, sizes=[3, 4])
    with pytest.raises(ValueError, match=r"the parts of 2 ranks, which add up to 3 positions, got \[1, 1\]"):
        linear_scatter(x, weight, group, sizes=[1, 1])
