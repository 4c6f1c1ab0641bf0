"""The programs of docs/tutorials train: on two ranks each reaches what its page shows."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import scale_tp
from scale_core.testing import preload, run_ranks

HOUSE = Path(__file__).parents[2]
TUTORIALS = HOUSE / "docs/tutorials"
PROGRAMS = ["gpt_fsdp", "finetune_transformers", "ddp_to_oss", "unet_pipeline", "moe_lm"]

preload("scale_moe", "scale_tp", "scale_pipe", "scale_fsdp", "scale_oss", "scale_snapshot")


def run_tutorial(name: str, runs: Sequence[Sequence[str]], folder: str) -> list[Any]:
    """Runs a program once for each list of arguments, in one start of the ranks."""
    os.chdir(folder)
    results = []
    for arguments in runs:
        results.append(runpy.run_path(str(TUTORIALS / f"{name}.py"))["main"](list(arguments)))
        scale_tp.destroy_model_parallel()
    return results


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_the_gpt_learns_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    first, uninterrupted = ["--steps", "12"], ["--steps", "16", "--out", "uninterrupted"]
    on_two = run_ranks(run_tutorial, 2, "gpt_fsdp", [uninterrupted, first], str(tmp_path))
    assert on_two[0] == on_two[1], "all ranks print the same losses"
    losses, _ = on_two[0]
    assert len(losses) == 17 and losses[-1] < losses[0] - 1.5
    (resumed,) = run_ranks(run_tutorial, 1, "gpt_fsdp", [["--steps", "16"]], str(tmp_path))
    assert len(resumed[0]) == 5, "it goes on at step 12"
    assert resumed[0] == pytest.approx(losses[12:], abs=0.02), "bf16 rounds, and the batch is cut another way"


def test_the_finetuned_llama_is_read_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ((losses,), other) = run_ranks(run_tutorial, 2, "finetune_transformers", [["--steps", "40"]], str(tmp_path))
    assert losses == other[0]
    assert losses[0] > 3 and losses[-2] < 1.0, "it finds the rule of the sequences"
    assert losses[-1] == pytest.approx(losses[-2], abs=0.3), "the export is what was trained"
    assert {file.name for file in (tmp_path / "llama-tuned").iterdir()} >= {"config.json", "model.safetensors"}


def test_sharded_ddp_trains_as_ddp_with_half_of_the_state(tmp_path: Path) -> None:
    runs = [["--wrapper", "ddp"], ["--wrapper", "sharded"]]
    for ddp, sharded in run_ranks(run_tutorial, 2, "ddp_to_oss", runs, str(tmp_path)):
        assert sharded["losses"] == ddp["losses"], "to the bit on two ranks"
        assert sharded["accuracy"] == ddp["accuracy"] and min(ddp["accuracy"]) > 0.95
        for shard, full in zip(sharded["bytes"], ddp["bytes"], strict=True):
            assert 0.4 * full < shard < 0.6 * full


def test_the_pipelined_unet_removes_noise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ((result,), (other,)) = run_ranks(run_tutorial, 2, "unet_pipeline", [[]], str(tmp_path))
    assert result["losses"] == other["losses"] and result["noise"] == other["noise"]
    before, after = result["noise"]
    assert after < before / 5
    classic, solved = result["idle"]
    assert 0 <= solved < 1 and 0 <= classic < 1


def test_the_mixture_learns_and_all_its_experts_work(tmp_path: Path) -> None:
    runs = [["--steps", "40"], ["--steps", "40", "--experts", "1"]]
    ((mixture, dense), other) = run_ranks(run_tutorial, 2, "moe_lm", runs, str(tmp_path))
    assert mixture["losses"] == other[0]["losses"] and dense["losses"] == other[1]["losses"]
    for losses in (mixture["losses"], dense["losses"]):
        assert losses[-1] < losses[0] - 2
    assert len(mixture["shares"]) == 8 and sum(mixture["shares"]) == pytest.approx(1)
    assert min(mixture["shares"]) > 0.02 and dense["shares"] == []


def test_each_tutorial_has_a_page_that_shows_all_of_it() -> None:
    assert sorted(path.stem for path in TUTORIALS.glob("*.py")) == sorted(PROGRAMS)
    navigation = (HOUSE / "mkdocs.yml").read_text(encoding="utf-8")
    for name in PROGRAMS:
        program = (TUTORIALS / f"{name}.py").read_text(encoding="utf-8")
        assert 80 <= len(program.splitlines()) <= 200, name
        page = TUTORIALS / f"{name.replace('_', '-')}.md"
        text = page.read_text(encoding="utf-8")
        assert f'--8<-- "docs/tutorials/{name}.py"' in text and f"tutorials/{page.name}" in navigation
        commands = re.findall(r"^torchrun .* (docs/tutorials/\w+\.py)", text, re.MULTILINE)
        assert commands and set(commands) == {f"docs/tutorials/{name}.py"}
