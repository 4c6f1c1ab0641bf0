"""Embeddings whose table is divided between ranks, by vocabulary or by features.

By words, each rank looks up those that it has, and the rows of all ranks are added: of each word, all but one are
zeros. By features, each rank looks all words up in its columns, and the columns are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_tp.comm import gather_from_region, reduce_from_region, reduce_scatter_sequence
from scale_tp.layers.base import ParallelModule, ParamSharding, rank_repr
from scale_tp.layers.options import LayerOptions
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.split import Range, Split, check_size
from scale_tp.weight_init import Initializer


class LocalIds(NamedTuple):
    """Token ids [any shape] as rows of a rank's shard of a table."""

    rows: Tensor  # 0 for tokens of other ranks; a row that there is not for ids out of range: a lookup raises
    others: Tensor  # of booleans: tokens that this rank does not have
    unknown: Tensor  # of booleans: ids that no rank has


def local_ids(ids: Tensor, own: Range, num_embeddings: int) -> LocalIds:
    """Returns token ids [any shape] as rows of this rank's shard; one without rows has a table of one row nevertheless.

    Example:
        >>> import torch
        >>> local_ids(torch.tensor([1, 3, 4, 5]), (3, 5), 5).rows
        tensor([0, 0, 1, 2])
    """
    start, stop = own
    others = (ids < start) | (ids >= stop)
    unknown = (ids < 0) | (ids >= num_embeddings)
    rows = (ids - start).masked_fill(others, 0).masked_fill(unknown, max(stop - start, 1))
    return LocalIds(rows, others, unknown)


def local_padding_idx(padding_idx: int | None, own: Range) -> int | None:
    """Returns the row of the token that gets no gradient, if this rank has it."""
    return None if padding_idx is None or not own[0] <= padding_idx < own[1] else padding_idx - own[0]


def look_up(layer: str, ids: Tensor, num_embeddings: int, lookup: Callable[[Tensor], Tensor]) -> Tensor:
    """Looks token ids up; refuses other values, and names ids out of range."""
    argument: object = ids
    if not isinstance(argument, Tensor):
        raise TypeError(f"{layer}: expected a tensor of words, got {type(argument).__name__}: write torch.tensor(...)")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{layer}: expected words of torch.int64 or torch.int32, got {ids.dtype}: call .long() on them"
        )
    try:
        return lookup(ids)
    except IndexError as error:  # On a CPU; elsewhere it would cost a synchronization to know.
        raise IndexError(
            f"{layer}: expected words from 0 to {num_embeddings - 1}, got some from {int(ids.min())} to "
            f"{int(ids.max())}: a word is out of range"
        ) from error


def look_up_local(
    layer: str,
    ids: Tensor,
    weight: Tensor,
    own: Range,
    num_embeddings: int,
    lookup: Callable[[Tensor], Tensor],
    *,
    own_ids_alone: bool = False,
) -> Tensor:
    """Returns the rows [..., width] of the ids that this rank has, and zeros for the others.

    With `own_ids_alone` only those are looked up: the first row must not seem to have been read for others.
    """

    def local_rows(ids: Tensor) -> Tensor:
        rows, others, unknown = local_ids(ids, own, num_embeddings)
        if own[0] == own[1]:  # A row for the lookup nevertheless; and every rank has a gradient, be it of zeros.
            return F.embedding(rows, weight.new_zeros(1, weight.shape[1])) + weight.sum()
        if not own_ids_alone:
            return lookup(rows).masked_fill(others.unsqueeze(-1), 0)
        is_local = ~others | unknown
        return weight.new_zeros(*ids.shape, weight.shape[1]).index_put((is_local,), lookup(rows[is_local]))

    return look_up(layer, ids, num_embeddings, local_rows)


class _EmbeddingBase(ParallelModule):
    """`torch.nn.Embedding` with a table [num_embeddings, embedding_dim] that is divided along the dimension `_dim`."""

    weight: nn.Parameter
    master_weight: Tensor | None
    _dim: int
    _title: str
    _without: tuple[str, ...]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        process_group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: LayerOptions | None = None,
    ) -> None:
        options = options or LayerOptions()
        options.refuse(self._title, *self._without)
        check_size("num_embeddings", num_embeddings)
        check_size("embedding_dim", embedding_dim)
        ranks = tensor_parallel_group(process_group)
        if max_norm is not None and self._dim == 1 and ranks.size > 1:
            raise ValueError(
                f"ParallelEmbedding: max_norm={max_norm} needs whole rows, and {ranks.size} ranks have some features "
                "each: use VocabParallelEmbedding, which divides the words"
            )
        padding_idx = _check_padding(padding_idx, num_embeddings)
        super().__init__(ranks)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.init_method = init_method
        shape = (num_embeddings, embedding_dim)
        self.split = Split.even(shape[self._dim], ranks.size)
        self.sequence_parallel, self.sequence_dim = options.sequence_parallel, options.sequence_dim
        self.add_parameter("weight", ParamSharding(shape, self._dim, self.split), device=device, dtype=dtype)
        self.master_weight = self.init_parameter("weight", init_method, keep_full=keep_master_weight_for_test)

    def reset_parameters(self) -> None:
        """Gives the table its initial values; on all ranks from the same random numbers."""
        self.init_parameter("weight", self.init_method)

    def get_master_weight(self) -> Tensor:
        """Returns the full table [num_embeddings, embedding_dim]; all ranks call it together."""
        return self.full_parameter("weight")

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{rank_repr(self.group)}"

    def _embed(self, ids: Tensor, padding_idx: int | None) -> Tensor:
        options = self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return F.embedding(ids, self.weight, padding_idx, *options)


@checked_arguments
class VocabParallelEmbedding(_EmbeddingBase):
    """`torch.nn.Embedding` divided by words over the ranks.

    Args:
        num_embeddings: How many words there are; they need not divide by the ranks.
        embedding_dim: Features of a word.
        padding_idx: A word whose row gets no gradient; negative counts from the last.
        max_norm: Rows that are looked up are scaled down to this norm, in the table.
        norm_type: p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the word occurs in the input.
        sparse: Gradients of the table are sparse.
        init_method: Fills the full table in place; each rank keeps its shard of the same values.
        keep_master_weight_for_test: Keep the full table, as it began, in `master_weight`.
        process_group: As in `ColumnParallelLinear`.
        device: As in `ColumnParallelLinear`.
        dtype: Of the table.
        options: A `LayerOptions` whose `sequence_parallel` says whether the output is this rank's part of the sequence.

    Attributes:
        weight: [words of this rank, embedding_dim]
        split: Which words each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.

    Examples:
        >>> import torch
        >>> from scale_tp import VocabParallelEmbedding
        >>> VocabParallelEmbedding(100, 8)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    _dim = 0
    _title = "VocabParallelEmbedding"
    _without = ("split", "overlap_pieces", "input_is_inside")

    @property
    def vocab_start_index(self) -> int:
        """The first word of this rank."""
        return self.split.ranges[self.group.rank][0][0]

    @property
    def vocab_end_index(self) -> int:
        """One past the last word of this rank."""
        return self.split.ranges[self.group.rank][0][1]

    @property
    def num_embeddings_per_partition(self) -> int:
        """How many words this rank has."""
        return self.split.sizes[self.group.rank]

    def forward(self, input_: Tensor) -> Tensor:
        """Looks words up: [any shape] of int64 or int32, the same on all ranks.

        Returns:
            [..., embedding_dim], the same on all ranks or, with `sequence_parallel`, this rank's part of the sequence.

        Raises:
            IndexError: The word does not exist.
        """
        name, count = "VocabParallelEmbedding", self.num_embeddings
        if self.group.size == 1:
            return look_up(name, input_, count, lambda ids: self._embed(ids, self.padding_idx))
        (local_range,) = self.split.ranges[self.group.rank]
        padding, alone = (
            local_padding_idx(self.padding_idx, local_range),
            self.max_norm is not None or self.scale_grad_by_freq,
        )
        rows = look_up_local(
            name, input_, self.weight, local_range, count, lambda ids: self._embed(ids, padding), own_ids_alone=alone
        )
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.group, self.sequence_dim)
        return reduce_from_region(rows, self.group)


@checked_arguments
class ParallelEmbedding(_EmbeddingBase):
    """`torch.nn.Embedding` divided by features over the ranks.

    Args:
        num_embeddings: As in `VocabParallelEmbedding`, like all arguments but these.
        embedding_dim: Features of a word; they need not divide by the ranks.
        max_norm: Only in a world of one rank: no rank has all that the norm of a row is made of.
        options: None, because no option of `LayerOptions` is for this layer.

    Attributes:
        weight: [num_embeddings, features of this rank]
        split: Which features each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.

    Examples:
        >>> import torch
        >>> from scale_tp import ParallelEmbedding
        >>> ParallelEmbedding(100, 8)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    _dim = 1
    _title = "ParallelEmbedding"
    _without = ("sequence_parallel", "split", "overlap_pieces", "input_is_inside")

    @property
    def embedding_dim_per_partition(self) -> int:
        """How many features of each word this rank has."""
        return self.split.sizes[self.group.rank]

    def forward(self, input_: Tensor) -> Tensor:
        """Looks words up: [any shape] of int64 or int32, the same on all ranks, as is the result [..., embedding_dim].

        Raises:
            IndexError: The word does not exist.
        """
        columns = look_up(
            "ParallelEmbedding", input_, self.num_embeddings, lambda ids: self._embed(ids, self.padding_idx)
        )
        return gather_from_region(columns, self.group, -1, self.split.sizes)


def _check_padding(padding_idx: Any, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(f"expected padding_idx to be an integer or None, got {padding_idx!r}")
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"expected padding_idx to be one of {num_embeddings} words, got {padding_idx}")
    return padding_idx % num_embeddings
