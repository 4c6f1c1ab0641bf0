"""`generate` with its cache of keys and values: the same tokens as on one process, without ever holding the model."""

from __future__ import annotations

import pytest
import torch
from client_models import build, sharded, tokens
from torch import Tensor, nn

from scale_fsdp import describe, register_fsdp_forward_method

NEW = 6
HOW = {"greedy": {}, "beams": {"num_beams": 2}, "sampled": {"do_sample": True, "top_k": 20}}


def generate(model: nn.Module, prompt: Tensor, how: str) -> Tensor:
    torch.manual_seed(3)  # The same draws on every rank, so that all of them make the same number of steps.
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "use_cache": True, **HOW[how]}
    with torch.no_grad():
        return model.generate(prompt, **arguments)


@pytest.mark.parametrize(
    "name, registers",
    [("llama", False), ("gpt2", False), ("llama tied", True), ("gpt2", True), ("t5", True), ("mixtral", True)],
)
@pytest.mark.ranks(2)
def test_the_tokens_are_those_of_one_process(name: str, registers: bool) -> None:
    plain = build(name)
    model = sharded(plain)
    if registers:
        register_fsdp_forward_method(model, "generate")
    prompt = tokens(1)
    for each in (model, plain):
        each.eval()
    for how in HOW:
        assert torch.equal(generate(model, prompt, how), generate(plain, prompt, how)), how
    model.train()
    model(input_ids=prompt, labels=prompt).loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    assert describe(model).gathered_at_most > 0


@pytest.mark.ranks(2)
def test_a_generation_past_the_forward_says_what_to_register() -> None:
    """T5's `generate` runs the encoder past the model's forward."""
    model = sharded(build("t5").eval())
    with pytest.raises(RuntimeError, match="a Embedding of the root unit was called outside of the unit's") as caught:
        generate(model, tokens(1), "greedy")
    assert "register_fsdp_forward_method(model, 'the method')" in str(caught.value)
