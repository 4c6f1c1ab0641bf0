"""Frozen weights of bitsandbytes under adapters of peft, and its 8-bit optimizers, over shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import client_low_bit as low_bit
import pytest
import torch
from client_quantised import train_adapters, wide_llama
from torch import nn

from scale_core.testing import run_ranks

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore")  # Of the library itself, about GPUs that are not there.


def replaced(make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A Llama with frozen weights; the projections of its blocks are made by `make`."""
    model: Any = wide_llama().requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, make(child))
    return model


def in_4_bits(linear: nn.Linear, storage: torch.dtype) -> nn.Module:
    kinds = {"quant_type": "nf4", "quant_storage": storage}
    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, **kinds)
    made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=made, **kinds)
    return made.to("cpu")  # Quantizes.


def in_8_bits(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")


WEIGHTS: dict[str, tuple[Callable[[nn.Linear], nn.Module], torch.dtype]] = {
    "4 bits in bytes": (functools.partial(in_4_bits, storage=torch.uint8), torch.uint8),
    "4 bits in floats": (functools.partial(in_4_bits, storage=torch.float32), torch.float32),
    "8 bits": (in_8_bits, torch.int8),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.ranks(2)
def test_adapters_on_sharded_quantized_weights_train(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    make, dtype = WEIGHTS[name]
    train_adapters(lambda: replaced(make), dtype, folder)


def step_and_save(name: str, folder: str) -> None:
    cls = getattr(bnb.optim, name)
    make = functools.partial(cls, lr=0.01)
    low_bit.trains_on_blocks(make)
    low_bit.trains_under_oss(cls)
    low_bit.is_saved_and_goes_on(make, folder)


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_optimizers_of_8_bits_step_on_shards(name: str, tmp_path: Path) -> None:
    run_ranks(step_and_save, 2, name, str(tmp_path))
    goes_on = functools.partial(low_bit.goes_on_from, functools.partial(getattr(bnb.optim, name), lr=0.01))
    (expected,) = run_ranks(goes_on, 1, str(tmp_path))
    for found in run_ranks(goes_on, 4, str(tmp_path)):
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())
