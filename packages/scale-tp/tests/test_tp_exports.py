"""The public names, and what users of FairScale import."""

from __future__ import annotations

import pytest

import scale_tp

# What the reference code of Llama and the layers of FairScale are imported by, under fairscale.nn.model_parallel.
FAIRSCALE = {
    "layers": ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "ParallelEmbedding"],
    "initialize": [
        "initialize_model_parallel",
        "destroy_model_parallel",
        "model_parallel_is_initialized",
        "get_model_parallel_group",
        "get_model_parallel_world_size",
        "get_model_parallel_rank",
        "get_model_parallel_src_rank",
        "get_data_parallel_group",
        "get_data_parallel_world_size",
        "get_data_parallel_rank",
        "get_pipeline_parallel_group",
        "get_pipeline_parallel_ranks",
        "get_context_parallel_group",
        "get_context_parallel_rank",
        "get_context_parallel_ranks",
        "get_context_parallel_world_size",
    ],
    "mappings": [
        "copy_to_model_parallel_region",
        "reduce_from_model_parallel_region",
        "scatter_to_model_parallel_region",
        "gather_from_model_parallel_region",
    ],
    "cross_entropy": ["vocab_parallel_cross_entropy"],
    "random": ["get_cuda_rng_tracker", "model_parallel_cuda_manual_seed", "checkpoint", "CudaRNGStatesTracker"],
    "utils": [
        "VocabUtility",
        "divide_and_check_no_remainder",
        "ensure_divisibility",
        "split_tensor_along_last_dim",
    ],
}


@pytest.mark.parametrize("name", sorted({name for names in FAIRSCALE.values() for name in names}))
def test_a_name_of_fairscale_is_found_here(name: str) -> None:
    assert name in scale_tp.__all__
    assert callable(getattr(scale_tp, name))


def test_public_functions_and_classes_are_documented() -> None:
    for name in scale_tp.__all__:
        value = getattr(scale_tp, name)
        if callable(value):
            assert value.__doc__, name
            assert value.__module__ == "scale_tp"
