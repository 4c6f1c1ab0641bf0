"""Ways to train models of transformers, as on one process: checkpointed, tied, partly frozen, between evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from client_models import (
    STEPS,
    build,
    build_plain,
    differing,
    language_step,
    reference_gradients,
    sgd,
    sharded,
    tokens,
    train_beside,
)
from torch import Tensor, nn

from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import MixedPrecisionPolicy, fully_shard


def checkpointing(model: nn.Module) -> None:
    """Turns on what newer versions call `activation_checkpointing_enable`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()


def trains_checkpointed(name: str, when: str) -> list[str]:
    plain = build_plain(name)
    if when == "before":
        checkpointing(plain)
    model = sharded(plain)
    if when == "after":
        checkpointing(model)
        checkpointing(plain)
    assert sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules()) > 0
    return train_beside(plain, model)


def trains_with_shared_embedding_apart() -> list[str]:
    """Embedding and head are one tensor, in two units."""
    plain = build("llama tied")
    model = build("llama tied")
    for part in (model.model.embed_tokens, model.lm_head, *model.model.layers, model):
        fully_shard(part)
    return train_beside(plain, model)


def trains_on_two_forwards() -> list[str]:
    def step(model: nn.Module, rank: int, number: int) -> Tensor:
        return language_step(model, rank, number) + 2 * language_step(model, rank, number + 10)

    plain = build("llama tied")
    return train_beside(plain, sharded(plain), step)


def trains_between_evaluations() -> list[str]:
    def step(model: nn.Module, rank: int, number: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(input_ids=tokens(rank, number, 5))
        model.train()
        return language_step(model, rank, number)

    plain = build("gpt2")
    return train_beside(plain, sharded(plain), step)


def trains_while_parts_are_frozen() -> list[str]:
    """The first block every other step, and the last norm in between; AdamW with all parameters throughout."""

    def freeze(model: nn.Module, number: int) -> None:
        model.model.layers[0].requires_grad_(number % 2 == 0)
        model.model.norm.requires_grad_(number % 2 == 1)

    plain = build("llama")
    model = sharded(plain)
    return train_beside(
        plain, model, before=freeze, make=lambda params: torch.optim.AdamW(params, lr=0.01), steps=STEPS + 2
    )


def trains_checkpointed_reentrantly() -> list[str]:
    plain = build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    plain.enable_input_require_grads()
    return train_beside(plain, sharded(plain))


def trains_gathered_or_flat() -> list[str]:
    """Kept gathered between forward and backward; and seen by the optimizer as one flat parameter per unit."""
    plain = build("mixtral")
    wrong = train_beside(plain, sharded(plain, reshard_after_forward=False))
    plain = build("llama tied")
    model = sharded(plain, flatten_parameters=True)
    optimizers = [sgd(each.parameters()) for each in (model, plain)]
    group = group_of()
    for number in range(STEPS):
        expected = reference_gradients(plain, group, language_step, number)[group.rank]
        loss = language_step(model, group.rank, number)
        loss.backward()
        wrong += [] if loss.item() == expected else [f"flat: loss {loss.item()!r} instead of {expected!r}"]
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.step()
            each.zero_grad()
    return wrong + differing(model.state_dict(), plain.state_dict())


def buffers_stay_fp32() -> list[str]:
    """Rotary frequencies, in a model that computes in bf16."""
    plain = build("llama")
    model = sharded(plain, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append((args[0].dtype, module.mlp.up_proj.weight.dtype))
    )
    language_step(model, 0, 0).backward()
    wrong = [] if seen == [(torch.bfloat16, torch.bfloat16)] else [f"computed in {seen}"]
    wrong += differing(dict(model.named_buffers()), dict(plain.named_buffers()))
    if model.model.rotary_emb.inv_freq.dtype is not torch.float32:
        wrong.append("the frequencies were cast")
    return wrong + [
        f"{name} in {p.grad.dtype}" for name, p in model.named_parameters() if p.grad.dtype != torch.float32
    ]


def ties_again() -> list[str]:
    """`tie_weights` after sharding changes nothing where the weights are tied."""
    plain = build("llama tied")
    model = sharded(plain)
    model.tie_weights()
    return train_beside(plain, model)


CHECKPOINTED = [("gpt2", "before"), ("llama tied", "after"), ("t5", "before"), ("t5", "after"), ("mixtral", "after")]
CASES: dict[str, Callable[[], list[str]]] = {
    **{
        f"{name} checkpointed {when} sharding": lambda name=name, when=when: trains_checkpointed(name, when)
        for name, when in CHECKPOINTED
    },
    "llama checkpointed reentrantly": trains_checkpointed_reentrantly,
    "gathered or flat": trains_gathered_or_flat,
    "tied weights in two units": trains_with_shared_embedding_apart,
    "two forwards": trains_on_two_forwards,
    "between evaluations": trains_between_evaluations,
    "partly frozen": trains_while_parts_are_frozen,
    "buffers": buffers_stay_fp32,
    "tied again": ties_again,
}


def play() -> dict[str, list[str]]:
    """What is wrong in each case on this rank; ranks start once for all, since importing takes seconds."""
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(play, 2)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_on_one_process(name: str, of_two_ranks: list[dict[str, list[str]]]) -> None:
    assert [wrong[name] for wrong in of_two_ranks] == [[], []]


@pytest.mark.parametrize("name", ["t5 checkpointed after sharding", "tied weights in two units"])
def test_it_trains_so_in_a_world_of_one(name: str) -> None:
    assert CASES[name]() == []
