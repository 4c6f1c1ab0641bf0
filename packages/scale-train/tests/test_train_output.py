"""A training goes on where its standard output is closed, its reader has gone, or the disk of its log is full."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from program_folder import enter_program_folder

from scale_train.training.reports.output import Output
from scale_train.training.reports.reporters import read_metrics

STEPS = 6
OPTIONS = (
    "--text text --layers 1 --width 16 --heads 2 --sequence 16 --batch 4 --evaluate-every 0 --warmup 2 --log-every 1 "
    f"--sample-length 0 --device cpu --steps {STEPS} --out run"
)

IN_SOAK = pytest.param("--ranks 1", marks=pytest.mark.soak)  # Each case starts a program.


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    enter_program_folder(tmp_path, monkeypatch)


def ends_well(redirection: str, *arguments: str) -> str:
    """Trains with a shell's redirection of standard output; returns standard error."""
    program = " ".join([sys.executable, "-m", "scale_train", "lm", OPTIONS, *arguments])
    shell = ["bash", "-c", f"set -o pipefail; {program} {redirection}"]
    ended = subprocess.run(shell, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert [entry["step"] for entry in read_metrics(Path("run/metrics.jsonl")) if "loss" in entry] == [*range(1, 7)]
    return ended.stderr


@pytest.mark.fault(108)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [IN_SOAK, "--ranks 1 --log-format rich", "--ranks 2 --log-format json"])
def test_a_full_disk_behind_it_is_told_once(arguments):
    said = ends_well("> /dev/full", arguments)
    assert said.count("cannot write to standard output ([Errno 28] No space left on device); training goes on") == 1


@pytest.mark.fault(108)
def test_a_reader_that_has_gone_is_told_once():
    # The first line is read, and then nobody reads any more.
    said = ends_well("| (head -n 1 > first; exec <&-; cat < /dev/null)", "--ranks 1")
    assert said.count("cannot write to standard output ([Errno 32] Broken pipe); training goes on") == 1
    assert Path("first").read_text().startswith("text ")


@pytest.mark.fault(108)
@pytest.mark.parametrize("arguments", [IN_SOAK, "--ranks 1 --log-format json", "--ranks 2"])
def test_a_standard_output_that_is_closed_changes_nothing(arguments):
    assert "Traceback" not in ends_well(">&-", arguments)


def test_characters_that_the_encoding_lacks_are_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print("größer", file=Output(stream), flush=True)
    assert raw.getvalue() == b"gr\\xf6\\xdfer\n"


def test_what_is_left_at_the_end_does_not_fail_when_python_ends():
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    output = Output(stream)
    os.close(reading)
    output.write("lost")
    output.end()
    stream.close()  # As Python does.
