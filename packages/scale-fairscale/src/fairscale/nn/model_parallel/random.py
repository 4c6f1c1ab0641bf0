"""Random numbers that differ between the ranks of one layer, and those that do not."""

from scale_tp import checkpoint
from scale_tp.megatron import CudaRNGStatesTracker, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
]
