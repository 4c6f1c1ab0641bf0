"""Blocks of ring attention by torch's flash kernels, which make no matrix of scores.

A kernel gives the log of the sum of exponentials with the output, so its blocks merge as in `blockwise`. Its
backward takes the merged output and the merged log in place of its own: then the weights that it computes again are
the weights of the softmax over all keys. (FlashAttention-2, arXiv 2307.08691; ring attention, arXiv 2310.01889.)

Each block is rounded to the dtype of the query once, before blocks are merged in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from scale_core import compat
from scale_tp.attention.blockwise import PartialAttention

_LARGEST_HEAD = 256  # of the kernels for CUDA
_HALF = (torch.float16, torch.bfloat16)

Gradients = tuple[Tensor, Tensor, Tensor]


class FlashKernel(Protocol):
    """Flash attention of one device: query, key and value are [batch, heads, positions, head size]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output [batch, heads, positions, head size] and the log-sum-exp [batch, heads, positions]."""
        ...

    def backward(
        self, gradient: Tensor, output: Tensor, lse: Tensor, *inputs: Tensor, causal: bool, scale: float
    ) -> Gradients:
        """Returns the gradients of `inputs`: query, key and value."""
        ...


class CudaFlash:
    """The kernel for CUDA, in half precision."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output, lse, *_ = flash(query, key, value, 0.0, causal, scale=scale)
        return output, lse

    def backward(
        self, gradient: Tensor, output: Tensor, lse: Tensor, *inputs: Tensor, causal: bool, scale: float
    ) -> Gradients:
        query, key, _ = inputs
        lengths: Any = None, None, query.shape[2], key.shape[2]
        random = query.new_empty(2, dtype=torch.uint64), query.new_empty(0, dtype=torch.uint64)  # Without dropout.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        of_query, of_key, of_value = flash(gradient, *inputs, output, lse, *lengths, 0.0, causal, *random, scale=scale)
        return of_query, of_key, of_value


def flash_kernel(query: Tensor, key: Tensor, value: Tensor, hidden: Sequence[Tensor] | None) -> FlashKernel | None:
    """The kernel for these inputs; None where `blockwise` computes them.

    That is in fp32 and wider, whose sums a kernel would round otherwise, on the host, with keys that none sees, and
    with head sizes that the kernel does not take. `torch.backends.cuda.enable_flash_sdp(False)` turns it off.
    """
    head_size = query.shape[-1]
    fits = value.shape[-1] == head_size and head_size % 8 == 0 and 0 < head_size <= _LARGEST_HEAD
    if hidden is not None or query.dtype not in _HALF or not fits or not torch.backends.cuda.flash_sdp_enabled():
        return None
    return CudaFlash() if _has_flash(query.device) else None


@cache
def _has_flash(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == compat.STAND_IN
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_built and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))


def fused_attention(
    kernel: FlashKernel, query: Tensor, key: Tensor, value: Tensor, *, scale: float, diagonal: bool
) -> PartialAttention:
    """As `blockwise.block_attention`, of query [batch, heads, positions, head size] in its own dtype."""
    groups = query.shape[1] // key.shape[1]
    output, lse = kernel.forward(query, *_repeated(groups, key, value), causal=diagonal, scale=scale)
    return PartialAttention(output.to(lse.dtype).unflatten(1, (-1, groups)), lse.unflatten(1, (-1, groups)))


def fused_attention_backward(
    kernel: FlashKernel,
    gradient: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    diagonal: bool,
) -> Gradients:
    """A block's share of the gradients of query [batch, heads, ...], key and value [batch, key-value heads, ...].

    `gradient` and `output` are [batch, heads, positions, head size], of the merged output, and `lse` [batch, heads,
    positions] as merged.
    """
    groups = query.shape[1] // key.shape[1]
    inputs = query, *_repeated(groups, key, value)
    parts = kernel.backward(gradient, output, lse.contiguous(), *inputs, causal=diagonal, scale=scale)
    if groups == 1:
        return parts
    of_key, of_value = (part.unflatten(1, (-1, groups)).to(lse.dtype).sum(2) for part in parts[1:])
    return parts[0], of_key, of_value


def _repeated(groups: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Key-value heads, each as often as queries share it."""
    return tensors if groups == 1 else tuple(tensor.repeat_interleave(groups, 1) for tensor in tensors)
