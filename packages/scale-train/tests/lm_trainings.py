"""Small trainings of `scale-train lm` in this process or on ranks, and what they report."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from scale_core.comm.group import Group, group_of
from scale_train.data.text import read_text
from scale_train.options import Options
from scale_train.training.reports.reporters import EvaluationRecord, Reporter, StepRecord
from scale_train.training.state import TrainState, build_state
from scale_train.training.trainer import train_step

SMALL: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "sequence": 16,
    "batch": 12,
    "device": "cpu",
    "steps": 6,
    "warmup": 2,
    "log_every": 1,
}


def options_for(text: Path, parallel: str = "none", **changes: Any) -> Options:
    """Options of a small model on the host; changes have the names of the command line, of whichever table."""
    return changed(Options(), **{"text": (text,), "parallel": parallel, **SMALL, **changes})


def changed(options: Options, **changes: Any) -> Options:
    """The options with some of them changed, by their names alone: no two tables have one."""
    tables = {}
    for table in fields(options):
        before = getattr(options, table.name)
        names = {field.name for field in fields(before)} & changes.keys()
        tables[table.name] = replace(before, **{name: changes.pop(name) for name in names})
    assert not changes, f"no such options: {sorted(changes)}"
    return Options(**tables)


class Records(Reporter):
    """All that a training reports, in its order."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.advanced: list[int] = []

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.steps]

    @property
    def norms(self) -> list[float | None]:
        return [record.gradient_norm for record in self.steps]

    @property
    def gains(self) -> list[float | None]:
        return [record.gain for record in self.steps]

    def loss_by_step(self) -> dict[int, float]:
        return {record.step: record.loss for record in self.steps}

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)

    def advance(self, step: int) -> None:
        self.advanced.append(step)


def start(options: Options, group: Group | None = None) -> TrainState:
    """A training that has not stepped, on the ranks of the default group or on one; its reporter is `Records`."""
    training = build_state(options, read_text(options.data.text), group_of() if group is None else group)
    training.reporter = Records()
    return training


def train_to(training: TrainState, step: int | None = None) -> Records:
    """Trains until a step, by default the last one; returns what was reported from here on."""
    training.reporter = records = Records()
    while training.step < (training.options.optimizer.steps if step is None else step) and not training.is_over:
        train_step(training)
    return records


def curves(*several: Options) -> list[Records]:
    """What several trainings report, one after the other; on any rank."""
    return [train_to(start(options)) for options in several]
