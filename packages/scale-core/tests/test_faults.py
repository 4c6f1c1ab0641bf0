"""faults.py and fault_points.py: a fault happens once, on its rank, in its step, at its point, and nowhere else."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scale_core import fault_points
from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import all_gather, all_reduce, broadcast, exchange, reduce_scatter
from scale_core.comm.group import group_of
from scale_core.testing import RankError, faults, run_ranks, scaled_by_load
from scale_snapshot import SnapshotError, snapshot

PACKAGES = Path(__file__).parents[2]


class Log:
    """Stands for an injector, and keeps what is reached."""

    def __init__(self) -> None:
        self.points: list[str] = []

    def __call__(self, point: str, detail: str) -> None:
        self.points.append(point)


def points_of_collectives(folder: str) -> list[str]:
    group, log = group_of(), Log()
    vector = torch.ones(2)
    fault_points.active = log
    all_gather(torch.empty(4), vector, group).wait()
    reduce_scatter(torch.ones(4), group).wait()
    all_reduce(vector, group).wait()
    broadcast(vector, group).wait()
    all_to_all(torch.empty(2), vector, group).wait()
    exchange([1], group)
    snapshot.save_snapshot(folder, 1, {"weight": vector})
    fault_points.active = None
    return log.points


def test_collectives_and_saving_pass_the_points_that_are_listed(tmp_path: Path) -> None:
    first, second = run_ranks(points_of_collectives, 2, str(tmp_path))
    collectives = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "exchange"]
    on_rank_0 = ["snapshot.room", "snapshot.tensor", "snapshot.written", "snapshot.manifest", "snapshot.renamed"]
    assert [point for point in first if point in collectives][:6] == collectives
    assert [point for point in first if point.startswith("snapshot.")] == on_rank_0
    assert [point for point in second if point.startswith("snapshot.")] == ["snapshot.written"]


def test_points_of_the_code_and_of_the_list_are_the_same() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGES.glob("*/src/**/*.py")]
    named = {name for text in sources for name in re.findall(r'(?:fault_points\.active|self)\("([\w.]+)", ', text)}
    stages = {f"snapshot.{name}" for text in sources for name in re.findall(r'at_stage\("(\w+)", ', text)}
    assert named - {"all_gather"} | stages == fault_points.POINTS.keys() - {"all_gather"}
    assert "all_gather" in named


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_fault_happens_once_at_its_step_and_occurrence() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = []
    with faults.inject(faults.raise_at("user.loss", step=2, occurrence=2)):
        for step in range(1, 4):
            for time_in_step in range(1, 4):
                try:
                    faults.reach("user.loss")
                except faults.InjectedError:
                    raised.append((step, time_in_step))
            one_step(model, optimizer)
    assert raised == [(2, 2)]
    faults.reach("user.loss")
    assert fault_points.active is None


def test_optimizers_around_others_are_one_step() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: None = None) -> None:  # type: ignore[override]  # It returns no loss.
            self.inner.step()

    model, log = nn.Linear(2, 2), []
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    with faults.inject(
        faults.raise_at("optimizer.step", step=2, detail="Around"), faults.raise_at("optimizer.stepped", step=3)
    ):
        for _ in range(4):
            before = model.weight.detach().clone()
            try:
                one_step(model, optimizer)
            except faults.InjectedError:
                log.append(torch.equal(before, model.weight))
    assert log == [True, False]  # before the update, and after it


def test_a_step_may_be_told_and_optimizers_are_not_counted_then() -> None:
    model = nn.Linear(2, 2)
    with faults.inject(faults.raise_at("user.here", step=7)):
        faults.begin_step(6)
        faults.reach("user.here")
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        faults.reach("user.here")
        faults.begin_step(7)
        with pytest.raises(faults.InjectedError, match="injected"):
            faults.reach("user.here")


def test_forward_and_backward_are_told_apart_and_details_chosen() -> None:
    reached = []

    class Reaches(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            reached.append("forward")
            faults.reach("user.here", "micro-batch 1")
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            reached.append("backward")
            faults.reach("user.here", "micro-batch 2")
            return grad

    fault = faults.raise_at("user.here", text="here", during="backward", detail="micro-batch 2")
    with faults.inject(fault), pytest.raises(faults.InjectedError, match=r"^here$"):
        Reaches.apply(torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert reached == ["forward", "backward"]


def test_a_full_disk_and_a_delay() -> None:
    with faults.inject(faults.enospc_at("user.write"), faults.delay_at("user.wait", seconds=0.05)):
        with pytest.raises(OSError, match="No space left") as raised:
            faults.reach("user.write")
        began = time.monotonic()
        faults.reach("user.wait")
        assert time.monotonic() - began >= 0.05
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: faults.kill_at("allgather"), r"no point 'allgather' in scale.*\"user\.\"; did you mean 'all_gather'"),
        (lambda: faults.kill_at("data", step=0), "count from 1, got step=0"),
        (lambda: faults.Fault("explode", "data"), "'kill', 'stop', 'raise', 'delay', 'enospc', got 'explode'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_happen_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_faults_are_drawn_alike_from_one_seed() -> None:
    candidates = [faults.kill_at("all_gather", during="backward"), faults.stop_at("data")]
    drawn = [[str(faults.draw(random.Random(seed), candidates, 4, range(5, 9))) for _ in range(2)] for seed in (3, 3)]
    assert drawn[0] == drawn[1]
    generator = random.Random(0)
    many = {faults.draw(generator, candidates, 4, range(5, 9)) for _ in range(200)}
    assert {fault.rank for fault in many} == {0, 1, 2, 3} and {fault.step for fault in many} == {5, 6, 7, 8}
    assert {fault.during for fault in many if fault.action == "kill"} == {"backward"}


def test_the_environment_carries_faults_into_other_programs() -> None:
    program = "from scale_core.testing import faults; faults.begin_step(3); faults.reach('user.x'); print('lives')"
    variables = {**faults.to_environment(faults.kill_at("user.x", rank=1, step=3)), "RANK": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL and run.stdout == ""
    assert "injected fault: kill at user.x #1, rank 1, step 3" in run.stderr


def test_other_ranks_and_restarted_generations_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, attempt, happens in (("0", "0", False), ("1", "1", False), ("1", "0", True)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        raised = False
        with faults.inject(faults.raise_at("user.x", rank=1)):
            try:
                faults.reach("user.x")
            except faults.InjectedError:
                raised = True
        assert raised == happens


def test_what_is_no_list_of_faults_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("kill rank 1", json.dumps([{"action": "kill", "where": "data"}])):
        monkeypatch.setenv("SCALE_FAULTS", text)
        monkeypatch.setattr(fault_points, "active", None)
        fault_points.read_environment()
        with pytest.raises(ValueError, match=r"^SCALE_FAULTS=.* is not a list of faults \(.*to_environment"):
            faults.reach("user.x")


def meet() -> int:
    all_reduce(torch.ones(1), group_of()).wait()
    return dist.get_rank()


def test_ranks_of_a_test_read_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in faults.to_environment(faults.kill_at("all_reduce", rank=1)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks(meet, 2)


def save_with_a_full_disk(folder: str) -> str:
    with faults.inject(faults.enospc_at("snapshot.tensor", rank=0)):
        try:
            snapshot.save_snapshot(folder, 1, {"weight": torch.ones(4)})
        except SnapshotError as error:
            return str(error)
    return ""


def test_a_full_disk_in_a_save_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(save_with_a_full_disk, 2, str(tmp_path))
    assert told[0] == told[1] and "failed on rank 0 of 2: OSError: [Errno 28] No space left on device" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_points_cost_a_comparison_while_no_fault_is_switched_on() -> None:
    def passed() -> None:
        if fault_points.active is not None:
            fault_points.active("all_gather", "")

    began = time.perf_counter()
    for _ in range(10_000):
        passed()
    assert (time.perf_counter() - began) / 10_000 < scaled_by_load(20e-6)
