"""Tensor, sequence and context parallelism for PyTorch: a layer that several devices compute together.

`layers/` has the layers of Megatron and FairScale, `conversion/` divides those of a model that exists already
(`parallelize`); begin there. Below them are `mappings` (collectives with gradients) and `comm`; on their level
`async_tp/` (communication that overlaps with products), `attention/` (ring and Ulysses attention, and
`context_parallel`, which puts them into a model), `random` and `state_dict`.
"""

import logging

from scale_core.arguments import checked_arguments as _checked
from scale_tp.async_tp.collective_matmul import gather_linear, linear_scatter
from scale_tp.attention.batch import get_batch_on_this_cp_rank, num_tokens_per_rank
from scale_tp.attention.context_parallel import context_parallel
from scale_tp.attention.load_balance import join_sequence, position_ids, split_sequence
from scale_tp.attention.ring import ring_attention
from scale_tp.attention.ulysses import ulysses_attention
from scale_tp.attention_heads import AttentionRule
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN, Style
from scale_tp.layers.attention import ParallelAttention
from scale_tp.layers.cross_entropy import vocab_parallel_cross_entropy
from scale_tp.layers.dropout import ParallelDropout
from scale_tp.layers.embedding import ParallelEmbedding, VocabParallelEmbedding
from scale_tp.layers.full_init import init_as_full
from scale_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from scale_tp.layers.norm import ParallelLayerNorm, ParallelRMSNorm, register_grad_all_reduce
from scale_tp.llama import iterate_consolidated
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
    destroy_model_parallel,
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
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from scale_tp.random import (
    CudaRNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    get_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_manual_seed,
)
from scale_tp.sequence_lengths import record_sequence_lengths
from scale_tp.split import (
    Split,
    VocabUtility,
    divide,
    ensure_divisibility,
    split_heads,
    split_tensor_along_last_dim,
)
from scale_tp.state_dict import full_state_dict, load_full_state_dict

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "GPT2_PLAN",
    "AttentionRule",
    "ColumnParallelLinear",
    "CudaRNGStatesTracker",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelLayerNorm",
    "ParallelRMSNorm",
    "RowParallelLinear",
    "Split",
    "Style",
    "VocabParallelEmbedding",
    "VocabUtility",
    "checkpoint",
    "context_parallel",
    "copy_to_tensor_model_parallel_region",
    "destroy_model_parallel",
    "divide",
    "ensure_divisibility",
    "full_state_dict",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_linear",
    "get_batch_on_this_cp_rank",
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
    "get_rng_tracker",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_ranks",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "init_as_full",
    "initialize_model_parallel",
    "iterate_consolidated",
    "join_sequence",
    "linear_scatter",
    "load_full_state_dict",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "model_parallel_manual_seed",
    "num_tokens_per_rank",
    "parallelize",
    "position_ids",
    "record_sequence_lengths",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "register_grad_all_reduce",
    "ring_attention",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_heads",
    "split_sequence",
    "split_tensor_along_last_dim",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]

for _name in __all__:
    if _name.endswith("_region"):  # The layers call them where they are, in every forward.
        globals()[_name] = _checked(own="input_")(globals()[_name])
    if hasattr(globals()[_name], "__qualname__"):  # Tracebacks and documentation show the path that people write.
        globals()[_name].__module__ = __name__
del _name
