"""Collectives with gradients: into a region that ranks divide, and out of it."""

from scale_tp.megatron import copy_to_tensor_model_parallel_region as copy_to_model_parallel_region
from scale_tp.megatron import gather_from_tensor_model_parallel_region as gather_from_model_parallel_region
from scale_tp.megatron import reduce_from_tensor_model_parallel_region as reduce_from_model_parallel_region
from scale_tp.megatron import scatter_to_tensor_model_parallel_region as scatter_to_model_parallel_region

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
]
