"""Frozen weights of torchao under adapters of peft, and its low-bit optimizers, over shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import client_low_bit as low_bit
import pytest
import torch
from client_quantised import train_adapters, wide_llama, with_adapters
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import fully_shard_modules, no_split_policy

pytest.importorskip("torchao")

pytestmark = pytest.mark.filterwarnings("ignore")  # Of the library itself, about kernels that are not there.

OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


def quantised() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = wide_llama().requires_grad_(False)
    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda part, name: isinstance(part, nn.Linear) and "layers" in name
    )
    return model


def train_and_refuse(folder: str) -> tuple[list[str], str]:
    model = with_adapters(quantised())
    with pytest.raises(TypeError) as refused:
        fully_shard_modules(model, no_split_policy(model))
    return train_adapters(quantised, None, folder, ignored=True), str(refused.value)


def test_adapters_on_quantized_weights_train_as_on_one_process_where_those_stay_whole(tmp_path: Path) -> None:
    for wrong, message in run_ranks(train_and_refuse, 2, str(tmp_path)):
        assert not wrong
        assert "q_proj.base_layer.weight' is a Int8Tensor, which can't be cut into shards" in message
        assert "ignored_params=" in message


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    import torchao.optim

    found: type[torch.optim.Optimizer] = getattr(torchao.optim, name)
    return found


def step_all(folder: str) -> dict[str, list[str]]:
    torch.compiler.set_stance("force_eager")  # They compile their step, which takes the C++ compiler a minute each.
    wrong = {}
    for name in OPTIMIZERS:
        make: Callable[..., Any] = functools.partial(optimizer_class(name), lr=0.01)
        wrong[f"{name} on blocks"] = low_bit.trains_on_blocks(make)
        wrong[f"{name} under OSS"] = low_bit.trains_under_oss(optimizer_class(name))
    # Where it is not quantized, their state has the dtype of the weights.
    cls, dtype = optimizer_class("_AdamW"), torch.bfloat16
    wrong["in bf16 on blocks"] = low_bit.trains_on_blocks(functools.partial(cls, lr=0.01), dtype)
    wrong["in bf16 under OSS"] = low_bit.trains_under_oss(cls, dtype)
    wrong["in bf16 in a snapshot"] = low_bit.is_saved_and_goes_on(functools.partial(cls, lr=0.01), folder, dtype)
    return wrong


def test_optimizers_of_few_bits_step_on_shards_as_on_one_process(tmp_path: Path) -> None:
    for found in run_ranks(step_all, 2, str(tmp_path)):
        assert not any(found.values()), found


def save(folder: str) -> str:
    torch.compiler.set_stance("force_eager")
    with pytest.raises(ValueError, match="made of several tensors") as refused:
        low_bit.is_saved_and_goes_on(functools.partial(optimizer_class("AdamW8bit"), lr=0.01), folder)
    return str(refused.value)


def test_state_that_is_made_of_several_tensors_is_not_saved_by_name(tmp_path: Path) -> None:
    for message in run_ranks(save, 2, str(tmp_path)):
        assert "optimizer state 0.weight.exp_avg is a OptimState8bit" in message
