"""mappings.py: collectives with their gradients, each another one's backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scale_tp
from scale_core.comm.group import Group, group_of
from scale_tp import megatron
from scale_tp.comm import RegionExit, copy_to_region
from scale_tp.layers.linear_ops import check_in_region, region_groups
from scale_tp.mappings import copy_many_to_tensor_model_parallel_region
from scale_tp.split import even_sizes

LENGTH = 5


def numbers(*shape: int, seed: int) -> Tensor:
    """Small integers, whose sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def gradient(output: Tensor, of: Tensor, weight: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad((output * weight).sum(), of)
    return grad


@pytest.mark.ranks(2, 3)
def test_several_tensors_are_copied_in_one_message() -> None:
    """Several tensors in one message; of one that wants no gradient nothing is sent."""
    group = group_of()
    tensors = [numbers(3, seed=1), numbers(2, 2, seed=2).requires_grad_(), numbers(seed=3).requires_grad_()]
    copies = copy_many_to_tensor_model_parallel_region(*tensors, process_group=group)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    weights = [[numbers(*tensor.shape, seed=30 + r) for tensor in tensors] for r in range(group.size)]
    loss = sum((copy * w).sum() for copy, w in zip(copies, weights[group.rank], strict=True))
    loss.backward()
    assert tensors[0].grad is None
    for place in (1, 2):
        assert torch.equal(tensors[place].grad, sum(its[place] for its in weights))


@pytest.mark.ranks(2, 3)
def test_a_region_has_the_gradient_of_a_gradient() -> None:
    """The gradient of a gradient: (sum over ranks of (r + 1) x)^2, through a sum and a copy."""
    group = group_of()
    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    factor = sum(rank + 1 for rank in range(group.size))
    copied = megatron.copy_to_tensor_model_parallel_region(x, group)
    y = megatron.reduce_from_tensor_model_parallel_region((group.rank + 1) * copied, group).square()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert first.item() == 2 * factor**2 * 2.0
    assert second.item() == 2 * factor**2


@pytest.mark.ranks(2, 3)
def test_each_region_has_the_backward_of_the_table() -> None:
    group = group_of()
    size, rank = group.size, group.rank
    for dim, shape in ((-1, (2, 3, LENGTH)), (0, (LENGTH, 2)), (1, (2, LENGTH, 3))):
        sizes = even_sizes(LENGTH, size)

        def part(tensor: Tensor, dim: int = dim, sizes: tuple[int, ...] = sizes) -> Tensor:
            return tensor.split(list(sizes), dim)[rank]

        same = numbers(*shape, seed=1).requires_grad_()
        own = numbers(*shape, seed=10 + rank).requires_grad_()
        weights = [numbers(*shape, seed=20 + r) for r in range(size)]
        total = sum(numbers(*shape, seed=10 + r) for r in range(size))
        weight_sum = sum(weights)

        copied = megatron.copy_to_tensor_model_parallel_region(same, group)
        assert torch.equal(copied, same)
        assert torch.equal(gradient(copied, same, weights[rank]), weight_sum)

        reduced = megatron.reduce_from_tensor_model_parallel_region(own, group)
        assert torch.equal(reduced, total)
        assert torch.equal(gradient(reduced, own, weights[0]), weights[0])

        for given in (None, sizes):
            scattered = megatron.scatter_to_tensor_model_parallel_region(same, group, dim=dim, sizes=given)
            assert torch.equal(scattered, part(same))
            assert torch.equal(gradient(scattered, same, part(weights[0])), weights[0])

            mine = part(same).detach().clone().requires_grad_()
            gathered = megatron.gather_from_tensor_model_parallel_region(mine, group, dim=dim, sizes=given)
            assert torch.equal(gathered, same)
            assert torch.equal(gradient(gathered, mine, weights[0]), part(weights[0]))

            scattered = megatron.scatter_to_sequence_parallel_region(same, group, dim=dim, sizes=given)
            assert torch.equal(scattered, part(same))
            assert torch.equal(gradient(scattered, same, part(weights[0])), weights[0])

            gathered = megatron.gather_from_sequence_parallel_region(mine, group, dim=dim, sizes=given)
            assert torch.equal(gathered, same)
            assert torch.equal(gradient(gathered, mine, weights[rank]), part(weight_sum))
            gathered = megatron.gather_from_sequence_parallel_region(
                mine, group, dim=dim, sizes=given, to_model_parallel=False
            )
            assert torch.equal(gradient(gathered, mine, weights[0]), part(weights[0]))

            scattered = megatron.reduce_scatter_to_sequence_parallel_region(own, group, dim=dim, sizes=given)
            assert torch.equal(scattered, part(total))
            assert torch.equal(gradient(scattered, own, part(weights[0])), weights[0])
        assert torch.equal(same, numbers(*shape, seed=1))
        assert torch.equal(own, numbers(*shape, seed=10 + rank))


def test_in_a_world_of_one_a_region_is_the_tensor_itself() -> None:
    x = torch.randn(2, 3)
    for name in dir(scale_tp):
        if name.endswith("_region"):
            out = getattr(scale_tp, name)(x)
            assert out is x or out[0] is x


def test_sizes_that_do_not_fit_are_refused() -> None:
    two = Group(rank=0, size=2, ranks=(0, 1))
    x = torch.randn(2, 3)
    for name in ("scatter_to_tensor_model", "scatter_to_sequence", "reduce_scatter_to_sequence"):
        with pytest.raises(ValueError, match=r"add up to the 3 .* got \[2, 2\]"):
            getattr(megatron, f"{name}_parallel_region")(x, two, dim=1, sizes=[2, 2])
    for name in (
        "gather_from_sequence_parallel",
        "scatter_to_sequence_parallel",
        "reduce_scatter_to_sequence_parallel",
    ):
        with pytest.raises(ValueError, match=r"one of the 1 dimensions of the input \[3\], got -2: pass .* dim=0"):
            getattr(megatron, f"{name}_region")(x[0], two)
    for name in ("gather_from_tensor_model_parallel", "gather_from_sequence_parallel"):
        with pytest.raises(ValueError, match=r"rank 0 has the 3 of its tensor, got \[2, 2\]"):
            getattr(megatron, f"{name}_region")(x, two, dim=1, sizes=[2, 2])
    of_layers = [f"{what}_tensor_model" for what in ("copy_to", "reduce_from", "scatter_to", "gather_from")]
    regions = [*of_layers, "scatter_to_sequence", "gather_from_sequence", "reduce_scatter_to_sequence"]
    for name in regions:
        with pytest.raises(TypeError, match=r"expected a tensor to bring into the divided region .* got NoneType"):
            getattr(megatron, f"{name}_parallel_region")(None, two)


ONE, OTHER = (Group(0, 2, None, "fake", ranks) for ranks in ((0, 1), (0, 2)))


def test_a_tensor_knows_the_regions_that_it_was_computed_in() -> None:
    x = torch.ones(2, requires_grad=True)
    assert region_groups(x) == [] and region_groups(x.detach()) == [] and region_groups(x * 2) == []
    inside, elsewhere = copy_to_region(x * 2, ONE), copy_to_region(x, OTHER)
    assert region_groups((inside + 1).relu()) == [ONE]
    assert set(region_groups(inside + elsewhere)) == {ONE, OTHER}


class Out(RegionExit):
    """Comes out."""

    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Tensor:
        ctx.group = group
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def test_what_has_left_a_region_may_enter_another_one() -> None:
    inside = copy_to_region(torch.ones(2, requires_grad=True), ONE)
    outside: Tensor = Out.apply(ONE, inside)
    assert region_groups(outside) == [] and region_groups(outside.relu() + 1) == []
    assert region_groups(copy_to_region(outside, OTHER)) == [OTHER]


def test_what_is_said_to_be_inside_must_be_there() -> None:
    x = torch.ones(2, requires_grad=True)
    assert check_in_region("Layer", copy_to_region(x, ONE) * 2, ONE)
    assert not check_in_region("Layer", x, Group())
    assert not check_in_region("Layer", x.detach(), ONE)
    with torch.no_grad():
        assert not check_in_region("Layer", x, ONE)
    for outside in (x, x * 2, copy_to_region(x, OTHER)):
        with pytest.raises(
            ValueError, match=r"Layer: input_is_inside=True, but .* scale_tp.megatron.copy_to_tensor_model_par"
        ):
            check_in_region("Layer", outside, ONE)
