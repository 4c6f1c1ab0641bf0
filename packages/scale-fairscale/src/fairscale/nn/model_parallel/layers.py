"""Layers divided between ranks: those of `scale_tp`, whose state dict is this rank's part, as FairScale's is.

A program that saves `model.state_dict()` on each rank so writes the files that it wrote before, such as Llama's
`consolidated.00.pth`. Whole tensors load, too.
"""

from __future__ import annotations

import scale_tp
from scale_tp.layers.base import ParallelModule

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]


class _LocalStateDict(ParallelModule):
    """A layer whose `state_dict()` has this rank's part; torch's checkpoint functions get what scale_tp gives them."""

    _saves_whole = False


class ColumnParallelLinear(_LocalStateDict, scale_tp.ColumnParallelLinear):
    """`scale_tp.ColumnParallelLinear`: a linear layer divided by its output features."""


class RowParallelLinear(_LocalStateDict, scale_tp.RowParallelLinear):
    """`scale_tp.RowParallelLinear`: a linear layer divided by its input features."""


class VocabParallelEmbedding(_LocalStateDict, scale_tp.VocabParallelEmbedding):
    """`scale_tp.VocabParallelEmbedding`: an embedding divided by words."""


class ParallelEmbedding(_LocalStateDict, scale_tp.ParallelEmbedding):
    """`scale_tp.ParallelEmbedding`: an embedding divided by features."""
