"""The recipe of 13 billion parameters in the guide: commands that are taken, and their loop on a small model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from scale_train.cli import main, parse
from scale_train.configuration.resolve import check_options
from scale_train.options import Options
from scale_train.training.reports.reporters import read_metrics

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "scale-train-tools.md"
SMALL = "--layers 2 --width 16 --heads 2 --sequence 16 --loss-chunk 8 --steps 3 --warmup 1 --log-every 1 --device cpu "
SMALL += "--batch 8 --sample-length 0 --evaluate-every 0 --log-format json"


def recipe() -> list[list[str]]:
    """The commands of the guide, as words."""
    section = (
        GUIDE.read_text(encoding="utf-8").partition("## The recipe of 13 billion parameters")[2].partition("\n## ")[0]
    )
    lines = section.replace("\\\n", " ").splitlines()
    return [shlex.split(line.partition("#")[0])[1:] for line in lines if line.startswith("scale-train lm ")]


def without(words: list[str], others: str) -> list[str]:
    """The words, but for options with a value that others give as well."""
    given = {index for index, word in enumerate(words) if word.startswith("--") and word in others.split()}
    return [word for index, word in enumerate(words) if not {index, index - 1} & given]


def test_each_command_is_one_that_the_program_takes() -> None:
    commands = recipe()
    assert len(commands) == 3
    for words in commands:
        options = parse(words)
        assert isinstance(options, Options) and options.model.size == "gpt3-13b"
        assert options.parallel.ranks is not None
        check_options(options, options.parallel.ranks)
    assert [("--cpu-offload" in words) for words in commands] == [True, True, False]


def test_its_loop_trains_a_small_model_offloaded_as_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes((7 * index * index) % 26 + 97 for index in range(3_000)))
    losses = []
    for number, offload in enumerate((True, False)):
        words = [word for word in without(recipe()[0], SMALL) if offload or word != "--cpu-offload"]
        out = tmp_path / str(number)
        assert main([*words, *SMALL.split(), "--text", str(text), "--out", str(out)]) == 0
        losses.append([entry["loss"] for entry in read_metrics(out / "metrics.jsonl") if "loss" in entry])
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])
