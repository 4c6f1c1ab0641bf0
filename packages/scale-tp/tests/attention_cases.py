"""What attention over a divided sequence is compared with: torch's own attention over the whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_core.comm.group import Group
from scale_tp.attention.load_balance import Order, split_sequence


@dataclass(frozen=True)
class Case:
    """One attention; its defaults are the plainest."""

    length: int = 8
    heads: int = 4
    key_value_heads: int = 4
    head_size: int = 6
    value_size: int = 6
    batch: int = 2
    causal: bool = True
    order: Order = "zigzag"
    dtype: torch.dtype = torch.float64
    scale: float | None = None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The query, key, value and the gradient of the output, of the full sequence; the same on all ranks."""
        generator = torch.Generator().manual_seed(11)
        sizes = (
            (self.heads, self.head_size),
            (self.key_value_heads, self.head_size),
            (self.key_value_heads, self.value_size),
            (self.heads, self.value_size),
        )
        query, key, value, gradient = (
            torch.randn(self.batch, heads, self.length, size, generator=generator, dtype=torch.float64).to(self.dtype)
            for heads, size in sizes
        )
        return query, key, value, gradient


def whole_attention(case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    """torch's output and gradients over the full sequence, computed in a dtype of one's choice."""
    query, key, value, gradient = (tensor.to(dtype or case.dtype) for tensor in case.inputs())
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=case.causal, scale=case.scale, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def divided_attention(case: Case, group: Group, attention: Callable[..., Tensor]) -> list[Tensor]:
    """This rank's shard of the same."""
    *whole, gradient = (split_sequence(tensor, group, dim=2, order=case.order) for tensor in case.inputs())
    leaves = [tensor.requires_grad_() for tensor in whole]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def own_parts(case: Case, group: Group, tensors: list[Tensor]) -> list[Tensor]:
    """This rank's shards of what `whole_attention` returned."""
    return [split_sequence(tensor, group, dim=2, order=case.order) for tensor in tensors]
