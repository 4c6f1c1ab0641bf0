import io
import json

import pytest
from rich.console import Console

from scale_train.progress import (
    Bar,
    EvaluationRecord,
    Json,
    Metrics,
    Plain,
    Several,
    Silent,
    StepRecord,
    TensorBoard,
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
    Plain().step(record())
    assert capsys.readouterr().out == "step 10/400  loss 1.250  12,346 tokens/s  peak 450 MB/rank  1:23 left\n"


def test_every_json_line_is_one_object_with_an_event(capsys):
    reporter = Json()
    reporter.note("hello")
    reporter.step(record())
    reporter.evaluation(EvaluationRecord(10, 2.5))
    reporter.end(["for people"], {"steps": 10})
    note, step, evaluation, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert note == {"event": "note", "text": "hello"}
    assert (step["event"], step["loss"], step["peak_memory_bytes"]) == ("step", 1.25, [400_000_000, 450_000_000])
    assert evaluation == {"event": "evaluation", "step": 10, "held_out_bits_per_byte": 2.5}
    assert end == {"event": "end", "steps": 10}


def test_the_bar_shows_the_numbers_of_the_last_step_and_lets_notes_scroll_by():
    screen = io.StringIO()
    bar = Bar(400, 0, Console(file=screen, force_terminal=True, width=120))
    bar.advance(10)
    bar.step(record())
    bar.note("text with [brackets]")
    bar.evaluation(EvaluationRecord(10, 2.5))
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


def test_metrics_are_kept_and_cut_back_to_where_a_run_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path, 0)
    for step in (10, 20, 30):
        first.step(record(step))
    first.evaluation(EvaluationRecord(30, 2.5))
    Metrics(path, 20).step(record(25))
    assert [entry["step"] for entry in read_metrics(path)] == [10, 20, 25]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    assert read_metrics(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    "log_format, begins", [("auto", "step 10/400"), ("plain", "step 10/400"), ("json", '{"event"')]
)
def test_outside_a_terminal_lines_are_plain_unless_json_is_asked_for(tmp_path, capsys, monkeypatch, log_format, begins):
    monkeypatch.setattr(TensorBoard, "is_installed", staticmethod(lambda: False))
    make_reporter(log_format, 400, 0, tmp_path).step(record())
    assert capsys.readouterr().out.startswith(begins)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] == 1.25


def test_several_reporters_all_hear_everything():
    heard = []

    class Listener(Silent):
        def __getattribute__(self, name):
            return lambda *args: heard.append(name)

    several = Several(Listener(), Listener())
    several.note("a")
    several.advance(1)
    several.step(record())
    several.evaluation(EvaluationRecord(1, 1.0))
    several.end([], {})
    several.close()
    assert heard == [name for name in ("note", "advance", "step", "evaluation", "end", "close") for _ in range(2)]
