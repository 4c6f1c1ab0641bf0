"""Models of transformers, sharded by the blocks that they name themselves, train as on one process.

Bitwise, in fp32 with SGD. T5's decoder blocks, alone among these, use one of their inputs several times: what the
encoder has returned. Its gradients are added up inside of each unit first and then across units, and addition rounds.
So the plain T5 has an alias of each input of a block, which makes the same sums; and it equals the one without aliases
to 2e-6 (some 16 units in the last place of 1.0 after three steps; found: 6e-8). In bf16, SGD rounds elements that its
vector instructions take together, and the rest of a tensor, differently, and a shard ends elsewhere: there the first
step's gradients are equal to the bit, and the weights after it to the last place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from client_models import LENGTH, MODELS, build, build_plain, language_step, sharded, tokens
from torch import Tensor, nn
from trainings import mean_gradients, sgd, train_beside

from scale_core.comm.group import group_of
from scale_fsdp import MixedPrecisionPolicy, ShardOptions, fully_shard, fully_shard_modules, no_split_policy

TOLERANCE = 2e-6


def trains(name: str) -> None:
    plain = build_plain(name)
    model = sharded(plain)
    if name == "t5 in two dtypes":
        train_beside(plain, model, language_step, steps=1, weights=False)
        for key, weight in plain.state_dict().items():
            last_place = 2**-7 if weight.dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(model.state_dict()[key], weight, rtol=last_place, atol=0.0)
        return
    train_beside(plain, model, language_step)
    if name.startswith("t5"):
        unaliased = build(name)
        optimizer = sgd(unaliased.parameters())
        for step in range(3):
            mean_gradients(unaliased, language_step, step, group_of().size)
            optimizer.step()
        for key, weight in unaliased.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], weight, rtol=0.0, atol=TOLERANCE)


def enable_checkpointing(model: Any, **options: Any) -> None:
    """Turns on what newer versions call `activation_checkpointing_enable`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(**options)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def checkpointed_before(name: str) -> None:
    plain = build_plain(name)
    enable_checkpointing(plain)
    train_beside(plain, sharded(plain), language_step)


def checkpointed_after(name: str) -> None:
    plain = build_plain(name)
    model = sharded(plain)
    enable_checkpointing(model)
    enable_checkpointing(plain)
    train_beside(plain, model, language_step)


def checkpointed_reentrantly() -> None:
    plain = build("llama")
    enable_checkpointing(plain, gradient_checkpointing_kwargs={"use_reentrant": True})
    plain.enable_input_require_grads()
    train_beside(plain, sharded(plain), language_step)


def tied_weights_in_two_units() -> None:
    """Embedding and head are one tensor, in two units."""
    model = build("llama tied")
    for part in (model.model.embed_tokens, model.lm_head, *model.model.layers, model):
        fully_shard(part)
    train_beside(build("llama tied"), model, language_step)


def tied_again() -> None:
    """`tie_weights` after sharding changes nothing where the weights are tied."""
    plain = build("llama tied")
    model = sharded(plain)
    model.tie_weights()
    train_beside(plain, model, language_step)


def two_forwards() -> None:
    def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
        return language_step(model, rank, step) + 2 * language_step(model, rank, step + 10)

    plain = build("llama tied")
    train_beside(plain, sharded(plain), loss_of)


def between_evaluations() -> None:
    def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(input_ids=tokens(rank, step, 5))
        model.train()
        return language_step(model, rank, step)

    plain = build("gpt2")
    train_beside(plain, sharded(plain), loss_of)


def partly_frozen() -> None:
    """The first block every other step, and the last norm in between; AdamW with all parameters throughout."""

    def freeze(model: Any, step: int) -> None:
        model.model.layers[0].requires_grad_(step % 2 == 0)
        model.model.norm.requires_grad_(step % 2 == 1)

    plain = build("llama")
    train_beside(plain, sharded(plain), language_step, partial(torch.optim.AdamW, lr=0.01), before=freeze, steps=5)


def kept_gathered() -> None:
    plain = build("mixtral")
    train_beside(plain, sharded(plain, reshard_after_forward=False), language_step)


def flat_parameters() -> None:
    plain = build("llama tied")
    train_beside(plain, sharded(plain, flatten_parameters=True), language_step, gradients=False)


def buffers_in_fp32() -> None:
    """Rotary frequencies, in a model that computes in bf16."""
    plain = build("llama")
    model = sharded(plain, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append((args[0].dtype, module.mlp.up_proj.weight.dtype))
    )
    language_step(model, 0, 0).backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    buffers = dict(model.named_buffers())
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in plain.named_buffers())
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


def initialized_on_meta(name: str) -> None:
    """The model is never whole: each unit is initialized by itself."""
    torch.manual_seed(group_of().rank)
    with torch.device("meta"):
        model = MODELS[name]()
    model.train()
    fully_shard_modules(model, no_split_policy(model), options=ShardOptions(init=model._init_weights))
    plain = build_plain(name)
    plain.load_state_dict(model.state_dict())
    buffers = dict(plain.named_buffers())
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers())
    train_beside(plain, model, language_step, steps=2)


CASES: dict[str, Callable[[], None]] = {
    **{name: partial(trains, name) for name in MODELS},
    **{f"{name} checkpointed before sharding": partial(checkpointed_before, name) for name in ("gpt2", "t5")},
    **{
        f"{name} checkpointed after sharding": partial(checkpointed_after, name)
        for name in ("llama tied", "t5", "mixtral")
    },
    **{
        f"{name} initialized on meta": partial(initialized_on_meta, name)
        for name in ("gpt2", "llama", "llama tied", "t5", "mixtral")
    },
    **{
        case.__name__: case
        for case in (
            *(checkpointed_reentrantly, tied_weights_in_two_units, tied_again, two_forwards, between_evaluations),
            *(partly_frozen, kept_gathered, flat_parameters, buffers_in_fp32),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.ranks(2, in_turn=True)
def test_it_trains_as_on_one_process(name: str) -> None:
    CASES[name]()


@pytest.mark.parametrize("name", ["t5", "mixtral"])
@pytest.mark.ranks(3, in_turn=True)
def test_it_trains_so_on_three_ranks(name: str) -> None:
    trains(name)


@pytest.mark.parametrize("name", ["t5", "mixtral", "t5 checkpointed after sharding", "tied_weights_in_two_units"])
def test_it_trains_so_in_a_world_of_one(name: str) -> None:
    CASES[name]()


def test_some_expert_is_unused_in_some_step() -> None:
    """So that the case of Mixtral shows what it is there for."""
    plain = build("mixtral")
    chosen = []
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output))
    plain(input_ids=tokens(0, 0))
    used = [set(output[-1].flatten().tolist()) for output in chosen]
    assert len(used) == 2 and min(map(len, used)) < 4, f"{used} of {LENGTH} tokens"


def test_a_model_that_hides_its_initialization_is_refused() -> None:
    with torch.device("meta"):
        model = MODELS["llama"]()
    with pytest.raises(
        ValueError, match=r"'model.layers.0.input_layernorm.weight' is on the meta device.*ShardOptions\(init="
    ):
        fully_shard_modules(model, no_split_policy(model))
