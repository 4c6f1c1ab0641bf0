"""Recording leaves a training as it is, to the bit."""

from __future__ import annotations

import pytest
import torch
from check_models import TiedModel, adamw, batches, ddp, fsdp2, fsdp2_in_one_unit, mlp, tokens
from torch import Tensor, nn

from scale_check.harness import mean_square_step
from scale_check.recording import Phase, Recorder, full_value, plain_name

WRAPPERS = {"none": None, "ddp": ddp, "fsdp2": fsdp2, "tied": fsdp2_in_one_unit}


def train(kind: str, recorded: bool) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    model: nn.Module = TiedModel() if kind == "tied" else mlp()
    wrap = WRAPPERS[kind]
    model = model if wrap is None else wrap(model)
    optimizer = adamw(model.parameters())
    recorder = Recorder()
    given = tokens() if kind == "tied" else batches(6)
    if recorded:
        with recorder.hooks():
            for batch in given:
                mean_square_step(model, optimizer, batch)
    else:
        for batch in given:
            mean_square_step(model, optimizer, batch)
    weights = {plain_name(name): full_value(param) for name, param in model.named_parameters()}
    return weights, len(recorder.recording.keys_of(Phase.OUTPUT))


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks, kinds", [(0, ["none"]), (2, ["ddp", "fsdp2", "tied"])])
def test_a_training_that_is_recorded_is_the_same_to_the_bit(num_ranks: int, kinds: list[str]) -> None:
    for kind in kinds:
        (plain, _), (recorded, num_outputs) = train(kind, recorded=False), train(kind, recorded=True)
        assert num_outputs >= 3 * 5  # of each step and module
        assert plain.keys() == recorded.keys()
        assert all(torch.equal(weight, recorded[name]) for name, weight in plain.items())


def test_the_hooks_go_with_their_context() -> None:
    model, recorder = mlp(), Recorder()
    with recorder.hooks():
        pass
    model(batches(6)[0])
    assert not recorder.recording.tensors
