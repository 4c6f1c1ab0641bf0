import errno
import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from scale_train.training.reports.reporters import (
    EvaluationRecord,
    MetricsReporter,
    StepRecord,
    begin_metrics,
    read_metrics,
)


def full(*_args: object, **_more: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def record(step: int) -> StepRecord:
    return StepRecord(step, 400, 1.25, 1e-3, None, 12_345.6, (400_000_000,), 83.2)


@pytest.fixture
def path(tmp_path) -> Path:
    """A file with the steps 10, 20, 30 and a judgement after 20."""
    path = tmp_path / "metrics.jsonl"
    entries = [{"step": 10}, {"step": 20}, {"step": 20, "held_out_bits_per_byte": 2.5}, {"step": 30}]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_run_that_resumes_cuts_off_what_it_will_do_again(path):
    begin_metrics(path, 20)
    MetricsReporter(path, pytest.fail).step(record(25))
    assert [entry["step"] for entry in read_metrics(path)] == [10, 20, 20, 25]


def test_lines_that_are_no_entries_are_told_and_left_out(path):
    kept = path.read_bytes()
    path.write_bytes(b"\xff\xfe\n7\n" + kept + b'{"step": "forty"}\n{"loss": 1.0}\n{"step": 40, "lo')
    assert [entry["step"] for entry in read_metrics(path)] == [10, 20, 20, 30]
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: left out 5 lines that are no entries"):
        begin_metrics(path, 30)
    assert path.read_bytes() == kept


def test_an_entry_that_is_there_is_not_written_again(path):
    file = MetricsReporter(path, pytest.fail)
    for _ in range(2):
        file.evaluation(EvaluationRecord(20, 2.5, 1.7))
        file.evaluation(EvaluationRecord(30, 2.4, 1.6))
    assert [entry["step"] for entry in read_metrics(path)] == [10, 20, 20, 30, 30]


@pytest.mark.parametrize("step_that_fails", ["write_text", "replace"])
def test_a_file_that_cannot_be_made_anew_stays_as_it_was(path, monkeypatch, step_that_fails):
    before = path.read_text()
    monkeypatch.setattr(Path if step_that_fails == "write_text" else os, step_that_fails, full)
    with pytest.raises(OSError, match="No space left"):
        begin_metrics(path, 10)
    assert path.read_text() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_disk_that_fills_up_is_one_note(path, monkeypatch):
    notes: list[str] = []
    file = MetricsReporter(path, notes.append)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        file.step(record(40))
        file.step(record(50))
    assert notes == [f"cannot write {path}: the disk is full; training goes on"]
    with path.open("a") as torn:
        torn.write('{"step": 5')
    file.step(record(60))
    file.step(record(70))
    assert [entry["step"] for entry in read_metrics(path)] == [10, 20, 20, 30, 60, 70]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    assert read_metrics(tmp_path / "nothing") == []
