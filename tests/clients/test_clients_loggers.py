"""`--log-to tensorboard wandb` with the libraries themselves: what a run and the one that resumes it leave in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scale_train.cli import main
from scale_train.options import Options, RunOptions
from scale_train.training.reports.reporters import (
    EvaluationRecord,
    StepRecord,
    begin_metrics,
    make_reporter,
    read_metrics,
)

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

SMALL = "--layers 1 --width 16 --heads 2 --sequence 8 --batch 4 --log-every 1 --evaluate-every 2 --sample-length 0"


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)


def scalars_in(folder: Path) -> dict[str, dict[int, float]]:
    """Of each name the values by step, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder)).Reload()
    return {name: {each.step: each.value for each in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_a_run_and_what_resumes_it_are_one_in_both() -> None:
    words = ["lm", "--text", "text", *SMALL.split(), "--parallel", "none", "--device", "cpu"]
    words += ["--experts", "2", "--capacity-factor", "0.8", "--log-to", "tensorboard", "wandb"]
    assert main([*words, "--steps", "2", "--out", "run"]) == 0
    assert main([*words, "--steps", "4", "--resume", "run"]) == 0
    entries = read_metrics(Path("run/metrics.jsonl"))
    scalars = scalars_in(Path("run/tensorboard"))
    for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "expert_imbalance", "dropped_tokens"):
        expected = {entry["step"]: entry[name] for entry in entries if name in entry}
        assert list(expected) == [1, 2, 3, 4] and scalars[name] == pytest.approx(expected, rel=1e-6), name
    held_out = {entry["step"]: entry["held_out_loss"] for entry in entries if "held_out_loss" in entry}
    assert list(held_out) == [2, 4] and scalars["held_out_loss"] == pytest.approx(held_out, rel=1e-6)
    runs = sorted(Path("run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2 and {path.stem for path in runs} == {f"run-{Path('run/wandb-run').read_text()}"}


def test_weights_and_biases_has_the_numbers_and_the_summary(tmp_path: Path) -> None:
    begin_metrics(tmp_path / "metrics.jsonl", 0)
    reporter: Any = make_reporter(Options(run=RunOptions(log_to=("wandb",), log_format="plain")), 0, tmp_path)
    record = StepRecord(10, 400, 1.25, 1e-3, 0.5, 12_345.6, (400_000_000,), 83.2, mfu=0.4)
    reporter.step(record)
    reporter.evaluation(EvaluationRecord(10, 2.5, 1.7))
    reporter.step(replace(record, step=20))  # It keeps what comes of a step until there is another one.
    reporter.end([], {"steps": 10, "device": "cpu"})
    run = reporter._reporters[-1]._run
    summary = dict(run.summary)
    assert (summary["loss"], summary["mfu"], summary["held_out_loss"], summary["steps"]) == (1.25, 0.4, 1.7, 10)
    assert run.config["optimizer"]["steps"] == 400 and run.name == tmp_path.name
    reporter.close()
