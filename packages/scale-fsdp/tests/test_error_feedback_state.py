"""state_dict/error_feedback.py: a run goes on from a snapshot to the bit, or says that it does not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_cases import Net, batch
from torch import nn

import scale_snapshot
from scale_check.exact import assert_equal
from scale_core import ShardedGradScaler
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import CommunicationPolicy, ShardOptions, fully_shard
from scale_fsdp.state_dict.error_feedback import ErrorFeedbackState
from scale_fsdp.transports.blocks import BlockFormat

POLICY = CommunicationPolicy(reduce=BlockFormat("int4", 8), error_feedback=True)


class Training:
    """A sharded model, its optimizer, and a scaler whose scale changes."""

    def __init__(self, blocks: bool = True) -> None:
        torch.manual_seed(7)
        self.model = Net("gpt")
        for block in self.model.blocks if blocks else ():
            fully_shard(block, options=ShardOptions(communication=POLICY))
        fully_shard(self.model, options=ShardOptions(communication=POLICY))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = ShardedGradScaler(init_scale=64.0, growth_interval=2)

    def run(self, *steps: int) -> nn.Module:
        for step in steps:
            loss = self.model(batch("gpt", step, group_of().rank)).float().square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return self.model

    @property
    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "error_feedback": ErrorFeedbackState(self.model),
        }


@pytest.mark.ranks(2)
def test_a_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    """Saves after three steps; the run that goes on and the run that is resumed do three more."""
    first = Training()
    first.run(0, 1, 2)
    scale_snapshot.save(tmp_path, 3, first.objects)
    expected = copy.deepcopy(first.run(3, 4, 5).state_dict())
    second = Training()
    second.run(9)  # Its own errors are replaced.
    scale_snapshot.load(tmp_path, second.objects)
    assert_equal(second.run(3, 4, 5), expected, "resumed")
    third = Training()
    rest = {name: each for name, each in third.objects.items() if name != "error_feedback"}
    scale_snapshot.load(tmp_path, rest, only_given=True)
    with pytest.raises(AssertionError):  # Errors of zero make a difference.
        assert_equal(third.run(3, 4, 5), expected)


def save(folder: Path) -> None:
    """Saves after a step, and loads into other units."""
    first = Training()
    first.run(0)
    scale_snapshot.save(folder, 1, first.objects)
    with pytest.warns(
        UserWarning, match=r"error feedback of the gradients of 'blocks.0.*begins at zero: it was saved by"
    ):
        scale_snapshot.load(folder, Training(blocks=False).objects)


def test_in_other_units_or_on_other_ranks_errors_begin_at_zero(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    alone = Training()
    with pytest.warns(UserWarning, match=r"and 2 other buffers begins at zero: it was saved by other ranks") as caught:
        scale_snapshot.load(tmp_path, alone.objects)
    assert len(caught) == 1
    alone.run(3)


@pytest.mark.ranks(2)
def test_units_that_none_contains_have_errors_of_their_own() -> None:
    """Each layer's parameters have the names that they have in the layer."""
    made = []
    for factor in (1.0, 2.0):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in model:
            fully_shard(layer, options=ShardOptions(communication=POLICY))
        (factor * model(torch.randn(4, 8))).square().sum().backward()
        made.append(ErrorFeedbackState(model))
    first, second = (each.state_dict() for each in made)
    assert list(first) == ["0.0", "1.0"]
    names = [[name for name, *_ in each["of"][1]] for each in first.values()]
    assert names == [["0.weight"], ["1.weight"]]
    made[1].load_state_dict(first)
    errors = [each["errors"][0] for state in (first, made[1].state_dict()) for each in state.values()]
    assert not torch.equal(errors[0], errors[1])
    assert torch.equal(errors[0], errors[2]) and torch.equal(errors[1], errors[3])
    assert not torch.equal(errors[0], second["0.0"]["errors"][0])


def test_a_model_that_keeps_no_errors_has_none_to_save() -> None:
    model = fully_shard(nn.Linear(4, 4), options=ShardOptions(communication=CommunicationPolicy(reduce="int8")))
    with pytest.raises(ValueError, match=r"no unit of this .*Linear has error_feedback=True: leave it out"):
        ErrorFeedbackState(model)
