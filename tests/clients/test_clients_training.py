"""Models of transformers, sharded by the blocks that they name themselves, train as on one process.

Bitwise, in fp32 with SGD. T5's decoder blocks, alone among these, use one of their inputs several times: what the
encoder has returned. Its gradients are added up inside of each unit first and then across units, and addition rounds.
So the plain T5 has an alias of each input of a block, which makes the same sums; and it equals the one without aliases
to 2e-6 (some 16 units in the last place of 1.0 after three steps; found: 6e-8). In bf16, SGD rounds elements that its
vector instructions take together, and the rest of a tensor, differently, and a shard ends elsewhere: there the first
step's gradients are equal to the bit, and the weights after it to the last place.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from client_models import (
    LENGTH,
    MODELS,
    STEPS,
    build,
    build_plain,
    language_step,
    reference_gradients,
    sgd,
    sharded,
    tokens,
    train_beside,
)
from torch import Tensor

from scale_core.comm.group import group_of
from scale_core.testing import run_ranks

TOLERANCE = 2e-6
IN_OTHER_WORLDS = ["t5", "mixtral"]


def trained_without_aliases(name: str) -> Mapping[str, Tensor]:
    plain = build(name)
    optimizer = sgd(plain.parameters())
    for number in range(STEPS):
        reference_gradients(plain, group_of(), language_step, number)
        optimizer.step()
    return plain.state_dict()


def trains(name: str) -> list[str]:
    plain = build_plain(name)
    model = sharded(plain)
    if name == "t5 in two dtypes":
        return train_beside(plain, model, steps=1, last_place_of_bf16=True)
    wrong = train_beside(plain, model)
    if not name.startswith("t5"):
        return wrong
    expected = trained_without_aliases(name)
    for key, weight in model.state_dict().items():
        distance = (weight - expected[key]).abs().max().item()
        if distance > TOLERANCE:
            wrong.append(f"{key}: {distance} from the model without aliases")
    return wrong


def play(names: list[str]) -> dict[str, list[str]]:
    """What is wrong with each model on this rank; ranks start once for all, since importing takes seconds."""
    return {name: trains(name) for name in names}


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(play, 2, list(MODELS))


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_on_one_process(name: str, of_two_ranks: list[dict[str, list[str]]]) -> None:
    assert [wrong[name] for wrong in of_two_ranks] == [[], []]


def test_it_trains_so_on_three_ranks() -> None:
    assert run_ranks(play, 3, IN_OTHER_WORLDS) == [{name: [] for name in IN_OTHER_WORLDS}] * 3


@pytest.mark.parametrize("name", IN_OTHER_WORLDS)
def test_it_trains_so_in_a_world_of_one(name: str) -> None:
    assert trains(name) == []


def test_some_expert_is_unused_in_some_step() -> None:
    """So that the case of Mixtral shows what it is there for."""
    plain = build("mixtral")
    chosen = []
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output))
    plain(input_ids=tokens(0, 0))
    used = [set(output[-1].flatten().tolist()) for output in chosen]
    assert len(used) == 2 and min(map(len, used)) < 4, f"{used} of {LENGTH} tokens"
