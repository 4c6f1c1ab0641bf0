"""Adapters of low rank on a frozen Llama: gradients and optimizer states exist only for what trains."""

from __future__ import annotations

import warnings

import pytest
import torch
from client_models import build, language_step, sharded, tokens, train_beside
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from scale_core.flat.buffer import live_buffers
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_fsdp import Description, describe

RANK = 2


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


class Kept:
    """What a training left behind on this rank."""

    def __init__(self, wrong: list[str], description: Description, trained: int, states: int, most: int) -> None:
        self.wrong, self.description = wrong, description
        self.trained, self.states, self.most_gradient = trained, states, most


def train(way: str) -> Kept:
    plain = WAYS[way]()
    model = sharded(plain)
    made: list[torch.optim.Optimizer] = []

    def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """With every parameter, as most programs build it; frozen ones have no gradient."""
        made.append(torch.optim.AdamW(params, lr=0.01))
        return made[-1]

    most = 0

    def step(each: nn.Module, rank: int, number: int) -> Tensor:
        nonlocal most
        most = max(most, sum(tensor.nbytes for kind, tensor in live_buffers() if kind == "gradient"))
        return language_step(each, rank, number)

    wrong = train_beside(plain, model, step, make=adam)
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad and param.grad is not None]
    wrong += [f"{name} is frozen and has a gradient" for name in frozen]
    states = sum(local_tensor(t).numel() for state in made[0].state.values() for t in state.values() if t.ndim)
    trained = sum(local_tensor(param).numel() for param in model.parameters() if param.requires_grad)
    return Kept(wrong, describe(model), trained, states, most)


def merge() -> list[str]:
    """Adapters are merged into the full parameters, and left out of a forward."""
    plain = by_peft().eval()
    model, ids, wrong = sharded(plain), tokens(0), []
    with torch.no_grad():
        with model.disable_adapter(), plain.disable_adapter():
            if not torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits):
                wrong.append("without adapters: other numbers")
        with model.summon_full_params():
            model.merge_adapter()
        plain.merge_adapter()
        if not torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits):
            wrong.append("merged: other numbers")
    return wrong


def play() -> tuple[dict[str, Kept], list[str]]:
    return {way: train(way) for way in WAYS}, merge()


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[str, Kept], list[str]]]:
    return run_ranks(play, 2)


@pytest.fixture(scope="module")
def of_two_ranks(results: list[tuple[dict[str, Kept], list[str]]]) -> list[dict[str, Kept]]:
    return [kept for kept, _ in results]


def test_adapters_are_merged_inside_summon_full_params(results: list[tuple[dict[str, Kept], list[str]]]) -> None:
    assert not any(wrong for _, wrong in results)


@pytest.mark.parametrize("way", WAYS)
def test_adapters_train_as_on_one_process(way: str, of_two_ranks: list[dict[str, Kept]]) -> None:
    assert not any(of_rank[way].wrong for of_rank in of_two_ranks)


@pytest.mark.parametrize("way", WAYS)
def test_only_what_trains_takes_memory_beyond_its_shard(way: str, of_two_ranks: list[dict[str, Kept]]) -> None:
    elements = RANK * 16 * 2 + RANK * (16 + 8)  # Of one block: two matrices down from 16, one up to 16, one up to 8.
    assert sum(of_rank[way].trained for of_rank in of_two_ranks) == 2 * elements
    for of_rank in of_two_ranks:
        kept = of_rank[way]
        assert kept.states == 2 * kept.trained
        assert kept.description.state_of_elementwise_optimizer == kept.description.gradients == 4 * kept.trained
        assert 4 * elements <= kept.description.flat_gradients_at_most <= 4 * (elements + 8)
        assert kept.most_gradient == 0, "between two steps there is no gradient that was not reduced"
        frozen = [buffer for unit in kept.description.units for buffer in unit.buffers if not buffer.trains]
        assert sum(buffer.num_elements for buffer in frozen) > 50 * elements // 2
        assert not any(buffer.trained_bytes for buffer in frozen)
