"""Products by expert against a linear layer per expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_check.simulate import simulate
from scale_core.comm.group import Group
from scale_moe import Experts
from scale_moe import grouped_linear as module
from scale_moe.grouped_linear import grouped_linear


def one_by_one(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    parts = zip(rows.split(counts), weight, strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_expert_is_a_linear_layer(counts: list[int], dim: int, hidden: int, aligned: bool) -> None:
    """Sizes that grouped kernels take, and sizes that they do not."""
    if aligned:
        dim, hidden = 4 * dim, 4 * hidden
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), dim, generator=generator).requires_grad_()
    weight = torch.randn(len(counts), hidden, dim, generator=generator).requires_grad_()
    grad = torch.randn(sum(counts), hidden, generator=generator)
    found = [
        grouped_linear(rows, weight, counts),
        *torch.autograd.grad(grouped_linear(rows, weight, counts), [rows, weight], grad),
    ]
    plain = one_by_one(rows, weight, counts)
    for one, other in zip(found, [plain, *torch.autograd.grad(plain, [rows, weight], grad)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_both_ways_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, counts = torch.randn(23, 16), torch.randn(3, 32, 16), [9, 0, 14]
    if not module._can_group(rows, weight):
        pytest.skip("this torch has no grouped product for CPUs: there is one way")
    grouped = grouped_linear(rows, weight, counts)
    monkeypatch.setattr(module, "_can_group", lambda *_: False)
    assert torch.equal(grouped, grouped_linear(rows, weight, counts))


def test_gradients_of_weights_have_the_same_bits_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert without rows gets zeros, which the kernel may not write."""
    rows, grad, counts = torch.randn(23, 16), torch.randn(23, 32), [9, 0, 14]
    if not module._can_group_rows(grad, rows):
        pytest.skip("this torch has no such grouped product for CPUs: there is one way")

    def weight_gradient() -> Tensor:
        weight = torch.zeros(3, 32, 16, requires_grad=True)
        grouped_linear(rows, weight, counts).backward(grad)
        assert weight.grad is not None
        return weight.grad

    products: list[tuple[int, ...]] = []
    grouped_mm = torch._grouped_mm

    def counted(first: Tensor, *others: Any, **options: Any) -> Tensor:
        products.append(tuple(first.shape))
        return grouped_mm(first, *others, **options)

    monkeypatch.setattr(torch, "_grouped_mm", counted)
    grouped = weight_gradient()
    assert products[-2:] == [(23, 16), (32, 23)]
    monkeypatch.setattr(module, "_can_group_rows", lambda *_: False)
    assert torch.equal(grouped, weight_gradient()) and not grouped[1].any()


def test_no_rows_still_have_gradients_of_zero() -> None:
    """A rank without tokens takes part in the backward pass of the others."""
    weight = torch.randn(2, 3, 4, requires_grad=True)
    grouped_linear(torch.zeros(0, 4), weight, [0, 0]).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.simulation
@pytest.mark.parametrize("counts", [[9, 0, 14], [0, 0, 0]])
def test_a_simulation_books_what_real_tensors_take(counts: list[int]) -> None:
    """Fake tensors take one product for all experts."""

    def books(fake: bool) -> tuple[Any, ...]:
        with simulate(fake=fake) as simulation:
            torch.manual_seed(0)
            experts = Experts(3, 16, 32, process_group=Group())
            drawn = simulation.peak_bytes
            rows = torch.ones(sum(counts), 16, requires_grad=True)
            experts(rows, counts).sum().backward()
            return drawn, simulation.peak_bytes, simulation.peak_by_kind, simulation.current_by_kind

    assert books(fake=True) == books(fake=False)


@pytest.mark.simulation
def test_a_simulation_of_many_experts_has_no_more_operators() -> None:
    def operators(num_experts: int) -> int:
        seen = 0

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal seen
                seen += 1
                return func(*args, **(kwargs or {}))

        with simulate(), Count():
            experts = Experts(num_experts, 16, 32, process_group=Group())
            rows = torch.ones(num_experts, 16, requires_grad=True)
            experts(rows, [1] * num_experts).sum().backward()
        return seen

    assert operators(256) == operators(2)


def test_autocast_is_that_of_a_linear_layer() -> None:
    rows, weight = torch.randn(4, 8), torch.randn(1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = grouped_linear(rows, weight, [4]), F.linear(rows, weight[0])
    assert found.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(found, plain)


@pytest.mark.parametrize("counts", [[1, 2], [2, 3], [4], [2, 1, 1], [5, -1]])
def test_counts_that_do_not_add_up_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"expected counts of 2 experts, .* that add up to 4 rows, got \["):
        grouped_linear(torch.ones(4, 3), torch.ones(2, 5, 3), counts)
    with pytest.raises(ValueError, match=r"add up to 4 rows"):
        Experts(2, 3, 5, process_group=Group())(torch.ones(4, 3), counts)
