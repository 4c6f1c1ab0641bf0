"""What the command line says of activations, and that no bit of loss and gradients depends on it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from scale_checkpoint import BudgetError
from scale_checkpoint.live_memory import LiveMemory
from scale_core import ParallelDims
from scale_core.comm.group import Group
from scale_train.cli import parse
from scale_train.configuration.derived import budget_bytes
from scale_train.configuration.resolve import check_options
from scale_train.errors import InputError
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.options import DataOptions, ModelOptions, Options, ParallelOptions
from scale_train.training.parallel import activations
from scale_train.training.parallel.activations import checkpoint_blocks, plan_blocks

CHOICES = ("none", "all", "selective")


def test_no_bit_of_loss_and_gradients_changes_and_less_is_kept() -> None:
    torch.manual_seed(0)
    plain = GPT(ModelConfig(layers=2, width=32, heads=2, dropout=0.1))
    tokens = torch.randint(256, (8, 65))
    kept = {}
    for choice in CHOICES:
        for offload in (False, True):
            model = copy.deepcopy(plain)
            checkpoint_blocks(model, choice, offload=offload)
            torch.manual_seed(1)
            with LiveMemory(torch.device("cpu")) as live:
                loss = model(tokens[:, :-1], tokens[:, 1:])
                kept[choice, offload] = live.current_bytes
            live.close()
            loss.backward()
            found = [loss.detach(), *(param.grad for param in model.parameters())]
            if (choice, offload) == ("none", False):
                expected = found
            assert all(map(torch.equal, found, expected)), (choice, offload)
    assert kept["all", False] < kept["selective", False] < kept["none", False]
    assert all(kept[choice, True] < kept[choice, False] for choice in CHOICES)


@pytest.mark.parametrize(
    ("said", "choice"),
    [
        ([], "none"),
        (["--checkpoint-activations"], "all"),
        (["--checkpoint-activations", "--steps", "3"], "all"),
        (["--checkpoint-activations", "selective", "--steps", "3"], "selective"),
    ],
)
def test_the_flag_alone_says_all(said: list[str], choice: str) -> None:
    options = parse(["lm", *said])
    assert options.parallel.checkpoint_activations == choice and not options.parallel.offload_activations
    assert parse(["lm", *said, "--offload-activations"]).parallel.offload_activations


def asked(choice: str, parallel: Any = "none", *, offload: bool = False) -> Options:
    spread = ParallelOptions(ranks=1, parallel=parallel, checkpoint_activations=choice, offload_activations=offload)
    return Options(DataOptions(batch=4, sequence=16), ModelOptions(layers=2, width=16, heads=2), spread)


def test_a_budget_is_planned_on_the_model_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner itself, which measures for seconds, is tested where it is."""
    model = GPT(ModelConfig(layers=2, width=16, heads=2))
    num_parameters = sum(param.numel() for param in model.parameters())
    asked_for: list[Any] = []
    dims = ParallelDims(world_size=1)

    def plan(*args: Any, other_bytes: int, process_group: Group) -> str:
        assert process_group.size == 1
        asked_for.append((args, other_bytes))
        if args[2] < 100:
            raise BudgetError("a step takes at least 3 MiB", 3 << 20)
        return "the plan"

    monkeypatch.setattr(activations, "plan_memory", plan)
    monkeypatch.setattr(activations, "apply_plan", lambda *args: asked_for.append(args))
    plan_blocks(model, asked("all"), dims, Group())
    assert asked_for == []
    plan_blocks(model, asked("budget:1KiB"), dims, Group())
    ((planned, sample, budget), beside), applied = asked_for
    assert planned is model and budget == 1024 and beside == 8 * num_parameters and applied == (model, "the plan")
    assert [tuple(tensor.shape) for tensor in sample] == [(4, 16), (4, 16)]
    with pytest.raises(InputError, match=r"budget:10B: .* write --checkpoint-activations budget:3145728B"):
        plan_blocks(model, asked("budget:10B"), dims, Group())
    checkpoint_blocks(model, "budget:1KiB", offload=False)
    assert not any("forward" in vars(block) for block in model.blocks), "that is the plan's"


def test_budgets_are_read() -> None:
    assert [budget_bytes(f"budget:{size}") for size in ("2GiB", "1.5MB", "7B")] == [2 << 30, 1_500_000, 7]
    assert budget_bytes("all") is None is budget_bytes("budget:much")
    check_options(asked("budget:2GiB"), 1)
