"""Tensor, sequence and context parallelism for PyTorch: a layer that several devices compute together.

`layers/` has the layers of Megatron and FairScale, `conversion/` divides the layers of an existing model
(`parallelize`); begin there. Below them is `comm` (collectives, with gradients too), which `mappings` offers under the
names of Megatron; on its level `async_tp/` (communication that overlaps with products), `attention/` (ring and Ulysses
attention, and `context_parallel`, which puts them into a model), `random` and `state_dict`. `megatron` has the names of
Megatron-LM that programs for it import: the getters of ranks and groups, the regions, its utilities.
"""

import logging

from scale_tp import megatron as megatron  # Programs write `scale_tp.megatron.get_data_parallel_group()`.
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
from scale_tp.layers.norm import ParallelLayerNorm, ParallelRMSNorm
from scale_tp.layers.options import LayerOptions
from scale_tp.parallel_state import destroy_model_parallel, initialize_model_parallel
from scale_tp.random import checkpoint, model_parallel_manual_seed
from scale_tp.sequence_lengths import record_sequence_lengths
from scale_tp.state_dict import full_state_dict, load_full_state_dict

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "GPT2_PLAN",
    "AttentionRule",
    "ColumnParallelLinear",
    "LayerOptions",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelLayerNorm",
    "ParallelRMSNorm",
    "RowParallelLinear",
    "Style",
    "VocabParallelEmbedding",
    "checkpoint",
    "context_parallel",
    "destroy_model_parallel",
    "full_state_dict",
    "get_batch_on_this_cp_rank",
    "init_as_full",
    "initialize_model_parallel",
    "join_sequence",
    "load_full_state_dict",
    "model_parallel_manual_seed",
    "num_tokens_per_rank",
    "parallelize",
    "position_ids",
    "record_sequence_lengths",
    "ring_attention",
    "split_sequence",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]

for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):  # Tracebacks and documentation show the path that people write.
        globals()[_name].__module__ = __name__
del _name
