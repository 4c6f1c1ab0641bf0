"""Batch norms that update their running statistics once per mini-batch."""

from scale_pipe import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
