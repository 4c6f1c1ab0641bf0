"""Names of Megatron-LM, for programs that import them: its getters of groups and ranks, its regions and utilities.

Begin with `initialize_model_parallel` of `scale_tp` itself, which has Megatron's layers as well. New code needs none of
the getters: each layer takes the ranks as `process_group=`.
"""

from scale_core.arguments import checked_arguments as _checked
from scale_tp.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from scale_tp.parallel_state import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_ranks,
    get_context_parallel_world_size,
    get_data_context_parallel_group,
    get_data_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_ranks,
    get_data_parallel_world_size,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_ranks,
    get_pipeline_model_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_ranks,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    model_parallel_is_initialized,
)
from scale_tp.random import CudaRNGStatesTracker, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from scale_tp.split import VocabUtility, divide, ensure_divisibility, split_tensor_along_last_dim

__all__ = [
    "CudaRNGStatesTracker",
    "VocabUtility",
    "copy_to_tensor_model_parallel_region",
    "divide",
    "ensure_divisibility",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_cuda_rng_tracker",
    "get_data_context_parallel_group",
    "get_data_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_ranks",
    "get_pipeline_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_ranks",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_along_last_dim",
]

for _name in __all__:
    if _name.endswith("_region"):  # The layers call them where they are, in every forward.
        globals()[_name] = _checked(own="input_")(globals()[_name])
    if globals()[_name].__name__ == _name:  # Tracebacks show the path that people write.
        globals()[_name].__module__ = __name__
del _name
