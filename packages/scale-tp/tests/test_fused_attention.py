"""fused.py: blocks by torch's flash kernels merge to the attention over all keys, and are taken where they can be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_tp import ring_attention, split_sequence
from scale_tp.attention import ring
from scale_tp.attention.fused import Gradients, flash_kernel

LENGTH = 16


class CpuFlash:
    """torch's flash kernel for the CPU, in any floating-point dtype, which `flash_kernel` never returns."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = flash(query, key, value, 0.0, causal, scale=scale)
        return output, lse

    def backward(
        self, gradient: Tensor, output: Tensor, lse: Tensor, *inputs: Tensor, causal: bool, scale: float
    ) -> Gradients:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, of_key, of_value = flash(gradient, *inputs, output, lse, 0.0, causal, scale=scale)
        return of_query, of_key, of_value


def inputs(dtype: torch.dtype, value_size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 6, LENGTH, 8), (2, 3, LENGTH, 8), (2, 3, LENGTH, value_size))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def results(causal: bool, dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
    """This rank's output, and its gradients of query, key and value."""
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(ring, "flash_kernel", lambda *_: CpuFlash())
        parts = [split_sequence(each.detach(), group_of(), dim=2).requires_grad_() for each in inputs(dtype)]
        output = ring_attention(*parts, group_of(), is_causal=causal, scale=0.3, length=LENGTH)
        return [output.detach(), *torch.autograd.grad(output, parts, output.detach().cos())]


def differences(causal: bool, dtype: torch.dtype) -> list[float]:
    """The largest ones, relative to the largest value, between both ways."""
    pairs = zip(results(causal, dtype, fused=True), results(causal, dtype, fused=False), strict=True)
    return [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]


@pytest.mark.ranks(1, 2, 3, in_turn=True)
@pytest.mark.parametrize("causal", [True, False])
def test_fused_blocks_merge_as_those_that_are_computed_here(causal: bool) -> None:
    """In float64, where what a kernel sums in another order is all that differs; 3 ranks hold uneven parts."""
    assert max(differences(causal, torch.float64)) < 1e-13


@pytest.mark.ranks(2)
def test_fused_blocks_in_half_precision_are_within_its_rounding() -> None:
    assert max(differences(True, torch.bfloat16)) < 4 * torch.finfo(torch.bfloat16).eps


def test_one_rank_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "flash_kernel", lambda *_: CpuFlash())
    mine, torchs = inputs(torch.float64), inputs(torch.float64)
    output = ring_attention(*mine, is_causal=True)
    expected = F.scaled_dot_product_attention(*torchs, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    output.sum().backward()
    expected.sum().backward()
    for one, other in zip(mine, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.simulation
def test_a_device_in_half_precision_makes_no_matrix_of_scores() -> None:
    with simulate(world_size=4, device="sim", check=False):
        parts = [torch.empty(2, 4, 64, 16, dtype=torch.bfloat16, device="sim", requires_grad=True) for _ in range(3)]
        with _Operators() as operators:
            ring_attention(*parts, group_of(), is_causal=True).sum().backward()
    counts = operators.counts
    flash = "_scaled_dot_product_flash_attention"
    assert counts[flash] == counts[f"{flash}_backward"] >= 4
    assert not counts["bmm"] and not counts["exp_"] - 2 * counts[flash]


@pytest.mark.simulation
def test_the_kernel_is_taken_where_it_fits() -> None:
    def kernel(dtype: torch.dtype, size: int, value_size: int, hidden: Any = None) -> object:
        key, value = (torch.empty(1, 2, 4, length, dtype=dtype, device="sim") for length in (size, value_size))
        return flash_kernel(key, key, value, hidden)

    with simulate(device="sim"):
        assert kernel(torch.bfloat16, 64, 64) and kernel(torch.float16, 256, 256)
        assert kernel(torch.float32, 64, 64) is None
        assert kernel(torch.bfloat16, 60, 60) is None and kernel(torch.bfloat16, 512, 512) is None
        assert kernel(torch.bfloat16, 64, 32) is None
        assert kernel(torch.bfloat16, 64, 64, hidden=[]) is None
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            assert kernel(torch.bfloat16, 64, 64) is None
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
    host = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16)
    assert flash_kernel(host, host, host, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_equals_torch_to_the_rounding_of_its_dtype(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(2, 4, 128, 64, generator=generator).bfloat16().cuda() for _ in range(3)]
    mine, torchs = ([each.clone().requires_grad_() for each in full] for _ in range(2))
    assert flash_kernel(*mine, None) is not None
    output, expected = (
        ring_attention(*mine, is_causal=causal),
        F.scaled_dot_product_attention(*torchs, is_causal=causal),
    )
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    for tensor in (output, expected):
        tensor.sum().backward()
    for one, other in zip(mine, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)
