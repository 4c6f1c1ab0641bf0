"""The public names, and those of them that are Megatron's."""

from __future__ import annotations

import pytest

import scale_tp
from scale_tp import megatron

# What Megatron's layers, `parallel_state`, `mappings`, `random` and `utils` call the same things.
MEGATRON = [
    *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "vocab_parallel_cross_entropy"),
    *("initialize_model_parallel", "destroy_model_parallel", "model_parallel_is_initialized"),
    *("get_tensor_model_parallel_group", "get_tensor_model_parallel_world_size", "get_tensor_model_parallel_rank"),
    *("get_tensor_model_parallel_src_rank", "get_data_parallel_group", "get_data_parallel_world_size"),
    *("get_data_parallel_rank", "get_pipeline_model_parallel_group", "get_pipeline_model_parallel_rank"),
    *("get_pipeline_model_parallel_world_size", "get_context_parallel_group", "get_context_parallel_rank"),
    *("get_context_parallel_world_size", "copy_to_tensor_model_parallel_region"),
    *("reduce_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region"),
    *("gather_from_tensor_model_parallel_region", "gather_from_sequence_parallel_region"),
    *("reduce_scatter_to_sequence_parallel_region", "scatter_to_sequence_parallel_region"),
    *("get_cuda_rng_tracker", "model_parallel_cuda_manual_seed", "checkpoint", "CudaRNGStatesTracker"),
    *("VocabUtility", "divide", "ensure_divisibility", "split_tensor_along_last_dim"),
]


@pytest.mark.parametrize("name", MEGATRON)
def test_a_name_of_megatron_is_found_here(name: str) -> None:
    (home,) = (module for module in (scale_tp, megatron) if name in module.__all__)
    assert callable(getattr(home, name))


def test_public_functions_and_classes_are_documented() -> None:
    for module in (scale_tp, megatron):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert value.__doc__, name
                assert value.__module__ == module.__name__ or value.__name__ != name
