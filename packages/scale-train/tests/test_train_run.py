from pathlib import Path

import pytest

from scale_core.group import Group, group_of
from scale_core.testing import run_ranks
from scale_train.errors import InputError
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.report import Report
from scale_train.run import language_model


def options_for(folder: Path, text: Path, parallel: str) -> Options:
    return Options(
        data=DataOptions(text=(text,), sequence=16, batch=4),
        model=ModelOptions(layers=1, width=16, heads=2),
        parallel=ParallelOptions(parallel=parallel, device="cpu"),
        optimizer=OptimizerOptions(steps=2, warmup=1),
        run=RunOptions(out=folder, log_format="plain", sample_length=4, prompt="the"),
    )


def run_here(folder: Path, text: Path) -> Report:
    return language_model(options_for(folder, text, "fsdp"), group_of())


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    return path


def test_all_ranks_come_to_the_same_report_and_hold_half_of_what_ddp_needs(text, tmp_path, capsys):
    first, second = run_ranks(run_here, 2, tmp_path / "run", text)
    assert (first.sample, first.held_out_bits_per_byte) == (second.sample, second.held_out_bits_per_byte)
    assert first.held_memory_bytes == second.held_memory_bytes
    assert sum(first.held_memory_bytes) == pytest.approx(first.ddp_memory_bytes, rel=0.02)
    assert first.sample.startswith("the") and Path(first.checkpoint).is_dir() and Path(first.plot).is_file()
    out = capsys.readouterr().out
    assert out.count("fsdp on 2 ranks (cpu)") == 1 and out.count("held-out loss") == 1


def test_one_process_and_two_shards_judge_the_held_out_text_alike(text, tmp_path, capsys):
    alone = language_model(options_for(tmp_path / "alone", text, "none"), Group())
    together = run_ranks(run_here, 2, tmp_path / "together", text)[0]
    assert together.held_out_bits_per_byte == pytest.approx(alone.held_out_bits_per_byte, rel=1e-4)
    assert "none on 1 rank (cpu)" in capsys.readouterr().out


def read_another_text_on_rank_1(folder: Path, text: Path) -> str:
    if group_of().rank == 1:
        text = text.with_name("other")
        text.write_bytes(b"0123456789" * 200)
    try:
        run_here(folder, text)
    except InputError as error:
        return str(error)
    return ""


def test_ranks_that_read_different_texts_are_named(text, tmp_path):
    for message in run_ranks(read_another_text_on_rank_1, 2, tmp_path / "run", text):
        assert "rank 1 reads another text than rank 0" in message
