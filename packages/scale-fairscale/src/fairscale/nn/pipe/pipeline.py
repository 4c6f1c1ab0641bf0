"""The order in which micro-batches go through partitions."""

from scale_pipe.one_process.pipeline import clock_cycles

__all__ = ["clock_cycles"]
