"""Multi-head attention whose heads are divided between ranks, with heads that share keys and values.

Each rank computes with its query heads and the key-value heads that they look at. Where there are fewer key-value heads
than ranks, some ranks hold copies of one, and the gradients of the copies are summed. The input is brought into the
divided region once for queries, keys and values; the output is one sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_tp.attention_heads import heads_to_features
from scale_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from scale_tp.layers.linear_ops import to_region
from scale_tp.layers.options import LayerOptions
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.split import HeadSplit, Split, check_size, split_heads
from scale_tp.weight_init import Initializer

Attend: TypeAlias = Callable[..., Tensor]
"""Called as attend(query, key, value, is_causal=...) with [batch, heads, positions, head size] each, as torch's own
`scaled_dot_product_attention`; `ring_attention` and `ulysses_attention` are such."""


class ParallelAttention(nn.Module):
    """Self-attention, from projections to the output's projection.

    Args:
        embed_dim: Size of the input's and the output's last dimension.
        num_heads: Query heads; they need not divide by the ranks.
        num_key_value_heads: Number of key-value heads, each shared by the same number of query heads; None is the
            number of heads.
        head_dim: Size of one head; None is `embed_dim / num_heads`.
        bias: Whether the projections have biases.
        causal: No position looks at a later one.
        attend: Computes attention of this rank's heads. It gets equal numbers of query and key-value heads.
        init_method: Fills each full weight in place, as in `ColumnParallelLinear`.
        process_group: The ranks that divide the heads; None is the model axis of `initialize_model_parallel`.
        device: Where the parameters are; on "meta" they get no values until `reset_parameters()`.
        dtype: Of the parameters.
        options: A `LayerOptions`: with `sequence_parallel`, input and output are this rank's part of the sequence;
            `overlap_pieces` is for both linear layers.

    Attributes:
        heads: Which heads each rank computes.
        query: [heads of this rank * head_dim, embed_dim]
        key: [key-value heads of this rank * head_dim, embed_dim]
        value: As `key`.
        output: [embed_dim, heads of this rank * head_dim]

    Raises:
        ValueError: A size that makes no sense.

    Example:
        >>> import torch
        >>> attention = ParallelAttention(12, num_heads=6, num_key_value_heads=2, causal=True)
        >>> attention(torch.zeros(1, 5, 12)).shape
        torch.Size([1, 5, 12])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    @checked_arguments
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        causal: bool = False,
        attend: Attend = F.scaled_dot_product_attention,
        init_method: Initializer = nn.init.xavier_normal_,
        process_group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: LayerOptions | None = None,
    ) -> None:
        options = options or LayerOptions()
        options.refuse("ParallelAttention", "sequence_dim", "split", "input_is_inside")
        key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        size = _resolve_head_dim(embed_dim, num_heads, key_value_heads, head_dim)
        super().__init__()
        self.group, self.head_dim = tensor_parallel_group(process_group), size
        self.heads = split_heads(num_heads, key_value_heads, self.group.size)
        self.causal, self.attend = causal, attend
        self.sequence_parallel, self.overlap_pieces = options.sequence_parallel, options.overlap_pieces
        splits = HeadSplit(*(heads_to_features(split, size) for split in self.heads))
        common: Any = {"init_method": init_method, "process_group": self.group, "device": device, "dtype": dtype}

        def projection(split: Split) -> ColumnParallelLinear:
            # The input is brought into the divided region once for all three.
            inside = LayerOptions(split=split, input_is_inside=True)
            return ColumnParallelLinear(embed_dim, split.total, bias, gather_output=False, options=inside, **common)

        self.query = projection(splits.query)
        self.key = projection(splits.key_value)
        self.value = projection(splits.key_value)
        output_options = replace(options, split=splits.query)
        self.output = RowParallelLinear(
            num_heads * size, embed_dim, bias, input_is_parallel=True, options=output_options, **common
        )

    def reset_parameters(self) -> None:
        """Gives all parameters their initial values; on all ranks from the same random numbers."""
        for layer in (self.query, self.key, self.value, self.output):
            layer.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """Computes attention of each position over all positions, or over those before it.

        Args:
            input: [batch, positions, embed_dim], the same on all ranks; with `sequence_parallel`, this rank's shard.

        Returns:
            [batch, positions, embed_dim], in the same way.

        Raises:
            ValueError: The input has other dimensions.
        """
        if input.dim() != 3 or input.shape[-1] != self.query.in_features:
            raise ValueError(
                f"ParallelAttention: expected [batch, positions, {self.query.in_features}], got {tuple(input.shape)}"
            )
        inside = to_region(input, self.group, 1 if self.sequence_parallel else None, self.overlap_pieces)
        query, key, value = (self._heads_of(layer(inside)) for layer in (self.query, self.key, self.value))
        if query.shape[1] == 0:  # A rank without heads brings zeros to the sum; its gradients are zeros as well.
            attended = query + (query.sum() + key.sum() + value.sum())
        else:
            shared = query.shape[1] // key.shape[1]
            if shared > 1:
                key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
            attended = self.attend(query, key, value, is_causal=self.causal)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def extra_repr(self) -> str:
        local_heads = f", {self.heads.query.sizes[self.group.rank]} here" if self.group.size > 1 else ""
        key_value = f"{self.heads.key_value.total} key-value heads of {self.head_dim}"
        return f"{self.heads.query.total} heads{local_heads}, {key_value}"

    def _heads_of(self, projected: Tensor) -> Tensor:
        """[batch, positions, heads * head size] as [batch, heads, positions, head size]."""
        batch, length, features = projected.shape
        return projected.view(batch, length, features // self.head_dim, self.head_dim).transpose(1, 2)


def _resolve_head_dim(embed_dim: int, num_heads: int, num_key_value_heads: int, head_dim: int | None) -> int:
    """Returns the size of one head, after checking the sizes."""
    check_size("embed_dim", embed_dim, 1)
    check_size("num_heads", num_heads, 1)
    check_size("num_key_value_heads", num_key_value_heads, 1)
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"expected embed_dim to divide by num_heads, got {embed_dim} and {num_heads}: pass head_dim= as well"
        )
    size = embed_dim // num_heads if head_dim is None else head_dim
    check_size("head_dim", size, 1)
    return size
