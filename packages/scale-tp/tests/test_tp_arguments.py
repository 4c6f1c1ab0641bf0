from typing import Any

import pytest
import torch
from torch import nn

import scale_tp
from scale_tp import ColumnParallelLinear, ParallelEmbedding, megatron, parallelize, ring_attention


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
