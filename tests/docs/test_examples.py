"""The programs of docs/examples print on several ranks what they print on one.

`nox -s examples` runs all of them; the default run takes three, in one start of the ranks.
"""

from __future__ import annotations

import copy
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import scale_tp
from scale_core.testing import preload, run_ranks

HOUSE = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (HOUSE / "docs/examples").glob("*.py"))
BY_DEFAULT = ["fsdp_tp_checkpoint", "oss_adascale", "pipe_fsdp"]
DEPENDS_ON_RANKS = "local_sgd"  # beside one process that plays all ranks

preload("scale_moe", "scale_tp", "scale_pipe", "scale_fsdp", "scale_oss", "scale_adascale", "scale_checkpoint")


def run_examples(names: Sequence[str]) -> dict[str, list[float]]:
    results = {}
    for name in names:
        results[name] = runpy.run_path(str(HOUSE / "docs/examples" / f"{name}.py"))["main"]()
        scale_tp.destroy_model_parallel()
    return results


def train_diloco_on_one_process(world: int) -> list[float]:
    """What docs/examples/local_sgd.py does on so many ranks, by the formula of the paper."""
    batch_of = runpy.run_path(str(HOUSE / "docs/examples/local_sgd.py"))["batch_of"]
    torch.manual_seed(0)
    center = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    workers = [copy.deepcopy(center) for _ in range(world)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=0.003) for worker in workers]
    velocities = [torch.zeros_like(param) for param in center.parameters()]
    losses = []
    for step in range(24):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            inputs, targets = batch_of(step, rank, world)
            nn.functional.mse_loss(worker(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 4 == 3:
            with torch.no_grad():
                for param, velocity, *theirs in zip(
                    center.parameters(), velocities, *(worker.parameters() for worker in workers), strict=True
                ):
                    difference = param - sum(theirs) / world
                    velocity.mul_(0.5).add_(difference)
                    param.sub_(0.7 * (difference + 0.5 * velocity))
                    for each in theirs:
                        each.copy_(param)
                inputs, targets = batch_of(1000)
                losses.append(float(nn.functional.mse_loss(center(inputs), targets)))
    return losses


@pytest.mark.parametrize("names", [BY_DEFAULT, pytest.param(EXAMPLES, marks=pytest.mark.soak)], ids=["three", "all"])
def test_examples_print_on_four_ranks_what_they_print_on_one(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (alone,) = run_ranks(run_examples, 1, names)
    if DEPENDS_ON_RANKS in names:
        assert alone[DEPENDS_ON_RANKS] == pytest.approx(train_diloco_on_one_process(1), rel=1e-4)
        alone[DEPENDS_ON_RANKS] = train_diloco_on_one_process(4)
    for results in run_ranks(run_examples, 4, names):
        for name, numbers in results.items():
            assert numbers == pytest.approx(alone[name], rel=1e-4), name
    for name, numbers in alone.items():
        if "adascale" in name:
            assert all(1 <= gain <= 4 for gain in numbers) and sum(numbers) >= 10
        else:
            assert numbers[-1] < numbers[0], f"{name} learns"


def test_there_is_an_example_of_each_technique_and_each_is_short() -> None:
    techniques = {"fsdp", "oss", "sharded_ddp", "pipe", "tensor_parallel", "adascale", "checkpoint", "moe"}
    assert techniques | {"context_parallel", "local_sgd"} <= set(EXAMPLES)
    page = (HOUSE / "docs/tutorials/index.md").read_text(encoding="utf-8")
    for name in EXAMPLES:
        path = HOUSE / "docs/examples" / f"{name}.py"
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 80, path
        assert f'--8<-- "docs/examples/{name}.py"' in page


@pytest.mark.soak
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_by_the_command_that_it_says(name: str) -> None:
    text = (HOUSE / "docs/examples" / f"{name}.py").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (torchrun --nproc-per-node (?:2|4) docs/examples/\w+\.py)$", text, re.MULTILINE)
    commands = [["-m", "torch.distributed.run", *command.split()[1:]]]
    if f"`python docs/examples/{name}.py`" in text:
        commands.append([f"docs/examples/{name}.py"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = []
    for arguments in commands:
        process = [sys.executable, *arguments]
        ended = subprocess.run(process, cwd=HOUSE, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout.splitlines())
    assert len(printed[0]) >= 3
    if name != DEPENDS_ON_RANKS:
        assert printed[0] == printed[-1]
