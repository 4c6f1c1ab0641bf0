import io
import json

import pytest
from rich.console import Console

from scale_train.training.reporters import (
    EvaluationRecord,
    JsonReporter,
    MetricsReporter,
    MultiReporter,
    PlainReporter,
    ProgressBarReporter,
    Reporter,
    StepRecord,
    TensorBoardReporter,
    begin_metrics,
    make_reporter,
    read_metrics,
)


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


def test_every_json_line_is_one_object_with_an_event(capsys):
    reporter = JsonReporter()
    reporter.note("hello")
    reporter.step(record())
    reporter.evaluation(EvaluationRecord(10, 2.5, 1.7))
    reporter.end(["for people"], {"steps": 10})
    note, step, evaluation, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert note == {"event": "note", "text": "hello"}
    assert (step["event"], step["loss"], step["peak_memory_bytes"]) == ("step", 1.25, [400_000_000, 450_000_000])
    assert evaluation == {"event": "evaluation", "step": 10, "held_out_bits_per_byte": 2.5}
    assert end == {"event": "end", "steps": 10}


def test_the_bar_shows_the_numbers_of_the_last_step_and_lets_notes_scroll_by():
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
def test_outside_a_terminal_lines_are_plain_unless_json_is_asked_for(tmp_path, capsys, monkeypatch, log_format, begins):
    monkeypatch.setattr(TensorBoardReporter, "is_installed", staticmethod(lambda: False))
    begin_metrics(tmp_path / "metrics.jsonl", 0)
    make_reporter(log_format, 400, 0, tmp_path).step(record())
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
