"""Tensor, sequence and context parallelism for PyTorch: a layer that several devices compute together.

The files in reading order; each stands only on those above it:

- `wide`, `tags`: the dtype that sums are made in, and the tags of messages;
- `split_sizes`: how the indices of a dimension are dealt to the ranks; integers only;
- `even_parts`: what is cut by hand, by FairScale's names;
- `axes`, `groups`, `getters`: which ranks compute a layer together;
- `moves`: sums and parts of tensors between them;
- `crossings`: where a tensor comes into the divided region or out of it, as autograd remembers it;
- `sequence_parts`: how long the parts of a sequence are that the ranks hold;
- `regions`: sums and parts with gradients, each of which is such a crossing;
- `features`: parts of features that don't stand in rank order;
- `random_state`: where random numbers stand, read and put back;
- `initialising`: a part of a matrix with the values that it has in the whole one;
- `whole_view`: a part that looks like the whole to what gives it values;
- `layer`, `wholes`: what all layers have in common, and functions that give them their values from outside;
- `copies`: parts of which several ranks have copies, as of key-value heads;
- `products`, `pieces`: matrix products while other pieces of a sequence are on their way;
- `overlap`, `overlap_sums`, `arrivals`: linear layers whose communication runs beside their products;
- `linear_regions`, `fitting`: linear layers at the edges of the divided region;
- `vocabulary`, `linear`, `embedding`, `dropout`: the layers;
- `cross_entropy_terms`, `cross_entropy_checks`, `cross_entropy`: a loss over logits that no rank has alone;
- `randomness`: random numbers that are the same on all ranks, and others;
- `divided_randomness`: others inside of what is divided, the same outside;
- `heads`: attention heads that are divided;
- `attention`: a layer of divided heads;
- `sequence_order`: which positions of a sequence each rank holds, where ranks divide all of it between them;
- `agreement`: ranks that call one thing with other sizes learn of it;
- `blockwise`, `ring`, `ulysses`: exact attention over such a sequence;
- `divided`, `entrance`, `divided_linear`, `divided_words`, `summed`: modules that exist already, divided in place;
- `norms`: those on a part of the sequence;
- `first_forward`: whether the ranks hold different parts;
- `plan`, `stretches`, `changes`, `refusals`, `parallelize`: a model that exists already, divided by a plan;
- `state`, `llama`: whole tensors in and out, and the reference checkpoints of Llama.
"""

from scale_tp.async_tp.collective_matmul import gather_linear, linear_scatter
from scale_tp.attention_heads import ATTENTION_RULES, AttentionRule
from scale_tp.context_parallel.load_balance import join_sequence, positions, split_sequence
from scale_tp.context_parallel.ring import ring_attention
from scale_tp.context_parallel.ulysses import ulysses_attention
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN, Style
from scale_tp.layers.attention import ParallelAttention
from scale_tp.layers.cross_entropy import vocab_parallel_cross_entropy
from scale_tp.layers.dropout import ParallelDropout
from scale_tp.layers.embedding import ParallelEmbedding, VocabParallelEmbedding
from scale_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from scale_tp.layers.norm import ParallelLayerNorm, ParallelRMSNorm, sum_gradients_over
from scale_tp.layers.whole_init import initialise_whole
from scale_tp.llama import iterate_consolidated, read_consolidated
from scale_tp.mappings import (
    copy_all_to_model_parallel_region,
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from scale_tp.parallel_state import (
    destroy_model_parallel,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_ranks,
    get_context_parallel_world_size,
    get_data_context_parallel_group,
    get_data_context_parallel_rank,
    get_data_context_parallel_ranks,
    get_data_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_ranks,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_ranks,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipeline_parallel_group,
    get_pipeline_parallel_rank,
    get_pipeline_parallel_ranks,
    get_pipeline_parallel_world_size,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from scale_tp.random import (
    CudaRNGStatesTracker,
    RandomStreams,
    checkpoint,
    get_cuda_rng_tracker,
    get_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_manual_seed,
)
from scale_tp.split import (
    HeadSplit,
    Split,
    VocabUtility,
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_heads,
    split_tensor_along_last_dim,
)
from scale_tp.state_dict import full_state_dict, load_full_tensors

__version__ = "2026.11.0"
__all__ = [
    "ATTENTION_RULES",
    "GPT2_PLAN",
    "AttentionRule",
    "ColumnParallelLinear",
    "CudaRNGStatesTracker",
    "HeadSplit",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelLayerNorm",
    "ParallelRMSNorm",
    "RandomStreams",
    "RowParallelLinear",
    "Split",
    "Style",
    "VocabParallelEmbedding",
    "VocabUtility",
    "checkpoint",
    "copy_all_to_model_parallel_region",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "full_state_dict",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_linear",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_cuda_rng_tracker",
    "get_data_context_parallel_group",
    "get_data_context_parallel_rank",
    "get_data_context_parallel_ranks",
    "get_data_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_ranks",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_ranks",
    "get_pipeline_parallel_world_size",
    "get_rng_tracker",
    "initialise_whole",
    "initialize_model_parallel",
    "iterate_consolidated",
    "join_sequence",
    "linear_scatter",
    "load_full_tensors",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "model_parallel_manual_seed",
    "parallelize",
    "positions",
    "read_consolidated",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "ring_attention",
    "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "split_heads",
    "split_sequence",
    "split_tensor_along_last_dim",
    "sum_gradients_over",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]

for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):  # Tracebacks and documentation show the path that people write.
        globals()[_name].__module__ = __name__
del _name
