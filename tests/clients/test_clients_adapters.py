"""Adapters of low rank on a frozen Llama: gradients and optimizer states exist only for what trains."""

from __future__ import annotations

import warnings

import pytest
import torch
from client_models import build, language_step, sharded, tokens
from peft import LoraConfig, get_peft_model
from rank_values import by_rank
from torch import Tensor, nn
from trainings import train_beside

from scale_core.flat.live_buffers import live_buffers
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import describe

RANK = 2
ELEMENTS = RANK * 16 * 2 + RANK * (16 + 8)  # Of one block: two matrices down from 16, one up to 16, one up to 8.


class LoraLinear(nn.Module):
    """A frozen linear and a trained product of two thin matrices beside it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def by_hand() -> nn.Module:
    model = build("llama").requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name)))
    return model


def by_peft() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by names that this one will drop.
        model = get_peft_model(build("llama"), LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_()  # As they come they are zeros, and then half of the gradients are zeros.
    return model.train()


WAYS = {"by hand": by_hand, "by peft": by_peft}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2, in_turn=True)
def test_adapters_train_and_only_they_take_more_than_their_shard(way: str) -> None:
    """Trains beside the plain model, and looks at what a rank keeps."""
    plain = WAYS[way]()
    model = sharded(plain)
    # With every parameter, as most programs build it; frozen ones have no gradient.
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]

    def loss_of(each: nn.Module, rank: int, step: int) -> Tensor:
        waiting = [kind for kind, tensor in live_buffers() if kind == "gradient" and tensor.nbytes]
        assert waiting == [], "between two steps there is no gradient that was not reduced"
        return language_step(each, rank, step)

    train_beside(plain, model, loss_of, (optimizers[0], optimizers[1]))
    assert all(param.grad is None for param in model.parameters() if not param.requires_grad)
    trained = sum(local_tensor(param).numel() for param in model.parameters() if param.requires_grad)
    states = [tensor for state in optimizers[1].state.values() for tensor in state.values() if tensor.ndim]
    assert sum(local_tensor(tensor).numel() for tensor in states) == 2 * trained
    description = describe(model)
    assert description.state_of_elementwise_optimizer == description.gradients == 4 * trained
    assert 4 * ELEMENTS <= description.flat_gradients_at_most <= 4 * (ELEMENTS + 8)
    frozen = [buffer for unit in description.units for buffer in unit.buffers if not buffer.trains]
    assert sum(buffer.num_elements for buffer in frozen) > 50 * ELEMENTS // 2
    assert not any(buffer.trained_bytes for buffer in frozen)
    assert sum(by_rank(trained)) == 2 * ELEMENTS


@pytest.mark.ranks(2, in_turn=True)
@torch.no_grad()
def test_adapters_are_merged_inside_summon_full_params() -> None:
    """Adapters are left out of a forward, and merged into the full parameters."""
    plain = by_peft().eval()
    model, ids = sharded(plain), tokens(0)
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    with model.summon_full_params():
        model.merge_adapter()
    plain.merge_adapter()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
