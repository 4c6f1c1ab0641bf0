"""The public names, and those of them that are Megatron's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import scale_tp
from scale_tp import ColumnParallelLinear, ParallelEmbedding, megatron, parallelize, ring_attention

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


def test_a_wrong_argument_is_refused_before_a_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    heads = torch.ones(1, 2, 4, 8)
    plan = {"0": "colwise"}
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (ColumnParallelLinear, (4, 4), {"bias": "false"}, "; write bias=False"),
        (
            ColumnParallelLinear,
            (4, "4"),
            {},
            r"ColumnParallelLinear: expected out_features to be an integer, got '4' \(str",
        ),
        (ParallelEmbedding, (4, 4), {"max_norm": "1"}, "ParallelEmbedding: expected max_norm to be a number or None"),
        (parallelize, (model, plan), {"check_inputs": "no"}, "; write check_inputs=False"),
        (ring_attention, (heads, heads, heads), {"is_causal": "false"}, "expected is_causal to be a bool"),
        (ring_attention, (heads, [1.0], heads), {}, "expected key to be a tensor, got list of float"),
        (
            megatron.gather_from_tensor_model_parallel_region,
            (heads,),
            {"sizes": 3},
            "expected sizes to be a sequence of integer",
        ),
        (scale_tp.initialize_model_parallel, (1,), {"limit_seconds": -3}, "expected limit_seconds above 0"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises((TypeError, ValueError), match=text):
            call(*args, **kwargs)
    assert type(model[0]) is nn.Linear and not megatron.model_parallel_is_initialized()


def test_a_region_is_still_compiled_as_one_graph() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return megatron.copy_to_tensor_model_parallel_region(x) * 2

    assert torch.equal(torch.compile(forward, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
