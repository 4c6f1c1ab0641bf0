"""collective_matmul.py: pieces that travel beside the products are the layers without overlap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from with_options import with_options

from scale_core.comm import work as pending
from scale_core.comm.group import Group, group_of
from scale_tp import LayerOptions
from scale_tp.async_tp.all_reduce_matmul import linear_all_reduce, linear_with_grad_all_reduce
from scale_tp.async_tp.collective_matmul import gather_linear, linear_scatter
from scale_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from scale_tp.mappings import scatter_to_sequence_parallel_region
from scale_tp.split import even_sizes

POSITIONS, FEATURES = 7, 6


@dataclass(frozen=True)
class Case:
    """One way to train two layers; without a dimension of the sequence all ranks have all of it."""

    sequence_dim: int | None = -2
    dtype: torch.dtype = torch.float32
    bias: bool = True
    autocast: bool = False
    recomputes: bool = False
    pieces: tuple[int, ...] = (2,)


CASES = [
    Case(pieces=(1, 2, 9)),
    Case(0, bias=False, recomputes=True),
    Case(1, torch.bfloat16),
    Case(autocast=True),
    Case(None, pieces=(1, 2, 99)),
    Case(None, torch.bfloat16, bias=False, recomputes=True),
    Case(None, autocast=True),
]


def _whole() -> tuple[Tensor, list[Tensor], Tensor]:
    """[positions, batch, features], two weights to 5 and 4 features, and one back to 3."""
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return drawn(POSITIONS, 2, FEATURES), [drawn(5, FEATURES), drawn(4, FEATURES)], drawn(3, 9)


def _loss(output: Tensor, first: int = 0) -> Tensor:
    """A sum in which each element has a weight of its own, by its place in the full output."""
    numbers = torch.arange(output.numel(), dtype=output.dtype).view_as(output) + first * output[:1].numel()
    return (output * numbers.sin()).sum()


def _plain() -> tuple[Tensor, list[Tensor]]:
    x, columns, row = _whole()
    leaves = [tensor.requires_grad_() for tensor in (x, *columns, row)]
    inside = torch.cat([x @ weight.mT for weight in columns], -1).tanh()
    output = inside @ row.mT
    return output.detach(), list(torch.autograd.grad(_loss(output), leaves))


def _divided(group: Group, pieces: int, ask: bool) -> tuple[Tensor, list[Tensor], list[list[int]]]:
    """This rank's shard of the same; the features between are divided."""
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


@pytest.mark.ranks(2, 3)
def test_products_in_pieces_have_the_plain_numbers() -> None:
    group = group_of()
    expected, (of_x, *of_columns, of_row) = _plain()
    sizes = even_sizes(POSITIONS, group.size)
    for pieces, ask in ((1, True), (2, False), (3, False), (9, False)):  # more pieces than positions, too
        output, (of_part, *of_weights), (*shares, inner) = _divided(group, pieces, ask)
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(output, expected.split(sizes)[group.rank], **close)
        torch.testing.assert_close(of_part, of_x.split(sizes)[group.rank], **close)
        for found, whole, share in zip(of_weights, of_columns, shares, strict=False):
            torch.testing.assert_close(found, whole[share], **close)
        torch.testing.assert_close(of_weights[-1], of_row[:, inner], **close)


@pytest.mark.ranks(2)
def test_transfers_begin_before_the_products() -> None:
    """A log of what begins, what is waited for and what is multiplied: of each round, the product stands between."""
    group, log = group_of(), []
    begin, wait = pending.CollectiveWork.__init__, pending.CollectiveWork.wait

    def logged_begin(self: pending.CollectiveWork, op: str, *args: object, **kwargs: object) -> None:
        log.append("begin")
        begin(self, op, *args, **kwargs)  # type: ignore[arg-type]

    def logged_wait(self: pending.CollectiveWork, *args: object) -> Tensor:
        log.append("wait")
        return wait(self, *args)  # type: ignore[arg-type]

    class Multiplied(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
            if "mm" in str(func):
                log.append("multiply")
            return func(*args, **(kwargs or {}))

    pending.CollectiveWork.__init__, pending.CollectiveWork.wait = logged_begin, logged_wait  # type: ignore[method-assign]
    weight, x = torch.randn(2, 3, requires_grad=True), torch.randn(4, 1, 3, requires_grad=True)

    def logged(act: Callable[[], Tensor]) -> tuple[list[str], list[str]]:
        log.clear()
        output = act()
        forward = list(log)
        log.clear()
        torch.autograd.grad(output.sum(), (x, weight))
        return forward, list(log)

    try:
        with Multiplied():
            gathers = logged(lambda: gather_linear(x, [weight], group, sizes=[4, 4], pieces=2)[0])
            scatters = logged(lambda: linear_scatter(x, weight, group, sizes=[2, 2], pieces=2))
            copies = logged(lambda: linear_with_grad_all_reduce(x, weight, None, group)[1])
            sums = logged(lambda: linear_all_reduce(x, weight, group, 2))
    finally:
        pending.CollectiveWork.__init__, pending.CollectiveWork.wait = begin, wait  # type: ignore[method-assign]
    # The own part is multiplied first where it is gathered, and last where it is summed.
    assert gathers[0] == ["begin", "begin", "multiply", "wait", "multiply", "wait", "multiply"]
    assert scatters[0] == ["multiply", "begin", "multiply", "begin", "multiply", "wait", "wait"]
    assert sums[0] == ["multiply", "begin", "multiply", "begin", "wait", "wait"] and copies[0] == ["multiply"]
    # The input's gradient is on its way while the weight's is computed; and so is what has not been kept.
    assert gathers[1] == ["begin", "multiply", "begin", "wait", "multiply", "wait"]
    assert copies[1] == ["multiply", "begin", "multiply", "wait"]
    assert scatters[1] == ["begin", "begin", "multiply", "wait", "multiply", "wait", "multiply", "multiply"]
    assert sums[1] == ["multiply", "multiply"]


def _whole_numbers(*shape: int, seed: int) -> Tensor:
    """Sums of products of these are exact in any order, so that no kernel's choice is seen."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))


def _trained(layers: tuple[nn.Module, nn.Module], x: Tensor, recomputes: bool) -> list[Tensor]:
    """What two layers give, one behind the other, and all gradients."""
    up, down = layers
    leaf = x.clone().requires_grad_()

    def both(given: Tensor) -> Tensor:
        return down(up(given).relu())

    output = checkpoint(both, leaf, use_reentrant=False) if recomputes else both(leaf)
    weights = _whole_numbers(*output.shape, seed=group_of().rank).to(output.dtype)
    params = [*up.parameters(), *down.parameters()]
    return [output, *torch.autograd.grad((output * weights).sum(), [leaf, *params])]


def _pair(case: Case, overlap_pieces: int | None) -> tuple[nn.Module, nn.Module]:
    options: Any = {
        "process_group": group_of(),
        "dtype": case.dtype,
        "bias": case.bias,
        "overlap_pieces": overlap_pieces,
        "sequence_parallel": case.sequence_dim is not None,
        "sequence_dim": -2 if case.sequence_dim is None else case.sequence_dim,
    }
    up = ColumnParallelLinear(FEATURES, 5, **with_options(LayerOptions, gather_output=False, **options))
    down = RowParallelLinear(5, 3, **with_options(LayerOptions, input_is_parallel=True, **options))
    with torch.no_grad():
        for number, param in enumerate([*up.parameters(), *down.parameters()]):
            param.copy_(_whole_numbers(*param.shape, seed=10 + number))
    return up, down


@pytest.mark.ranks(2, 3)
def test_overlapping_layers_are_those_without_to_the_bit() -> None:
    group = group_of()
    for case in CASES:
        x = _whole_numbers(POSITIONS, 2, FEATURES, seed=1).to(case.dtype)
        if case.sequence_dim is not None:
            dim = case.sequence_dim % 3
            x = scatter_to_sequence_parallel_region(x.movedim(0, dim).contiguous(), group, dim=dim)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            expected = _trained(_pair(case, None), x, case.recomputes)
            for pieces in case.pieces:
                found = _trained(_pair(case, pieces), x, case.recomputes)
                for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                    assert one.dtype == other.dtype and torch.equal(one, other), (case, pieces, number)


@pytest.mark.ranks(3)
def test_summands_are_added_in_rank_order() -> None:
    """Numbers whose sum in fp32 is another one in any other order: 2^26 swallows a 1."""
    group = group_of()
    sizes = (2, 1, 2)
    for summands, total in (((2.0**26, 1.0, -(2.0**26)), 0.0), ((2.0**26, -(2.0**26), 1.0), 1.0)):
        weight, x = torch.tensor([[summands[group.rank]]]), torch.ones(5, 1)
        for pieces in (1, 2):
            found = linear_scatter(x, weight, group, sizes=sizes, pieces=pieces)
            assert torch.equal(found, torch.full((sizes[group.rank], 1), total)), (summands, pieces)


def _kept(act: Callable[[], object]) -> int:
    """How many bytes are kept for the backward pass, each storage once."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = act()  # Alive until all has been counted, or its memory would be used twice.
    assert output is not None
    return sum(found.values())


@pytest.mark.ranks(2)
def test_overlap_keeps_no_more_for_the_backward() -> None:
    group = group_of()
    for sequence_parallel, autocast in itertools.product([True, False], [True, False]):
        options: Any = {"gather_output": False, "sequence_parallel": sequence_parallel, "process_group": group}
        x = torch.randn(1, 64, 32).requires_grad_()
        numbers = []
        for pieces in (None, 2):
            layer = ColumnParallelLinear(
                32, 8, **with_options(LayerOptions, bias=False, overlap_pieces=pieces, **options)
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                numbers.append(_kept(lambda layer=layer, x=x: layer(x)))  # type: ignore[misc]
        without, overlapping = numbers
        assert overlapping <= without, (sequence_parallel, autocast, numbers)


def test_on_one_rank_nothing_is_sent() -> None:
    expected, grads = _plain()
    output, found, _ = _divided(Group(), 2, True)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for mine, whole in zip(found, grads, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)


def test_readers_gradients_are_added_in_the_order_of_autograd() -> None:
    """The last one first, to the bit: 1 is swallowed by 2^26 unless that has gone before."""
    x, factors = torch.ones(1, 1, requires_grad=True), (1.0, 2.0**26, -(2.0**26))
    weights = [torch.tensor([[factor]], requires_grad=True) for factor in factors]
    plain = sum(nn.functional.linear(x, weight) for weight in weights)
    ours = sum(gather_linear(x, weights, Group(), sizes=[1], pieces=1))
    (expected,), (found,) = (torch.autograd.grad(output, x) for output in (plain, ours))
    assert torch.equal(found, expected) and found.item() == 1.0


def test_more_pieces_make_no_half_precision_gradient_worse() -> None:
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
    with pytest.raises(ValueError, match=r"expected pieces to be at least 1, got 0"):
        gather_linear(x, [weight], group, pieces=0)
    with pytest.raises(ValueError, match=r"of which rank 1 has the 3 of its tensor, got \[3, 4\]"):
        gather_linear(x, [weight], group, sizes=[3, 4])
    with pytest.raises(ValueError, match=r"the parts of 2 ranks, which add up to the 3 .*, got \[1, 1\]"):
        linear_scatter(x, weight, group, sizes=[1, 1])
