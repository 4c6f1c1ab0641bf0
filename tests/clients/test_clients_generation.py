"""`generate` with its cache of keys and values: the same tokens as on one process, without ever holding the model."""

from __future__ import annotations

import pytest
import torch
from client_models import build, sharded, tokens
from torch import Tensor, nn

from scale_core.testing import run_ranks
from scale_fsdp import describe, register_fsdp_forward_method

NEW = 6
HOW = {"greedy": {}, "beams": {"num_beams": 2}, "sampled": {"do_sample": True, "top_k": 20}}


def generate(model: nn.Module, prompt: Tensor, how: str) -> Tensor:
    torch.manual_seed(3)  # The same draws on every rank, so that all of them make the same number of steps.
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "use_cache": True, **HOW[how]}
    with torch.no_grad():
        return model.generate(prompt, **arguments)


def generations(name: str, registers: bool) -> list[str]:
    """Between two steps of training; what differs from the plain model's tokens."""
    plain = build(name)
    model = sharded(plain)
    if registers:
        register_fsdp_forward_method(model, "generate")
    prompt, wrong = tokens(1), []
    for each in (model, plain):
        each.eval()
    for how in HOW:
        ours, theirs = generate(model, prompt, how), generate(plain, prompt, how)
        if ours.shape[1] != theirs.shape[1] or not torch.equal(ours, theirs):
            wrong.append(f"{name}, {how}: {ours.tolist()} instead of {theirs.tolist()}")
    model.train()
    model(input_ids=prompt, labels=prompt).loss.backward()
    wrong += [f"{name}: no gradient of {key} afterwards" for key, p in model.named_parameters() if p.grad is None]
    if describe(model).gathered_at_most == 0:
        wrong.append("nothing was sharded")
    return wrong


def all_generations() -> list[str]:
    cases = [("llama", False), ("gpt2", False), ("llama tied", True), ("gpt2", True), ("t5", True), ("mixtral", True)]
    return [line for name, registers in cases for line in generations(name, registers)]


def t5_by_itself() -> str:
    """Its `generate` runs the encoder past the model's forward."""
    model = sharded(build("t5").eval())
    with pytest.raises(RuntimeError, match="outside of the unit's forward") as caught:
        generate(model, tokens(1), "greedy")
    return str(caught.value)


@pytest.fixture(scope="module")
def of_two_ranks() -> list[tuple[list[str], str]]:
    return run_ranks(play, 2)


def play() -> tuple[list[str], str]:
    return all_generations(), t5_by_itself()


def test_the_tokens_are_those_of_one_process(of_two_ranks: list[tuple[list[str], str]]) -> None:
    assert not any(wrong for wrong, _ in of_two_ranks)


def test_a_generation_that_goes_past_the_forward_says_what_to_register(
    of_two_ranks: list[tuple[list[str], str]],
) -> None:
    for _, message in of_two_ranks:
        assert "a Embedding of the root unit was called outside of the unit's forward" in message
        assert "register_fsdp_forward_method(model, 'the method')" in message
