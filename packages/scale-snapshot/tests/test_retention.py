"""How many snapshots stay, and what is never removed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank

import scale_snapshot.retention
from scale_core.testing import RankError, run_ranks
from scale_snapshot import latest, load, save


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save_steps(directory: Path, *steps: int, keep: int | None = None) -> None:
    for step in steps:
        save(directory, step, {"a": torch.full((2,), float(step))}, keep=keep)


def step_names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_stay(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, keep=keep)
    assert names_in(tmp_path) == step_names(*left)


@pytest.mark.ranks(2)
def test_on_ranks_the_first_one_removes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=2)
    by_rank(None)  # All have saved.
    assert names_in(tmp_path) == step_names(2, 3)


def test_what_is_no_complete_older_snapshot_is_never_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 8)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
    os.truncate(tmp_path / "step-00000003" / "rank-00000.safetensors", 4)
    others = ["best", "step-00000001.damaged-0", "step-1", "step-00000009.tmp-host-1-ab"]
    for name in others:
        (tmp_path / name).mkdir()
    save_steps(tmp_path, 5, keep=1)  # Of a run that began again from an earlier step.
    assert names_in(tmp_path) == sorted([*others, *step_names(2, 3, 5, 8)])


def test_damaged_ones_do_not_count_among_those_that_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    os.truncate(tmp_path / "step-00000003" / "rank-00000.safetensors", 4)
    save_steps(tmp_path, 4, keep=2)
    assert names_in(tmp_path) == step_names(2, 3, 4)


def save_and_be_killed(directory: Path) -> None:
    def at_stage(point: str, path: Path) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    vars(scale_snapshot.retention)["at_stage"] = at_stage
    save_steps(directory, 3, keep=1)


@pytest.mark.fault(47)
def test_killed_while_it_removes_the_new_snapshot_loads(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks(save_and_be_killed, 2, tmp_path)
    removed = [name for name in names_in(tmp_path) if ".removed-" in name]
    assert [name.partition(".")[0] for name in removed] == step_names(2)
    assert latest(tmp_path) == tmp_path / "step-00000003"
    assert load(tmp_path, {"a": torch.zeros(2)}).step == 3
    save_steps(tmp_path, 4, keep=2)
    assert names_in(tmp_path) == step_names(3, 4)


def test_where_removing_fails_the_snapshot_is_still_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(point: str, path: Path) -> None:
        raise PermissionError("not allowed")

    save_steps(tmp_path, 1)
    monkeypatch.setattr(scale_snapshot.retention, "at_stage", fail)
    with pytest.warns(UserWarning, match="is saved, but older snapshots could not be removed: not allowed"):
        save_steps(tmp_path, 2, keep=1)
    assert latest(tmp_path) == tmp_path / "step-00000002"
