"""Adapters of peft on frozen quantized weights: sharded beside one process, trained and saved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from client_models import language_step, llama
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from trainings import train_beside

from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_fsdp import fully_shard_modules, no_split_policy


def wide_llama() -> nn.Module:
    """Wide enough for blocks of 64 weights; the same on every rank."""
    torch.manual_seed(3)
    return llama(hidden_size=64, intermediate_size=128).train()


def with_adapters(model: nn.Module) -> Any:
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers by names that this one will drop.
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)  # As they come they are zeros, and then half of the gradients are zeros.
    return adapted.train()


def train_adapters(
    build: Callable[[], nn.Module], dtype: torch.dtype | None, folder: str, *, ignored: bool = False
) -> None:
    """Compares losses, gradients, the state dict and the files of adapters with those of one process, to the bit.

    Args:
        build: Makes the model with its frozen weights.
        dtype: Of the quantized weights' shards; None where they stay whole.
        folder: The files go into two folders below it.
        ignored: Whether weights that are tensors of several tensors are passed as `ignored_params=`.
    """
    plain, model = with_adapters(build()), with_adapters(build())
    whole = {param for param in model.parameters() if hasattr(param, "__tensor_flatten__")} if ignored else None
    fully_shard_modules(model, no_split_policy(model), ignored_params=whole)
    if dtype is not None:
        quantised = [param for name, param in model.named_parameters() if "_proj" in name and param.dtype == dtype]
        held, whole_numel = (sum(map(count, quantised)) for count in (Tensor.numel, _whole_numel))
        assert 0 < held < whole_numel, "elements of quantized weights on this rank"
    train_beside(plain, model, language_step, gradients=not ignored, weights=False)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert [name for name, value in theirs.items() if _bits(ours[name]) != _bits(value)] == []
    _compare_files(model, plain, folder)


def _whole_numel(param: Tensor) -> int:
    """The elements on all ranks."""
    shard = shard_of(param)
    return param.numel() if shard is None else math.prod(shard.shape)


def _bits(value: Any) -> Any:
    """What is equal where all bits are: bytes read as floats may be no numbers, which equal nothing."""
    if not isinstance(value, Tensor):
        return value
    if hasattr(value, "__tensor_flatten__"):
        return [_bits(getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _compare_files(model: Any, plain: Any, folder: str) -> None:
    """Adapters saved alone: the bytes of the file that one process writes."""
    model.save_pretrained(f"{folder}/sharded")
    if group_of().rank == 0:
        plain.save_pretrained(f"{folder}/plain")
    dist.barrier()
    names = ["adapter_model.safetensors", "adapter_config.json"]
    files = [[Path(folder, which, name).read_bytes() for name in names] for which in ("sharded", "plain")]
    assert files[0] == files[1]
