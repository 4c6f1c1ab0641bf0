"""Embeddings whose table is divided between ranks, by words or by features.

By words, each rank looks up those that it has, and the rows of all ranks are added: of each word, all but one are
zeros. By features, each rank looks all words up in its columns, and the columns are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.comm.group import GroupLike
from scale_tp.layers.base import ParallelModule, Placement, ranks_described
from scale_tp.mappings import (
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from scale_tp.parallel_state import layer_group
from scale_tp.split import Range, Split, check_size
from scale_tp.weight_init import Initialiser


class LocalWords(NamedTuple):
    """Words as rows of a rank's part of a table.

    Attributes:
        rows: [any shape] of integers: the row of each word that this rank has, the first one for words of other ranks,
            and one that there is not for words that no rank has: a lookup says so, on this device as on any.
        others: [the same shape] of booleans: words that this rank does not have.
        unknown: [the same shape] of booleans: words that no rank has.
    """

    rows: Tensor
    others: Tensor
    unknown: Tensor


def local_words(ids: Tensor, own: Range, num_words: int) -> LocalWords:
    """Returns words as rows of this rank's part.

    Args:
        ids: [any shape] of integers.
        own: The words that this rank has; if none, its table has one row nevertheless.
        num_words: Those of all ranks.

    Example:
        >>> import torch
        >>> local_words(torch.tensor([1, 3, 4, 5]), (3, 5), 5).rows
        tensor([0, 0, 1, 2])
    """
    start, stop = own
    others = (ids < start) | (ids >= stop)
    unknown = (ids < 0) | (ids >= num_words)
    rows = (ids - start).masked_fill(others, 0).masked_fill(unknown, max(stop - start, 1))
    return LocalWords(rows, others, unknown)


def local_padding(padding_idx: int | None, own: Range) -> int | None:
    """Returns the row of the word that gets no gradient, if this rank has it."""
    return None if padding_idx is None or not own[0] <= padding_idx < own[1] else padding_idx - own[0]


def check_words(layer: str, ids: object) -> None:
    """Refuses what are no words, before anything is looked up.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is one of another dtype.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"{layer}: expected a tensor of words, got {type(ids).__name__}: write torch.tensor(...)")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{layer}: expected words of torch.int64 or torch.int32, got {ids.dtype}: call .long() on them"
        )


def unknown_word(layer: str, ids: Tensor, num_words: int) -> IndexError:
    """Returns the error for words [any shape] of which a lookup has found that there is not one in a table."""
    return IndexError(
        f"{layer}: expected words from 0 to {num_words - 1}, got some from {int(ids.min())} to {int(ids.max())}: a "
        "word is out of range"
    )


class _Created(TypedDict):
    """Where a parameter is made, and of what dtype."""

    device: torch.device | str | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Lookup:
    """How rows are looked up; the names are torch's.

    Attributes:
        padding_idx: A word whose row gets no gradient; negative counts from the last.
        max_norm: Rows that are looked up are scaled down to this norm.
        norm_type: p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the word stands in the input.
        sparse: Gradients of the table are sparse.
    """

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


class _DividedEmbedding(ParallelModule):
    """What both have in common: torch's attributes, and a table that is divided along one dimension.

    Args:
        shape: How many words, and features of each.
        lookup: How they are looked up.
        init_method: What fills the whole table in place.
        group: The ranks.
        options: The table's device and dtype.
        keep_whole: Keep the whole table, as it began.
    """

    weight: nn.Parameter
    master_weight: Tensor | None
    _dim: int

    def __init__(
        self,
        shape: tuple[int, int],
        lookup: _Lookup,
        init_method: Initialiser,
        group: GroupLike,
        options: _Created,
        keep_whole: bool,
    ) -> None:
        num_embeddings, embedding_dim = shape
        check_size("num_embeddings", num_embeddings)
        check_size("embedding_dim", embedding_dim)
        padding_idx = _known_padding(lookup.padding_idx, num_embeddings)
        super().__init__(layer_group(group))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, lookup.max_norm, lookup.norm_type
        self.scale_grad_by_freq, self.sparse = lookup.scale_grad_by_freq, lookup.sparse
        self.init_method = init_method
        self.split = Split.even(shape[self._dim], self.group.size)
        self.place("weight", Placement(shape, self._dim, self.split), **options)
        self.master_weight = self.initialise("weight", init_method, keep_whole=keep_whole)

    def reset_parameters(self) -> None:
        """Gives the table the values that it begins with; on all ranks from the same random numbers."""
        self.initialise("weight", self.init_method)

    def get_master_weight(self) -> Tensor:
        """Returns the whole table [num_embeddings, embedding_dim]; all ranks call it together."""
        return self.whole_parameter("weight")

    def extra_repr(self) -> str:
        """What stands in the layer's line of a printed model."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{ranks_described(self.group)}"

    def _looked_up(self, ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
        """What torch gives for these rows of this rank's table."""
        return F.embedding(ids, table, padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)


class VocabParallelEmbedding(_DividedEmbedding):
    """`torch.nn.Embedding` of which each rank has some words.

    Args:
        num_embeddings: How many words there are; they need not divide by the ranks.
        embedding_dim: Features of a word.
        padding_idx: A word whose row gets no gradient; negative counts from the last.
        max_norm: Rows that are looked up are scaled down to this norm, in the table.
        norm_type: p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the word stands in the input.
        sparse: Gradients of the table are sparse.
        init_method: What fills the whole table in place; each rank keeps its part of the same values.
        keep_master_weight_for_test: Keep the whole table, as it began, in `master_weight`.
        group: As in `ColumnParallelLinear`.
        device: As in `ColumnParallelLinear`.
        dtype: Of the table.
        sequence_parallel: Whether the output is this rank's part of the sequence alone.
        sequence_dim: The dimension of the sequence in the output then.

    Attributes:
        weight: [words of this rank, embedding_dim]
        split: Which words each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.
    """

    _dim = 0

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Initialiser = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
    ) -> None:
        lookup = _Lookup(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        options: _Created = {"device": device, "dtype": dtype}
        shape = (num_embeddings, embedding_dim)
        super().__init__(shape, lookup, init_method, group, options, keep_master_weight_for_test)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

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
        """Looks words up.

        Args:
            input_: [any shape] of integers, the same on all ranks.

        Returns:
            [..., embedding_dim], the same on all ranks or, with `sequence_parallel`, this rank's part of the sequence.

        Raises:
            IndexError: There is no such word.
            TypeError: The input is no tensor.
            ValueError: The input is of another dtype than int64 or int32.
        """
        check_words("VocabParallelEmbedding", input_)
        try:
            rows = self._own_rows(input_)
        except IndexError as error:  # On a CPU; elsewhere it would cost a synchronisation to know.
            raise unknown_word("VocabParallelEmbedding", input_, self.num_embeddings) from error
        if self.group.size == 1:
            return rows
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(rows, self.group, dim=self.sequence_dim)
        return reduce_from_model_parallel_region(rows, self.group)

    def _own_rows(self, ids: Tensor) -> Tensor:
        """The rows of the words that this rank has, and zeros for the others."""
        if self.group.size == 1:
            return self._looked_up(ids, self.weight, self.padding_idx)
        (own,) = self.split.ranges[self.group.rank]
        has_words = own[1] > own[0]
        # A rank without words has a row for the lookup nevertheless.
        table = self.weight if has_words else self.weight.new_zeros(1, self.embedding_dim)
        local, others, unknown = local_words(ids, own, self.num_embeddings)
        padding = local_padding(self.padding_idx, own)
        if self.max_norm is None and not self.scale_grad_by_freq:
            rows = self._looked_up(local, table, padding).masked_fill(others.unsqueeze(-1), 0)
        else:  # The first row must not seem to have been looked up for the words of other ranks.
            mine = ~others | unknown
            rows = table.new_zeros(*ids.shape, self.embedding_dim)
            rows = rows.index_put((mine,), self._looked_up(local[mine], table, padding))
        # Every rank has a gradient for its part, be it of zeros.
        return rows if has_words else rows + self.weight.sum()


class ParallelEmbedding(_DividedEmbedding):
    """`torch.nn.Embedding` of which each rank has some features of all words.

    Args:
        num_embeddings: How many words there are.
        embedding_dim: Features of a word; they need not divide by the ranks.
        padding_idx: A word whose row gets no gradient; negative counts from the last.
        max_norm: Only in a world of one rank: no rank has all that the norm of a row is made of.
        norm_type: p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the word stands in the input.
        sparse: Gradients of the table are sparse.
        init_method: What fills the whole table in place; each rank keeps its part of the same values.
        keep_master_weight_for_test: Keep the whole table, as it began, in `master_weight`.
        group: As in `ColumnParallelLinear`.
        device: As in `ColumnParallelLinear`.
        dtype: Of the table.

    Attributes:
        weight: [num_embeddings, features of this rank]
        split: Which features each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.
    """

    _dim = 1

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Initialiser = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if max_norm is not None and (size := layer_group(group).size) > 1:
            raise ValueError(
                f"ParallelEmbedding: max_norm={max_norm} needs whole rows, and {size} ranks have some features each: "
                "use VocabParallelEmbedding, which divides the words"
            )
        lookup = _Lookup(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        options: _Created = {"device": device, "dtype": dtype}
        shape = (num_embeddings, embedding_dim)
        super().__init__(shape, lookup, init_method, group, options, keep_master_weight_for_test)

    @property
    def embedding_dim_per_partition(self) -> int:
        """How many features of each word this rank has."""
        return self.split.sizes[self.group.rank]

    def forward(self, input_: Tensor) -> Tensor:
        """Looks words up.

        Args:
            input_: [any shape] of integers, the same on all ranks.

        Returns:
            [..., embedding_dim], the same on all ranks.

        Raises:
            IndexError: There is no such word.
            TypeError: The input is no tensor.
            ValueError: The input is of another dtype than int64 or int32.
        """
        check_words("ParallelEmbedding", input_)
        try:
            columns = self._looked_up(input_, self.weight, self.padding_idx)
        except IndexError as error:
            raise unknown_word("ParallelEmbedding", input_, self.num_embeddings) from error
        return gather_from_model_parallel_region(columns, self.group, sizes=self.split.sizes)


def _known_padding(padding_idx: Any, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(f"expected padding_idx to be an integer or None, got {padding_idx!r}")
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"expected padding_idx to be one of {num_embeddings} words, got {padding_idx}")
    return padding_idx % num_embeddings
