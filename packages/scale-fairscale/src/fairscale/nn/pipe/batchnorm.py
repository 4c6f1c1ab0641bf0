"""Batch norms that update their running statistics once per mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

import scale_pipe


class DeferredBatchNorm(scale_pipe.DeferredBatchNorm):
    """`scale_pipe.DeferredBatchNorm`, which shows what it has collected of a mini-batch as FairScale's buffers did."""

    @property
    def sum(self) -> Tensor:
        """The sum of the values so far [C]; zeros between mini-batches."""
        assert self.running_mean is not None
        statistics = self._collected
        return torch.zeros_like(self.running_mean) if statistics is None else statistics.mean * statistics.num_values

    @property
    def sum_squares(self) -> Tensor:
        """The sum of their squares [C]."""
        assert self.running_mean is not None
        statistics = self._collected
        if statistics is None:
            return torch.zeros_like(self.running_mean)
        return statistics.deviations + statistics.mean.square() * statistics.num_values

    @property
    def counter(self) -> int:
        """How many values per channel these are."""
        return 0 if self._collected is None else self._collected.num_values

    @property
    def tracked(self) -> int:
        """Of how many micro-batches."""
        return 0 if self._collected is None else self._collected.num_micro_batches


__all__ = ["DeferredBatchNorm"]
