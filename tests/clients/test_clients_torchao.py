"""Frozen weights of torchao under adapters of peft, its low-bit optimizers, and its fp8 weights, over shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import client_low_bit as low_bit
import pytest
import torch
from client_quantised import train_adapters, wide_llama, with_adapters
from torch import Tensor, nn

from scale_core.comm.group import group_of
from scale_core.simulate import simulate
from scale_core.testing import run_ranks
from scale_fsdp import (
    CommunicationPolicy,
    StepError,
    full_state_dict,
    fully_shard,
    fully_shard_modules,
    no_split_policy,
)
from scale_fsdp.runtime.unit import units_in

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


class Layers(nn.Module):
    """Two layers that torchao converts between two that it does not, one of them in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(20, 32), nn.Linear(32, 64)
        self.second, self.head = nn.Linear(64, 32, bias=False), nn.Linear(32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(self.embed(tokens)))
        logits: Tensor = self.head(self.second(hidden))
        return logits


def float8_layers(*, gathered: bool, emulate: bool = False) -> Layers:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = Layers()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathered, emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in ("first", "second"))
    return model


def float8_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(20, (16,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def train_float8(emulate: bool, options: dict[str, Any]) -> list[str]:
    """Steps over shards that are gathered in fp8, beside the plain model with the average of all ranks."""
    group, wrong = group_of(), []
    model, plain = float8_layers(gathered=True, emulate=emulate), float8_layers(gathered=False, emulate=emulate)
    fully_shard(model.second, **options)
    fully_shard(model, **options)
    # A rank without elements of a weight never sees that it was written to.
    optimizers = [torch.optim.AdamW([p for p in each.parameters() if p.numel()], lr=0.01) for each in (model, plain)]
    for step in range(4):
        if step == 2:
            for each in (model, plain):
                for param in each.parameters():
                    param.data.mul_(4.0)  # Counts no version.
        if step >= 2 and group.size > 1:
            wrong += abort_float8(model, in_backward=step == 3)
        total: dict[str, Tensor] = {}
        for rank in range(group.size):
            plain.zero_grad()
            expected = float8_loss(plain, step, rank)
            expected.backward()
            for name, param in plain.named_parameters():
                total[name] = total.get(name, torch.zeros_like(param)) + param.grad
            if rank == group.rank:
                mine = expected.item()
        loss = float8_loss(model, step, group.rank)
        if loss.item() != mine:
            wrong.append(f"step {step}: a loss of {loss.item()} instead of {mine}")
        loss.backward()
        for name, param in plain.named_parameters():
            param.grad = total[name] / group.size
        for optimizer, each in zip(optimizers, (model, plain), strict=True):
            optimizer.step()
            each.zero_grad()
        ours, theirs = full_state_dict(model), plain.state_dict()
        wrong += [f"step {step}: {name}" for name in theirs if not torch.equal(ours[name], theirs[name])]
    return wrong


def abort_float8(model: Layers, *, in_backward: bool) -> list[str]:
    """A step in which rank 1 fails: the ranks meet again, whichever of them had the scales of its weights."""

    def broken(*_: object) -> None:
        raise ValueError("broken")

    hook = model.second.register_full_backward_pre_hook if in_backward else model.second.register_forward_pre_hook
    handle = hook(broken) if group_of().rank == 1 else None
    with pytest.raises((ValueError, StepError)):
        float8_loss(model, 9, group_of().rank).backward()
    if handle is not None:
        handle.remove()
    return [f"{name} has a gradient" for name, param in model.named_parameters() if param.grad is not None]


def train_all_float8() -> list[str]:
    halves = {"reshard_after_forward": 1}
    wrong = train_float8(False, {}) + train_float8(True, {}) + train_float8(False, halves)
    wrong += train_float8(False, {"atom": "parameter"})
    model = float8_layers(gathered=True)
    fully_shard(model, communication=CommunicationPolicy(gather="int8"))
    buffers = {buffer.names[0]: buffer for unit in units_in(model) for buffer in unit.buffers}
    assert [buffer.gathers_float8 for buffer in buffers.values()].count(True) == 1
    assert all(buffer.wire.gather is None for buffer in buffers.values() if buffer.gathers_float8)
    with torch.device("meta"):
        on_meta = float8_layers(gathered=True)
    with pytest.raises(ValueError, match="an fp8 weight of torchao on the meta device"):
        fully_shard(on_meta)
    return wrong


def test_weights_that_torchao_computes_with_in_fp8_are_gathered_in_fp8_to_the_bit() -> None:
    assert not any(run_ranks(train_all_float8, 2))
    assert not train_float8(False, {})  # Alone, they are as torchao makes them.


def sent_bytes(world: int, *, gathered: bool) -> dict[str, int]:
    with simulate(rank=0, world_size=world) as simulation:
        model = float8_layers(gathered=gathered)
        fully_shard(model, reshard_after_forward=True)
        float8_loss(model, 0, 0).backward()
        simulation.restart()
        float8_loss(model, 0, 0).backward()
        return dict(simulation.bytes_sent)


def test_a_gather_in_fp8_sends_a_byte_for_each_weight() -> None:
    fp8, fp32 = sent_bytes(8, gathered=True), sent_bytes(8, gathered=False)
    shard = 2 * 32 * 64 // 8  # Of both layers, gathered twice by seven others
    assert fp32["all_gather"] - fp8["all_gather"] == 2 * 7 * shard * (4 - 1)
