"""Words of a rank's part of a vocabulary: which row each is in, and which words other ranks have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scale_tp.split_sizes import Range


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
