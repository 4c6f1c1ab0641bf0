"""Modules that torch.compile has taken, inside of units: the same numbers, and one graph for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_cases import Net, batch, loss_of
from torch import nn

from scale_check.exact import assert_equal
from scale_fsdp import fully_shard

# The compiler asks each tensor that it meets for its gradient, and hides the warning, which an error is not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

SETTINGS = [("eager", False), ("aot_eager", True)]  # backend, reshard_after_forward
WAYS = ["wrapped", "in place, before", "in place, after", "around"]
STEPS = 3


def compiled(way: str, backend: str | Callable[..., Any], reshard: bool) -> nn.Module:
    """A small GPT whose units are its blocks: each compiled, or all of it."""
    torch.manual_seed(7)
    model = Net()
    for number, block in enumerate(model.blocks):
        if way == "wrapped":
            model.blocks[number] = torch.compile(block, backend=backend)
        elif way == "in place, before":
            block.compile(backend=backend)
        fully_shard(model.blocks[number], reshard_after_forward=reshard)
        if way == "in place, after":
            model.blocks[number].compile(backend=backend)
    fully_shard(model)
    return torch.compile(model, backend=backend) if way == "around" else model


def train(way: str, backend: str, reshard: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(7)
    plain, model = Net(), compiled(way, backend, reshard)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in (model, plain)]
    for step in range(STEPS):
        losses = []
        for each in (model, plain):
            loss = loss_of(each(batch("gpt", step)))  # The same batch on every rank: the mean is the plain gradient.
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1], f"step {step}: losses {losses}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(model.eval()(batch("gpt", 9)), plain.eval()(batch("gpt", 9))), "evaluation differs"
    ours = {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()}
    assert_equal(ours, plain)


@pytest.mark.ranks(2)
def test_compiled_blocks_train_as_plain_ones() -> None:
    for number, way in enumerate(WAYS):
        train(way, *SETTINGS[number % 2])


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
def test_compiled_blocks_train_as_plain_ones_in_each_setting(way: str) -> None:
    for backend, reshard in SETTINGS:
        train(way, backend, reshard)


@pytest.mark.parametrize("way", ["wrapped", "in place, before"])
@pytest.mark.ranks(2, in_turn=True)
def test_one_graph_serves_all_blocks_and_one_the_evaluation(way: str) -> None:
    """How many graphs there are after each of three steps, and after an evaluation."""
    torch._dynamo.reset()
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        found.append(graph)
        return graph.forward

    model, counts = compiled(way, backend, reshard=True), []
    for step in range(STEPS):
        loss_of(model(batch("gpt", step))).backward()
        counts.append(len(found))
    with torch.no_grad():
        model.eval()(batch("gpt", 9))
    assert [*counts, len(found)] == [1, 1, 1, 2]


@pytest.mark.parametrize("way", ["in place, before", "in place, after"])
def test_blocks_compiled_in_place_keep_their_names(way: str) -> None:
    model = compiled(way, "eager", reshard=True)
    assert list(model.state_dict()) == list(Net().state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.ranks(2)
def test_blocks_compiled_by_inductor_train_as_plain_ones() -> None:
    """Fused kernels add in another order: 1e-6 after three steps, for weights up to 1."""
    torch.manual_seed(7)
    plain, model = Net(), compiled("wrapped", "inductor", reshard=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in (model, plain)]
    for step in range(STEPS):
        for each in (model, plain):
            loss_of(each(batch("gpt", step))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = model.state_dict().values(), plain.state_dict().values()
    distance = max((mine - other).abs().max().item() for mine, other in zip(ours, theirs, strict=True))
    assert distance < 1e-6
