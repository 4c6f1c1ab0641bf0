"""The README holds: its diff trains the same on both sides, and its bars are those of the newest results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scale_core.testing import preload, run_ranks

HOUSE = Path(__file__).parents[2]
README = (HOUSE / "README.md").read_text(encoding="utf-8")
MAX_WORDS = 600

preload("scale_fsdp")


def programs() -> tuple[str, str]:
    """The program before the diff of the README, and the one after it."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def losses_of(program: str, rank: int, path: Path) -> list[float]:
    """Runs a program of the README, which starts its process group, and returns the losses of its steps."""
    losses: list[float] = []
    names: dict[str, object] = {"record": losses.append, "rendezvous": dist.FileStore(str(path), 2)}
    # Without torchrun, the group is told its store and its rank; its backend is still the one that torch takes.
    start = f"init_process_group(store=rendezvous, rank={rank}, world_size=2)"
    program = program.replace("init_process_group()", start)
    exec(program.replace("    loss.backward()", "    record(loss.item())\n    loss.backward()"), names)
    model = names["model"]
    assert isinstance(model, nn.Module) and len(losses) == 5
    dist.destroy_process_group()
    return losses


def train_both(folder: Path) -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    before, after = programs()
    return losses_of(before, rank, folder / "before"), losses_of(after, rank, folder / "after")


def test_both_sides_of_the_diff_train_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before, after = programs()
    assert "DistributedDataParallel(" in before and "fully_shard_modules(" in after
    for ddp, sharded in run_ranks(train_both, 2, tmp_path):
        # The norm of shards is summed in another order, so that clipped steps agree but for rounding.
        torch.testing.assert_close(sharded, ddp, rtol=1e-5, atol=0)
        assert sharded[0] == ddp[0]


def test_the_bars_are_those_of_the_newest_results() -> None:
    script = HOUSE / "tools/readme_bars.py"
    bars = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert f"```text\n{bars}```" in README, "run tools/readme_bars.py --write"
    newest = max((HOUSE / "benchmarks/results").glob("*-data_parallel.md"))
    assert f"benchmarks/results/{newest.name}" in README


def test_the_readme_is_short_and_its_commands_stand_alone() -> None:
    prose = re.sub(r"^```.*?^```|\]\([^)]*\)", " ", README, flags=re.MULTILINE | re.DOTALL)
    words = [word for word in prose.split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS, f"{len(words)} words outside of code"
    lines = README.splitlines()
    assert 'python -m pip install "nox[uv]" && nox -s quickstart' in lines
    assert 'python -m pip install "nox[uv]" && nox -j 2' in lines
    assert "&& nox -j 2" in (HOUSE / ".ci/run").read_text(encoding="utf-8"), "CI runs the README's test command"
