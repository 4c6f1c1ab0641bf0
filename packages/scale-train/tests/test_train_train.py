"""A training from its options to its report."""

from __future__ import annotations

import errno
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lm_trainings import options_for
from rank_values import by_rank

from scale_core.comm.group import group_of
from scale_core.errors import ScaleDistributedError
from scale_core.testing import run_ranks
from scale_train.data.tokenizer import ByteTokenizer
from scale_train.errors import InputError, RanksLost
from scale_train.training import train as run
from scale_train.training.state import TrainState
from scale_train.training.train import RunSummary, train_language_model


def run_here(folder: Path, text: Path, parallel: str = "fsdp", **more: Any) -> RunSummary:
    run = {"out": folder, "log_format": "plain", "log_every": 10, "sample_length": 4, "prompt": "the"}
    return train_language_model(options_for(text, parallel, batch=4, steps=2, warmup=1, **run, **more), group_of())


def run_in_part(folder: Path, text: Path) -> list[RunSummary]:
    # A fused kernel rounds an element by where it lies in its tensor, and a norm of shards adds in another order.
    exact: dict[str, Any] = {"optimizer_kernel": "plain", "clip": 0.0}
    return [run_here(folder / parallel, text, parallel, **exact) for parallel in ("sharded-ddp", "oss")]


@pytest.fixture
def text(sentences: Path) -> Path:
    return sentences


def test_all_ranks_report_the_same_and_hold_half_of_ddp(text, tmp_path, capsys):
    first, second = run_ranks(run_here, 2, tmp_path / "run", text)
    assert (first.sample, first.held_out_bits_per_byte) == (second.sample, second.held_out_bits_per_byte)
    assert first.held_memory_bytes == second.held_memory_bytes
    assert sum(first.held_memory_bytes) == pytest.approx(first.ddp_memory_bytes, rel=0.02)
    assert first.sample.startswith("the") and Path(first.checkpoint).is_dir() and Path(first.plot).is_file()
    out = capsys.readouterr().out
    assert out.count("fsdp on 2 ranks (cpu)") == 1 and out.count("held-out loss") == 1


def test_partial_sharding_is_reported_as_what_ranks_hold(text, tmp_path, capsys):
    for in_part, state_alone in run_ranks(run_in_part, 2, tmp_path, text):
        needed = in_part.ddp_memory_bytes  # parameters 1, gradients 1 and Adam 2 quarters of it
        assert needed == state_alone.ddp_memory_bytes
        assert in_part.held_memory_bytes == pytest.approx([needed * 5 / 8] * 2, rel=0.02)
        assert state_alone.held_memory_bytes == pytest.approx([needed * 6 / 8] * 2, rel=0.02)
        assert in_part.held_out_bits_per_byte == state_alone.held_out_bits_per_byte
    assert "sharded-ddp on 2 ranks (cpu)" in capsys.readouterr().out


def test_one_process_and_two_shards_judge_text_alike(text, tmp_path, capsys):
    alone = run_here(tmp_path / "alone", text, "none")
    together = run_ranks(run_here, 2, tmp_path / "together", text)[0]
    assert together.held_out_bits_per_byte == pytest.approx(alone.held_out_bits_per_byte, rel=1e-4)
    assert "none on 1 rank (cpu)" in capsys.readouterr().out


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def begin_on_a_full_disk(folder: Path, text: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError) as caught:
        patch.setattr(run, "begin_metrics", full_disk)
        run_here(folder, text)
    return str(caught.value)


@pytest.mark.fault(43)
def test_a_disk_that_is_full_at_the_start_is_told_to_all_ranks(text, tmp_path):
    message = f"cannot write into {tmp_path / 'run'}: the disk is full"
    assert run_ranks(begin_on_a_full_disk, 2, tmp_path / "run", text) == [message] * 2


def test_a_picture_that_cannot_be_drawn_costs_one_note(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "plot_loss", full_disk)
    report = run_here(tmp_path / "run", text, "none")
    assert report.plot == ""
    out = capsys.readouterr().out
    assert out.count(f"cannot write {tmp_path / 'run' / 'loss.png'}: the disk is full") == 1 and "plot  " not in out


def test_a_run_that_loses_the_others_names_how_to_resume(text, tmp_path, monkeypatch):
    def lose(training: TrainState, save: object) -> float:
        training.step, training.checkpoint = 7, Path("runs/a/checkpoints/step-00000004")
        raise ScaleDistributedError("rank 1 is gone\nmore", step=7, unit="")

    monkeypatch.setattr(run, "train", lose)
    message = r"^lost the other ranks after step 7 \(rank 1 is gone\); go on with --resume runs/a, from step-00000004$"
    with pytest.raises(RanksLost, match=message):
        run_here(tmp_path / "run", text, "none")


def read_another_text_on_rank_1(folder: Path, text: Path) -> str:
    if group_of().rank == 1:
        text = text.with_name("other")
        text.write_bytes(b"0123456789" * 200)
    try:
        run_here(folder, text)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_read_all_ranks_say(text, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(InputError) as caught:
        run_here(folder, text if group_of().rank == 0 else text.with_name("nowhere"))
    first, second = by_rank(str(caught.value))
    assert first == second and "nowhere: no such file or folder" in first


def test_ranks_that_read_different_texts_are_named(text, tmp_path):
    for message in run_ranks(read_another_text_on_rank_1, 2, tmp_path / "run", text):
        assert "rank 1 reads another text than rank 0" in message


def report(**changes) -> RunSummary:
    facts = {
        "steps": 400,
        "held_out_bits_per_byte": 2.34567,
        "parallel": "fsdp",
        "held_memory_bytes": (6_600_000, 6_500_000),
        "ddp_memory_bytes": 13_200_000,
        "peak_memory_bytes": (400_000_000, 410_000_000),
        "device": "cpu",
        "sample": "def f():\n    pass",
        "checkpoint": "run/checkpoints/step-00000400",
        "plot": "run/loss.png",
    }
    return RunSummary(**{**facts, **changes})


def test_the_report_shows_loss_memory_and_a_sample():
    shown = "\n".join(report().lines())
    for words in (
        "2.346 bits per byte",
        "6.6 MB",
        "6.5 MB",
        "13.2 MB",
        "410 MB",
        "| def f():",
        "step-00000400",
        "loss.png",
    ):
        assert words in shown


def test_without_a_sample_nothing_is_said_of_one():
    assert not any("sample" in line for line in report(sample="").lines())


def test_machines_get_the_same_facts():
    assert asdict(report())["held_memory_bytes"] == (6_600_000, 6_500_000)


def test_generated_bytes_never_move_the_terminal():
    assert ByteTokenizer().decode(b"\0a\n\tb\x1b[2Jc\xff\r") == "a\n\tb\ufffd[2Jc\ufffd\ufffd"
