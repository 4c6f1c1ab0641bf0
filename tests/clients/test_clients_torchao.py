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
from shard_arguments import shard_arguments
from torch import Tensor, nn
from trainings import train_beside

from scale_check.simulate import simulate
from scale_core import StepError
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import CommunicationPolicy, ShardOptions, fully_shard, fully_shard_modules, no_split_policy
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.transports.policy import wire_formats

pytest.importorskip("torchao")

pytestmark = pytest.mark.filterwarnings("ignore")  # Of the library itself, about kernels that are not there.


def quantised() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = wide_llama().requires_grad_(False)
    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda part, name: isinstance(part, nn.Linear) and "layers" in name
    )
    return model


@pytest.mark.ranks(2)
def test_adapters_train_beside_quantized_weights_that_stay_whole(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = with_adapters(quantised())
    with pytest.raises(
        TypeError,
        match=r"q_proj.base_layer.weight' is a Int8Tensor, which can't be cut into shards(.|\n)*ignored_params=",
    ):
        fully_shard_modules(model, no_split_policy(model))
    train_adapters(quantised, None, folder, ignored=True)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    import torchao.optim

    found: type[torch.optim.Optimizer] = getattr(torchao.optim, name)
    return found


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"])
@pytest.mark.ranks(2)
def test_optimizers_of_few_bits_step_on_shards(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    torch.compiler.set_stance("force_eager")  # They compile their step, which takes the C++ compiler a minute each.
    cls, in_bf16 = optimizer_class(name), name == "_AdamW"
    make: Callable[..., Any] = functools.partial(cls, lr=0.01)
    # Where it is not quantized, their state has the dtype of the weights.
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    low_bit.trains_on_blocks(make, dtype)
    low_bit.trains_under_oss(cls, dtype)
    if in_bf16:
        low_bit.is_saved_and_goes_on(make, folder, dtype)
    if name == "AdamW8bit":
        with pytest.raises(ValueError, match=r"optimizer state 0.weight.exp_avg is a OptimState8bit.*several tensors"):
            low_bit.is_saved_and_goes_on(make, folder)


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


def float8_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(20, (16,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def train_float8(emulate: bool, options: dict[str, Any]) -> None:
    """Steps over shards that are gathered in fp8, beside the plain model with the average of all ranks."""
    model, plain = float8_layers(gathered=True, emulate=emulate), float8_layers(gathered=False, emulate=emulate)
    fully_shard(model.second, **shard_arguments(**options))
    fully_shard(model, **shard_arguments(**options))
    # A rank without elements of a weight never sees that it was written to.
    optimizers = [torch.optim.AdamW([p for p in each.parameters() if p.numel()], lr=0.01) for each in (plain, model)]

    def before(each: nn.Module, step: int) -> None:
        if step == 2:
            for param in each.parameters():
                param.data.mul_(4.0)  # Counts no version.
        if step >= 2 and group_of().size > 1 and each is model:
            abort_float8(model, in_backward=step == 3)

    train_beside(plain, model, float8_loss, (optimizers[0], optimizers[1]), steps=4, before=before, gradients=False)


def abort_float8(model: Layers, *, in_backward: bool) -> None:
    """A step in which rank 1 fails: the ranks meet again, whichever of them had the scales of its weights."""

    def broken(*_: object) -> None:
        raise ValueError("broken")

    hook = model.second.register_full_backward_pre_hook if in_backward else model.second.register_forward_pre_hook
    handle = hook(broken) if group_of().rank == 1 else None
    with pytest.raises((ValueError, StepError)):
        float8_loss(model, group_of().rank, 9).backward()
    if handle is not None:
        handle.remove()
    assert all(param.grad is None for param in model.parameters())


FLOAT8: dict[str, tuple[bool, dict[str, Any]]] = {
    "as it is": (False, {}),
    "emulated": (True, {}),
    "resharded to one rank": (False, {"reshard_after_forward": 1}),
    "cut between parameters": (False, {"atom": "parameter"}),
}


@pytest.mark.parametrize("how", FLOAT8)
def test_fp8_weights_are_gathered_in_fp8_to_the_bit(how: str) -> None:
    run_ranks(train_float8, 2, *FLOAT8[how])


def test_fp8_weights_on_one_rank_are_as_torchao_makes_them() -> None:
    train_float8(*FLOAT8["as it is"])


@pytest.mark.ranks(2)
def test_fp8_weights_are_gathered_in_fp8_beside_others_in_int8() -> None:
    model = float8_layers(gathered=True)
    fully_shard(model, options=ShardOptions(communication=CommunicationPolicy(gather="int8")))
    buffers = {buffer.names[0]: buffer for unit in units_in(model) for buffer in unit.buffers}
    assert [buffer.has_post_all_gather for buffer in buffers.values()].count(True) == 1
    assert all(wire_formats(buffer).gather is None for buffer in buffers.values() if buffer.has_post_all_gather)
    with torch.device("meta"):
        on_meta = float8_layers(gathered=True)
    with pytest.raises(ValueError, match="an fp8 weight of torchao on the meta device"):
        fully_shard(on_meta)


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
