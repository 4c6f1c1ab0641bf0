import importlib.util
import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from scale_core.comm.group import Group
from scale_train.configuration.checks import option_problems
from scale_train.errors import InputError
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.training.reports.reporters import (
    EvaluationRecord,
    JsonReporter,
    MetricsReporter,
    MultiReporter,
    PlainReporter,
    ProgressBarReporter,
    Reporter,
    StepRecord,
    begin_metrics,
    make_reporter,
    read_metrics,
)
from scale_train.training.train import train_language_model


def record(step: int = 10) -> StepRecord:
    return StepRecord(
        step=step,
        steps=400,
        loss=1.25,
        learning_rate=1e-3,
        gradient_norm=0.5,
        tokens_per_second=12_345.6,
        peak_memory_bytes=(400_000_000, 450_000_000),
        seconds_left=83.2,
    )


def test_a_plain_line_holds_step_loss_speed_peak_and_time_left(capsys):
    PlainReporter().step(record())
    assert capsys.readouterr().out == "step 10/400  loss 1.250  12,346 tokens/s  peak 450 MB/rank  1:23 left\n"


@pytest.mark.parametrize(("high", "told"), [(None, "inf"), (110.4, "110")])
def test_a_plain_line_holds_the_interval_of_the_critical_batch(capsys, high, told):
    PlainReporter().step(replace(record(), critical_batch=80, noise_scale_low=50.2, noise_scale_high=high))
    assert f"  critical batch 80 (50 to {told})  " in capsys.readouterr().out


def test_every_json_line_is_one_object_with_an_event(capsys):
    reporter = JsonReporter()
    reporter.note("hello")
    reporter.step(record())
    reporter.evaluation(EvaluationRecord(10, 2.5, 1.7))
    reporter.end(["for people"], {"steps": 10})
    note, step, evaluation, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert note == {"event": "note", "text": "hello"}
    assert (step["event"], step["loss"], step["peak_memory_bytes"]) == ("step", 1.25, [400_000_000, 450_000_000])
    assert evaluation == {
        "event": "evaluation",
        "step": 10,
        "held_out_bits_per_byte": 2.5,
        "held_out_loss": 1.7,
    }
    assert end == {"event": "end", "steps": 10}


def test_the_bar_shows_the_last_step_and_lets_notes_scroll_by():
    screen = io.StringIO()
    bar = ProgressBarReporter(400, 0, Console(file=screen, force_terminal=True, width=120))
    bar.advance(10)
    bar.step(record())
    bar.note("text with [brackets]")
    bar.evaluation(EvaluationRecord(10, 2.5, 1.7))
    bar.end(["the end"], {})
    bar.close()
    shown = screen.getvalue()
    for words in (
        "10/400",
        "loss 1.250",
        "12,346 tokens/s",
        "1:23 left",
        "text with [brackets]",
        "2.500 bits",
        "the end",
    ):
        assert words in shown


def test_metrics_keep_steps_and_judgements(tmp_path):
    begin_metrics(tmp_path / "metrics.jsonl", 0)
    metrics = MetricsReporter(tmp_path / "metrics.jsonl", pytest.fail)
    metrics.step(record(10))
    metrics.evaluation(EvaluationRecord(10, 2.5, 1.7))
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["loss"]) == (10, 1.25)
    assert second == {"step": 10, "held_out_bits_per_byte": 2.5, "held_out_loss": 1.7}


@pytest.mark.parametrize(
    "log_format, begins", [("auto", "step 10/400"), ("plain", "step 10/400"), ("json", '{"event"')]
)
def test_outside_a_terminal_lines_are_plain_or_json(tmp_path, capsys, log_format, begins):
    begin_metrics(tmp_path / "metrics.jsonl", 0)
    make_reporter(Options(run=RunOptions(log_format=log_format)), 0, tmp_path).step(record())
    assert capsys.readouterr().out.startswith(begins)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] == 1.25


def test_several_reporters_all_hear_everything():
    heard = []

    class Listener(Reporter):
        def __getattribute__(self, name):
            return lambda *args: heard.append(name)

    several = MultiReporter(Listener(), Listener())
    several.note("a")
    several.advance(1)
    several.step(record())
    several.evaluation(EvaluationRecord(1, 1.0, 0.7))
    several.end([], {})
    several.close()
    assert heard == [name for name in ("note", "advance", "step", "evaluation", "end", "close") for _ in range(2)]


class FakeWandbRun:
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.summary: dict[str, object] = {}

    def init(self, **settings: object) -> "FakeWandbRun":
        self.calls.append(("init", settings))
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, scalars)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_weights_and_biases_gets_options_scalars_and_summary(tmp_path, monkeypatch):
    run = FakeWandbRun()
    monkeypatch.setitem(sys.modules, "wandb", run)
    begin_metrics(tmp_path / "metrics.jsonl", 0)
    reporter = make_reporter(Options(run=RunOptions(log_to=("wandb",), log_format="plain")), 0, tmp_path)
    reporter.step(replace(record(), mfu=0.4))
    reporter.evaluation(EvaluationRecord(10, 2.5, 1.7))
    reporter.end([], {"steps": 10})
    reporter.close()
    (_, settings), (_, (step, scalars)), (_, (_, judged)), (last, _) = run.calls
    assert settings["name"] == tmp_path.name and settings["config"]["optimizer"]["steps"] == 400
    assert step == 10 and (scalars["loss"], scalars["mfu"]) == (1.25, 0.4) and "loss_scale" not in scalars
    assert judged == {"held_out_bits_per_byte": 2.5, "held_out_loss": 1.7}
    assert last == "finish" and run.summary == {"steps": 10}
    make_reporter(Options(run=RunOptions(log_to=("wandb",), log_format="plain")), 10, tmp_path)
    _, again = run.calls[-1]
    assert settings["id"] == again["id"] == (tmp_path / "wandb-run").read_text() and again["resume"] == "allow"


def test_a_logger_that_cannot_begin_is_wrong_input(tmp_path, monkeypatch):
    begun, closed = [], []

    class Writer:
        def __init__(self, folder, purge_step):
            begun.append((folder, purge_step))

        def close(self):
            closed.append("tensorboard")

    class NoKey(FakeWandbRun):
        def init(self, **settings):
            raise RuntimeError("api_key not configured\nrun wandb login")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", NoKey())
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: name in ("tensorboard", "wandb") or find_spec(name, *more)
    )
    (tmp_path / "text").write_bytes(b"some words " * 200)
    options = Options(
        DataOptions((tmp_path / "text",), sequence=8, batch=4), ModelOptions(layers=1, width=16, heads=2),
        ParallelOptions(parallel="none", device="cpu"), OptimizerOptions(steps=1),
        RunOptions(out=tmp_path / "run", log_to=("tensorboard", "wandb"), log_format="plain"),
    )  # fmt: skip
    with pytest.raises(InputError, match="--log-to wandb: cannot begin: RuntimeError: api_key not configured run"):
        train_language_model(options, Group())
    assert begun == [(tmp_path / "run" / "tensorboard", 1)] and closed == ["tensorboard"]


def test_a_missing_logger_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert option_problems(Options(run=RunOptions(log_to=("tensorboard", "wandb")))) == [
        "--log-to tensorboard: tensorboard is not installed: pip install tensorboard",
        "--log-to wandb: wandb is not installed: pip install wandb",
    ]


def test_the_utilization_stands_in_the_line_where_it_is_known(capsys):
    PlainReporter().step(replace(record(), mfu=0.4125))
    PlainReporter().step(record())
    with_it, without = capsys.readouterr().out.splitlines()
    assert "tokens/s  MFU 41.2%  peak" in with_it and "MFU" not in without
