import errno
import json
import math
import os
import resource
import shutil
import signal
import stat
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from foreign_by_hand import assert_same_bits, bytes_of, random_bits
from rank_values import by_rank
from sharded_by_hand import Model, adam, cut, train
from torch import Tensor

import scale_core.testing.ranks
import scale_snapshot.snapshot
from scale_core.comm.group import Group
from scale_core.errors import ScaleDistributedError
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.local_shard import LocalShard
from scale_core.state.validation import StateMismatch
from scale_core.testing import RankError, faults, run_ranks
from scale_core.testing.ranks import scaled_by_load
from scale_snapshot import (
    DamagedSnapshotError,
    ForeignCheckpointError,
    NewerSnapshotError,
    Snapshot,
    SnapshotError,
    async_save,
    latest_snapshot,
    load,
    load_snapshot,
    save,
    save_snapshot,
)
from scale_snapshot.format import safetensors_io
from scale_snapshot.format.checksums import checksum
from scale_snapshot.format.safetensors_io import SAVED_NAMES

safetensors = pytest.importorskip("safetensors")


def own_model(hidden: int = 5) -> Any:
    """This rank's part of the model; all of it, unsharded, where there are no ranks."""
    if not dist.is_initialized():
        return Model(hidden)
    return cut(Model(hidden), dist.get_rank(), dist.get_world_size(), leave_whole=("frozen", "inner.0.bias"))


def save_trained(directory: Path, steps: int = 3) -> None:
    model = own_model()
    optimizer = adam(model)
    train(model, optimizer, steps)
    save_snapshot(directory, steps, sharded_state_dict(model, optimizer), extra={"position": [steps, 17]})


def load_fresh(directory: Path, **options: Any) -> tuple[Any, Any, Snapshot]:
    model = own_model()
    optimizer = adam(model)
    loaded = load_snapshot(directory, partial(target_state_dict, model, optimizer), **options)
    load_sharded_state_dict(loaded.state, model, optimizer, copy=False)
    return model, optimizer, loaded


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tensor if isinstance(value, LocalShard) else value for key, value in state.items()}


def load_and_train_on(directory: Path, loaded_steps: int = 3, more: int = 2) -> str:
    """Loads, trains on, and compares with training that was never interrupted."""
    model, optimizer, loaded = load_fresh(directory)
    assert loaded.step == loaded_steps
    assert loaded.extra == {"position": [loaded_steps, 17]}
    train(model, optimizer, more, first=loaded_steps)
    reference = own_model()
    its_optimizer = adam(reference)
    train(reference, its_optimizer, loaded_steps + more)
    got, expected = (values_of(sharded_state_dict(*pair)) for pair in ((model, optimizer), (reference, its_optimizer)))
    assert got.keys() == expected.keys()
    for key, value in got.items():
        assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key], key
    return loaded.path.name


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.fault(16, 60)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(0, 2), (2, 0), (2, 2), (2, 3), (3, 2), (4, 1)])
def test_training_goes_on_bit_by_bit_at_another_number_of_ranks(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    at(saved_by, save_trained, tmp_path)
    assert at(loaded_by, load_and_train_on, tmp_path) == "step-00000003"


def at(num_ranks: int, fn: Any, *args: Any) -> Any:
    """Calls a function here (0: no ranks, nothing sharded) or on ranks."""
    return fn(*args) if num_ranks == 0 else run_ranks(fn, num_ranks, *args)[0]


def test_files_are_safetensors_and_json_and_replicas_stand_once(tmp_path: Path) -> None:
    run_ranks(save_trained, 2, tmp_path)
    (path,) = tmp_path.iterdir()
    assert names_in(path) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    names: list[str] = []
    for file in path.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="pt") as opened:
            names += opened.keys()
    assert len(names) == len(set(names))
    assert "model.frozen[0:2, 0:2]" in names
    assert "optim.embed.weight.step[]" in names
    # 17 of 35 elements end inside row 3, so rank 0 holds three rows and a part, rank 1 a part and three rows.
    assert {name for name in names if name.startswith("model.embed.weight")} == {
        "model.embed.weight[0:3, 0:5]",
        "model.embed.weight[3:4, 0:2]",
        "model.embed.weight[3:4, 2:5]",
        "model.embed.weight[4:7, 0:5]",
    }
    assert json.loads((path / "manifest.json").read_text())["step"] == 3


@pytest.mark.fault(41)
def test_a_step_that_is_saved_is_never_written_again(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, {"a": torch.ones(1)})
    with pytest.raises(SnapshotError, match="step-00000001 is saved already"):
        save_snapshot(tmp_path, 1, {"a": torch.zeros(1)})
    assert load_snapshot(tmp_path, {"a": torch.zeros(1)}).state["a"] == 1


# ------------------------------------------------------------------------------------------------- what is killed


def save_and_be_killed(directory: Path, rank: int, point: str) -> None:
    def at_stage(now: str, _path: Path) -> None:
        if now == point and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    vars(scale_snapshot.snapshot)["at_stage"] = at_stage
    try:
        save_trained(directory, steps=4)
    except ScaleDistributedError as error:
        (directory.parent / "told").write_text(str(error))
        raise


def lose_a_rank_while_saving(directory: Path, num_ranks: int, rank: int, point: str) -> None:
    run_ranks(save_trained, num_ranks, directory)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(RankError, match=f"rank {rank} of {num_ranks} was killed by SIGKILL"):
        run_ranks(save_and_be_killed, num_ranks, directory, rank, point)
    assert all(path.read_bytes() == data for path, data in before.items())
    steps = 4 if point == "renamed" else 3
    assert latest_snapshot(directory, verify=True) == directory / f"step-0000000{steps}"
    assert run_ranks(partial(load_and_train_on, loaded_steps=steps), num_ranks, directory)[0] == f"step-0000000{steps}"
    run_ranks(partial(save_trained, steps=5), num_ranks, directory)
    whole = ["step-00000003", *(["step-00000004"] if steps == 4 else []), "step-00000005"]
    assert names_in(directory) == whole  # What was left is swept.


STAGES = {0: ("room", "tensor", "written", "manifest", "renamed"), 1: ("tensor", "written"), 2: ("tensor", "written")}


@pytest.mark.fault(37)
@pytest.mark.parametrize(("rank", "point"), [(0, "room"), (1, "tensor"), (1, "written"), (0, "manifest")])
def test_a_rank_killed_while_saving_leaves_the_last_snapshot(tmp_path: Path, rank: int, point: str) -> None:
    lose_a_rank_while_saving(tmp_path, 2, rank, point)


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "point"), [(rank, point) for rank, points in STAGES.items() for point in points])
def test_any_rank_killed_at_any_stage_leaves_the_last_snapshot(tmp_path: Path, rank: int, point: str) -> None:
    lose_a_rank_while_saving(tmp_path, 3, rank, point)


@pytest.mark.fault(40)
def test_a_rank_killed_after_the_rename_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_core.testing.ranks, "_GRACE_SECONDS", 60.0)  # The other one has time to say it.
    folder = tmp_path / "snapshots"
    with pytest.raises(RankError):
        run_ranks(save_and_be_killed, 2, folder, 0, "renamed")
    assert (tmp_path / "told").read_text().endswith(f"start from the last checkpoint, {folder / 'step-00000004'}")
    assert at(0, load_and_train_on, folder, 4) == "step-00000004"


def save_while_something_happens(directory: Path, point: str, happens: Callable[[Path], object]) -> str:
    def at_stage(now: str, path: Path) -> None:
        if now == point == "written":
            dist.barrier()  # Else the others write into the directory while it is removed.
        if now == point and dist.get_rank() == dist.get_world_size() - 1 - (now in ("room", "manifest")):
            happens(path)

    vars(scale_snapshot.snapshot)["at_stage"] = at_stage
    with pytest.raises(SnapshotError) as caught:
        save_trained(directory, steps=4)
    dist.barrier()
    return str(caught.value)


@pytest.mark.fault(49)
@pytest.mark.parametrize(("point", "happens"), [("room", shutil.rmtree), ("written", shutil.rmtree)])
def test_a_directory_removed_while_it_is_written_is_an_error(tmp_path: Path, point: str, happens: Any) -> None:
    run_ranks(save_trained, 2, tmp_path)
    first, second = run_ranks(save_while_something_happens, 2, tmp_path, point, happens)
    assert first == second and "saving" in first and "step-00000004 failed on rank 0 of 2" in first
    assert names_in(tmp_path) == ["step-00000003"]


def save_the_same_step_meanwhile(unfinished: Path) -> None:
    save_snapshot(unfinished.parent, 4, {"a": torch.ones(1)}, Group())


@pytest.mark.fault(48)
def test_of_two_jobs_that_save_one_step_the_second_fails(tmp_path: Path) -> None:
    def at_stage(now: str, path: Path) -> None:
        if now == "manifest":
            vars(scale_snapshot.snapshot)["at_stage"] = before
            save_the_same_step_meanwhile(path)

    before = scale_snapshot.snapshot.at_stage
    vars(scale_snapshot.snapshot)["at_stage"] = at_stage
    with pytest.raises(SnapshotError, match=r"step-00000004 was saved by another program meanwhile, and stays"):
        save_snapshot(tmp_path, 4, {"a": torch.zeros(1)})
    assert names_in(tmp_path) == ["step-00000004"]
    assert load_snapshot(tmp_path, {"a": torch.zeros(1)}).state["a"] == 1


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, *, after: int = 0) -> None:
    """Has `os.fsync` of folders fail with an error number, from the call after so many on."""
    fsync, calls = os.fsync, iter(range(100))

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) and next(calls) >= after:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.fault(102)
@pytest.mark.filterwarnings("error")
def test_a_file_system_without_a_sync_of_folders_is_saved_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, errno.EINVAL)
    save_snapshot(tmp_path, 1, {"a": torch.ones(1)})
    assert latest_snapshot(tmp_path, verify=True) == tmp_path / "step-00000001"


@pytest.mark.fault(103)
def test_a_sync_that_fails_after_the_rename_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, errno.EIO, after=1)
    with pytest.warns(UserWarning, match=r"step-00000001 is complete, but a power cut may still undo its name"):
        save_snapshot(tmp_path, 1, {"a": torch.ones(1)})
    assert names_in(tmp_path) == ["step-00000001"]
    assert load_snapshot(tmp_path, {"a": torch.zeros(1)}).state["a"] == 1


@pytest.mark.fault(103)
def test_a_sync_that_fails_before_the_rename_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, errno.EIO)
    with pytest.raises(SnapshotError, match=r"step-00000001 failed: .*Input/output error"):
        save_snapshot(tmp_path, 1, {"a": torch.ones(1)})
    assert names_in(tmp_path) == []


@pytest.mark.fault(102)
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST])
def test_a_rename_that_took_effect_and_failed_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As over NFS, where the answer to a rename was lost and the rename is repeated."""
    rename = Path.rename

    def rename_and_fail(path: Path, target: Path) -> Path:
        rename(path, target)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", rename_and_fail)
    save_snapshot(tmp_path, 1, {"a": torch.ones(1)})
    assert latest_snapshot(tmp_path, verify=True) == tmp_path / "step-00000001"


@pytest.mark.fault(43)
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"saving .*step-00000001 failed: .*Error: .*file"):
        save_snapshot(tmp_path / "file" / "run", 1, {"a": torch.ones(1)})


@pytest.mark.fault(42)
@pytest.mark.ranks(2)
def test_a_full_disk_of_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    save_trained(tmp_path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
    with pytest.raises(SnapshotError) as caught:
        save_trained(tmp_path, steps=4)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    dist.barrier()
    first, second = by_rank((str(caught.value), cause.errno))
    assert first == second
    assert "step-00000004 failed on rank 1 of 2: OSError: [Errno 27]" in first[0]
    assert first[1] == errno.EFBIG
    assert names_in(tmp_path) == ["step-00000003"]


# -------------------------------------------------------------------------------------------------- what is damaged


def two_snapshots(directory: Path) -> Path:
    for step in (1, 2):
        save_snapshot(directory, step, {"a": torch.full((4, 4), float(step)), "note": step})
    return directory / "step-00000002"


@pytest.mark.fault(52, 53)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json: it is not a complete snapshot"),
        (lambda path: (path / "manifest.json").write_text("{"), "its first line does not begin a manifest"),
        (lambda path: (path / "rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
        (lambda path: os.truncate(path / "rank-00000.safetensors", 100), "has 100 bytes, .* were written"),
    ],
)
def test_a_damaged_snapshot_is_passed_over_with_a_warning(tmp_path: Path, damage: Any, message: str) -> None:
    damage(two_snapshots(tmp_path))
    with pytest.warns(UserWarning, match=message):
        loaded = load_snapshot(tmp_path, {"a": torch.zeros(4, 4), "note": None})
    assert (loaded.step, loaded.state["note"], loaded.state["a"][0, 0]) == (1, 1, 1.0)
    with pytest.warns(UserWarning, match="it is now step-00000002.damaged"):
        save_snapshot(tmp_path, 2, {"a": torch.zeros(4, 4)})
    assert latest_snapshot(tmp_path) == tmp_path / "step-00000002"


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.fault(68)
def test_a_flipped_bit_is_passed_over_and_saved_again(tmp_path: Path) -> None:
    flip_last_bit(two_snapshots(tmp_path) / "rank-00000.safetensors")
    assert latest_snapshot(tmp_path) == tmp_path / "step-00000002"  # Its manifest and its lengths are right.
    with pytest.warns(UserWarning, match="passing over"):
        assert latest_snapshot(tmp_path, verify=True) == tmp_path / "step-00000001"
    with pytest.warns(UserWarning, match=r"passing over .*step-00000002 is damaged: the checksum of .* \(a\)"):
        assert load_snapshot(tmp_path, {"a": torch.zeros(4, 4), "note": None}).step == 1
    with pytest.warns(UserWarning, match="it is now step-00000002.damaged"):
        save_snapshot(tmp_path, 2, {"a": torch.zeros(4, 4)})
    assert load_snapshot(tmp_path, {"a": torch.zeros(4, 4)}).step == 2


@pytest.mark.fault(51)
def test_a_damaged_step_asked_for_is_refused_with_an_older_one(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_snapshot(tmp_path, step, {"a": torch.full((4, 4), float(step))})
    flip_last_bit(tmp_path / "step-00000003" / "rank-00000.safetensors")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    target = {"a": torch.zeros(4, 4)}
    with pytest.raises(DamagedSnapshotError, match=r"complete snapshot is .*step-00000001: load that, step=1"):
        load_snapshot(tmp_path, target, step=3)
    assert not target["a"].any()


def test_where_nothing_is_whole_the_error_says_so(tmp_path: Path) -> None:
    flip_last_bit(save_snapshot(tmp_path, 1, {"a": torch.ones(1)}) / "rank-00000.safetensors")
    with (
        pytest.warns(UserWarning, match="passing over"),
        pytest.raises(SnapshotError, match="there is no complete snapshot in"),
    ):
        load_snapshot(tmp_path, {"a": torch.ones(1)})


@pytest.mark.fault(66)
def test_a_snapshot_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = two_snapshots(tmp_path)
    first = b'{"format": "scale-snapshot", "version": 3, "checksum": "%s",\n'
    rest = b'"of a form": "that nobody knows yet"}'
    (path / "manifest.json").write_bytes(first % checksum(first % b"", rest).encode() + rest)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    calls: list[Callable[[], object]] = [
        lambda: load_snapshot(tmp_path, {"a": torch.zeros(4, 4), "note": None}),
        lambda: load_snapshot(tmp_path, {"a": torch.zeros(4, 4), "note": None}, step=2),
        lambda: latest_snapshot(tmp_path),
        lambda: save_snapshot(tmp_path, 2, {"a": torch.zeros(4, 4), "note": None}),
    ]
    for call in calls:
        with pytest.raises(NewerSnapshotError, match=r"2 was written by a newer scale-core, format version 3"):
            call()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert load_snapshot(tmp_path, {"a": torch.zeros(4, 4), "note": None}, step=1).step == 1


def load_a_part_of_what_is_damaged(directory: Path) -> tuple[str, float]:
    half = torch.zeros(8)
    with pytest.raises(DamagedSnapshotError) as caught:
        load_snapshot(directory, {"a": LocalShard(half, (16,), 8 * dist.get_rank(), 8 * dist.get_rank() + 8)}, step=1)
    return str(caught.value), float(half.sum())


def test_damage_that_one_rank_sees_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "BLOCK_BYTES", 16)
    flip_last_bit(save_snapshot(tmp_path, 1, {"a": torch.ones(16)}) / "rank-00000.safetensors")
    first, second = run_ranks(load_a_part_of_what_is_damaged, 2, tmp_path)
    assert first == second
    assert "the checksum of rank-00000.safetensors differs in bytes" in first[0] and first[1] == 0


def test_shards_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    state = {"a": torch.ones(4)}
    for step in (1, 2):
        save_snapshot(tmp_path, step, state)
    name = "rank-00000.safetensors"
    shutil.copyfile(tmp_path / "step-00000001" / name, tmp_path / "step-00000002" / name)
    with pytest.raises(DamagedSnapshotError, match="it is of another save"):
        load_snapshot(tmp_path, {"a": torch.zeros(4)}, step=2)


@pytest.mark.ranks(3)
def test_ranks_that_save_or_load_different_things_are_named(tmp_path: Path) -> None:
    rank, texts = dist.get_rank(), []
    state = {"a": torch.zeros(4)}
    calls: list[Callable[[], object]] = [
        lambda: save_snapshot(tmp_path, 3 + rank // 2, state),
        lambda: save_snapshot(tmp_path / f"{min(rank, 1)}", 3, state),
        lambda: load_snapshot(tmp_path, state, step=3 if rank else None),
        lambda: load_snapshot(tmp_path, state, strict=rank == 1),
    ]
    for call in calls:
        with pytest.raises(SnapshotError) as caught:
            call()
        texts.append(str(caught.value))
    first, second, third = by_rank(texts)
    assert first == second == third
    assert first[0].startswith("save_snapshot: step differs between the ranks: 3 on ranks 0, 1; 4 on rank 2. Pass the")
    assert "directory differs between the ranks" in first[1]
    assert "load_snapshot: step differs between the ranks: None on rank 0; 3 on ranks 1, 2" in first[2]
    assert "strict differs between the ranks: False on ranks 0, 2; True on rank 1" in first[3]
    assert names_in(tmp_path) == []


EXTRA: dict[str, Any] = {
    "best": math.inf,
    "worst": [-math.inf, {"deep": (1, (2, 3))}],
    "keys": {1: "a", (1, 2): "b", None: "c"},
    "set": {3, 4},
    "raw": b"ab",
    "loss": numpy.float32(0.1),
}


@pytest.mark.ranks(2)
def test_extra_comes_back_as_it_was_or_is_refused_by_its_key(tmp_path: Path) -> None:
    extra = {**EXTRA, "nan": math.nan, "rank": torch.distributed.get_rank()}
    save(tmp_path, 1, {"a": torch.ones(2)}, extra=extra)
    with pytest.raises(SnapshotError) as caught:
        save(tmp_path, 2, {"a": torch.ones(2)}, extra={"of": [1, {"mean": numpy.ones(2)}]})
    async_save(tmp_path, 3, {"a": torch.ones(2)}, extra=extra).wait()
    for step in (1, 3):
        loaded = load(tmp_path, {"a": torch.ones(2)}, step=step).extra
        assert math.isnan(loaded.pop("nan")) and loaded.pop("rank") == 0
        assert repr(loaded) == repr(EXTRA)
    for types, refusal in by_rank(([type(value) for value in loaded.values()], str(caught.value))):
        assert types == [type(value) for value in EXTRA.values()]
        assert "extra.of.1.mean is a tensor or an array" in refusal and "Save it as an object" in refusal
    assert not (tmp_path / "step-00000002").exists()


class Options(dict[str, Any]):
    """A dict of somebody's own, which JSON knows."""


def test_extra_takes_what_json_takes(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, {"a": torch.ones(2)}, extra=Options(lr=0.1, steps=(1, 2)))
    assert load_snapshot(tmp_path, {"a": torch.ones(2)}).extra == {"lr": 0.1, "steps": [1, 2]}
    with pytest.raises(SnapshotError, match=r"extra\['f'\]: a builtins.builtin_function_or_method can't be saved"):
        save_snapshot(tmp_path, 2, {"a": torch.ones(2)}, extra={"f": print})


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_a_step_is_a_number_from_0_on(tmp_path: Path, step: Any) -> None:
    text = "expected (a step of at least 0|step to be an integer|step to be an integer or None), got"
    with pytest.raises((TypeError, ValueError), match=text):
        save_snapshot(tmp_path, step, {"a": torch.ones(1)})
    with pytest.raises((TypeError, ValueError), match=text):
        load_snapshot(tmp_path, {}, step=step)


def test_one_step_can_be_asked_for(tmp_path: Path) -> None:
    two_snapshots(tmp_path)
    assert load_snapshot(tmp_path, {"a": torch.zeros(4, 4), "note": None}, step=1).step == 1
    with pytest.raises(SnapshotError, match=r"there is no .*7; the newest there are: step-00000002, step-00000001"):
        load_snapshot(tmp_path, {}, step=7)


def test_a_directory_without_snapshots_says_so(tmp_path: Path) -> None:
    assert latest_snapshot(tmp_path / "nowhere") is None
    with pytest.raises(SnapshotError, match="there is no complete snapshot in") as caught:
        load_snapshot(tmp_path, {})
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.fault(37)
def test_leftovers_of_a_killed_process_are_removed_only(tmp_path: Path) -> None:
    host = os.uname().nodename
    (dead := tmp_path / f"step-00000001.tmp-{host}-{2**22 + 1}-abc").mkdir()
    (alive := tmp_path / f"step-00000001.tmp-{host}-{os.getpid()}-abc").mkdir()
    (elsewhere := tmp_path / f"step-00000001.tmp-other-host-{2**22 + 1}-abc").mkdir()
    save_snapshot(tmp_path, 2, {"a": torch.ones(1)})
    assert (dead.exists(), alive.exists(), elsewhere.exists()) == (False, True, True)
    os.utime(elsewhere, (0, 0))
    save_snapshot(tmp_path, 3, {"a": torch.ones(1)})
    assert not elsewhere.exists()  # Nobody has written into it for a day.
    assert latest_snapshot(tmp_path) == tmp_path / "step-00000003"


# ---------------------------------------------------------------------------------------------------- what differs


@pytest.mark.fault(58)
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"a": torch.zeros(4, 5), "note": None}, r"a: the saved shape is \(4, 4\), expected \(4, 5\)"),
        ({"a": torch.zeros(4, 4).half(), "note": None}, "a: the saved dtype is torch.float32, expected torch.float16"),
        ({"a": torch.zeros(4, 4), "b": torch.zeros(1), "note": None}, "1 missing in it: b"),
        ({"a": torch.zeros(4, 4)}, "1 unexpected in it: note"),
        ({"a": torch.zeros(4, 4), "note": torch.zeros(1)}, "note: no tensor was saved, where one is expected"),
        ({"a": None, "note": None}, "a: a tensor was saved, where none is expected"),
    ],
)
def test_another_state_is_refused_before_anything_is_read(tmp_path: Path, target: Any, message: str) -> None:
    two_snapshots(tmp_path)
    with pytest.raises(SnapshotError, match=message) as caught:
        load_snapshot(tmp_path, target)
    assert isinstance(caught.value.__cause__, StateMismatch)
    assert not any(value.any() for value in target.values() if isinstance(value, Tensor))


@pytest.mark.fault(57)
def test_all_that_differs_is_listed_at_once_with_counts(tmp_path: Path) -> None:
    save_snapshot(
        tmp_path, 1, {f"old.{n}": torch.ones(1) for n in range(12)} | {"a": torch.ones(2), "b": torch.ones(2)}
    )
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(tmp_path, {"new": torch.zeros(1), "a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)})
    text = str(caught.value)
    assert "1 missing in it: new; 12 unexpected in it: old.0, " in text and "old.9 and 2 more; " in text
    assert "1 of another shape: a: the saved shape is (2,), expected (3,)" in text
    assert "1 of another dtype: b: the saved dtype is torch.float32, expected torch.float64" in text
    assert text.endswith("or load what fits with strict=False")


@pytest.mark.fault(57)
def test_a_lenient_load_takes_what_fits_and_warns_with_the_rest(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "note": 7, "old": 1})
    target: dict[str, Any] = {
        "a": torch.zeros(2),
        "b": torch.zeros(3),
        "c": torch.zeros(2).double(),
        "d": torch.zeros(1),
        "note": 0,
    }
    with pytest.warns(UserWarning, match="in part, as strict=False says: 1 missing in it: d; 1 unexpected in it: old"):
        loaded = load_snapshot(tmp_path, target, strict=False)
    assert loaded.state.keys() == target.keys() and loaded.state["note"] == 7
    assert [float(target[key].sum()) for key in "abcd"] == [2, 0, 0, 0]


def save_slowly(folder: Path, limit: float) -> str:
    """Rank 1 takes a quarter of the limit for each of its tensors."""
    os.environ["SCALE_LIMIT_SECONDS"] = str(limit)
    rank = dist.get_rank()
    state = {f"{n}": LocalShard(torch.full((2,), float(rank)), (4,), 2 * rank, 2 * rank + 2) for n in range(10)}
    slow = [faults.delay_at("snapshot.tensor", rank=1, occurrence=n, seconds=limit / 4) for n in range(1, 11)]
    with faults.inject(*slow):
        began = time.monotonic()
        path = save_snapshot(folder, 1, state)
        assert time.monotonic() - began > 2 * limit
    return path.name


def test_a_rank_that_writes_beyond_the_limit_ends_no_other(tmp_path: Path) -> None:
    assert run_ranks(save_slowly, 2, tmp_path, scaled_by_load(0.5)) == ["step-00000001"] * 2
    state = {f"{n}": torch.zeros(4) for n in range(10)}
    load_snapshot(tmp_path, state)
    assert all(tensor.tolist() == [0, 0, 1, 1] for tensor in state.values())


def test_tensors_of_every_dtype_come_back_to_the_bit(tmp_path: Path) -> None:
    state = {str(dtype): random_bits((5, 6), dtype) for dtype in SAVED_NAMES}
    saved = {name: tensor.clone() for name, tensor in state.items()}
    save_snapshot(tmp_path, 1, state | {"cut": LocalShard(random_bits((12,), torch.complex128), (12,), 0, 12)})
    halves = {name: torch.empty(5, 12, dtype=tensor.dtype)[:, ::2] for name, tensor in saved.items()}
    cut = torch.empty(12, dtype=torch.complex128)
    load_snapshot(tmp_path, {**halves, "cut": LocalShard(cut, (12,), 0, 12)})
    assert_same_bits(halves, saved)
    assert bytes_of(cut) == bytes_of(random_bits((12,), torch.complex128))


@pytest.mark.fault(59)
def test_dtypes_are_converted_only_when_asked(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, {"a": torch.full((300, 300), 1.5)})
    target = torch.zeros(300, 300, dtype=torch.bfloat16)
    with pytest.raises(SnapshotError, match="build the model in that dtype, or convert with cast=True"):
        load_snapshot(tmp_path, {"a": target})
    load_snapshot(tmp_path, {"a": target}, cast=True)
    assert torch.equal(target, torch.full((300, 300), 1.5, dtype=torch.bfloat16))


def load_another_model(directory: Path) -> str:
    model = own_model(hidden=6)
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(directory, partial(target_state_dict, model, adam(model)))
    return str(caught.value)


def test_a_snapshot_of_another_model_lists_all_differences(tmp_path: Path) -> None:
    run_ranks(save_trained, 2, tmp_path)
    first, second = run_ranks(load_another_model, 2, tmp_path)
    assert first == second
    assert "model.embed.weight: the saved shape is (7, 5), expected (7, 6)" in first
    assert "optim.embed.weight.exp_avg: the saved shape is (7, 5), expected (7, 6)" in first


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value", "lr differs between the ranks: 0.1 on a lower rank, 1.1 on rank 1"),
        ("dtype", "a differs between the ranks"),
        ("twice", "key:a has overlapping chunks"),
        ("kind", "a is a tensor on some ranks and a value on others"),
        ("never", "key:a invalid fill tensor-volume: 4 chunks-volume: 2"),
    ],
)
@pytest.mark.ranks(2)
def test_ranks_that_contradict_each_other_save_nothing(tmp_path: Path, kind: str, message: str) -> None:
    rank = dist.get_rank()
    states: dict[str, dict[str, Any]] = {
        "value": {"lr": 0.1 + rank},
        "dtype": {"a": LocalShard(torch.ones(2).to((torch.half, torch.float)[rank]), (4,), 2 * rank, 2 * rank + 2)},
        "twice": {"a": LocalShard(torch.ones(3), (4,), rank, rank + 3)},
        "never": {"a": LocalShard(torch.ones(1), (4,), rank, rank + 1)},
        "kind": {"a": (torch.ones(1), 1)[rank]},
    }
    with pytest.raises(SnapshotError) as caught:
        save_snapshot(tmp_path, 1, states[kind])
    for text in by_rank(str(caught.value)):
        # Of overlaps and gaps, torch 2.8 writes the reason to the log, and no word into its error.
        assert message in text or ("key:a" in message and text.endswith(": Failed to validate global plan"))
    assert names_in(tmp_path) == []


@pytest.mark.ranks(4)
def test_full_tensors_are_those_of_the_lowest_rank_with_them(tmp_path: Path) -> None:
    rank = float(dist.get_rank())
    state: dict[str, Any] = {f"model.{name}": torch.full((3,), rank) for name in ("mean", "variance", "last")}
    if rank < 2:
        state["model.first stage"] = state.pop("model.last")
    state["model.shard"] = LocalShard(torch.zeros(4), (4,), 0, 4)  # The same on all ranks: any of them may write it.
    save_snapshot(tmp_path, 1, state)
    by_rank(None)  # All have saved.
    target = {f"model.{name}": torch.full((3,), -1.0) for name in ("mean", "variance", "first stage", "last")}
    load_snapshot(tmp_path, target | {"model.shard": torch.zeros(4)})
    assert [tensor.unique().tolist() for tensor in target.values()] == [[0.0], [0.0], [0.0], [2.0]]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_a_value_that_json_does_not_know_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SnapshotError, match=r"saving .*step-00000001 failed: .*Error: odd: "):
        save_snapshot(tmp_path, 1, {"odd": value})
    assert names_in(tmp_path) == []


@pytest.mark.fault(55)
def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = adam(model)
    train(model, optimizer, 1)

    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    monkeypatch.setattr("torch.save", refuse)
    monkeypatch.setattr("torch.load", refuse)
    save_snapshot(tmp_path, 1, sharded_state_dict(model, optimizer), Group())
    load_snapshot(tmp_path, partial(target_state_dict, model, optimizer), Group())


def load_where_only_rank_0_sees(directory: Path) -> tuple[int, bool]:
    if dist.get_rank() == 1:
        vars(scale_snapshot.snapshot)["_finished"] = lambda _directory: []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_snapshot(directory, {"a": torch.zeros(4, 4), "note": None}).step, True


@pytest.mark.fault(69)
def test_rank_0_decides_which_snapshot_it_is(tmp_path: Path) -> None:
    two_snapshots(tmp_path)
    assert run_ranks(load_where_only_rank_0_sees, 2, tmp_path) == [(2, True)] * 2


def test_a_checkpoint_of_another_library_is_refused_with_a_fix(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt")
    run_ranks(load_foreign, 2, tmp_path / "weights.pt")
    with pytest.raises(SnapshotError, match=r"is one snapshot: pass the directory that it is in"):
        load_snapshot(save_snapshot(tmp_path / "runs", 1, {"a": torch.ones(2)}), {"a": torch.ones(2)})
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    with pytest.warns(UserWarning, match=r"scale-train snapshot convert .*hf"):
        assert latest_snapshot(tmp_path / "hf") is None


def load_foreign(path: Path) -> None:
    with pytest.raises(ForeignCheckpointError, match=r"a file of torch\.save, and no snapshot.* snapshot convert \S+"):
        load_snapshot(path, {"a": torch.ones(2)})
    with pytest.raises(ForeignCheckpointError):
        load_snapshot(path, {"a": torch.ones(2)}, step=3)


def test_conjugated_and_negated_views_are_saved_by_their_values(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    saved = {"conjugated": values.conj(), "negated": values[:1].conj().imag}
    assert saved["conjugated"].is_conj() and saved["negated"].is_neg()
    save_snapshot(tmp_path, 1, saved)
    read = load_snapshot(tmp_path, {"conjugated": torch.zeros_like(values), "negated": torch.zeros(1)}).state
    assert read["conjugated"].tolist() == [1 - 2j, 3 + 1j]
    assert read["negated"].tolist() == [-2.0]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [(torch.empty(2, device="meta"), "t is on the meta device"), (torch.eye(2).to_sparse(), r"save t.to_dense\(\)")],
)
def test_what_has_no_dense_values_is_not_saved(tmp_path: Path, tensor: Tensor, words: str) -> None:
    with pytest.raises(SnapshotError, match=words):
        save_snapshot(tmp_path, 1, {"t": tensor})


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (torch.empty(2, 3, device="meta"), "t is on the meta device, where there is no memory"),
        (torch.zeros(3).expand(2, 3), "t: its elements share memory"),
    ],
)
def test_a_target_that_can_not_hold_the_values_is_refused(tmp_path: Path, place: Tensor, words: str) -> None:
    save_snapshot(tmp_path, 1, {"first": torch.ones(1), "t": torch.ones(2, 3)})
    first = torch.zeros(1)
    with pytest.raises(SnapshotError, match=words):
        load_snapshot(tmp_path, {"first": first, "t": place})
    assert first.item() == 0


@pytest.mark.parametrize("how", ["file", "link to nothing", "snapshot of another step"])
def test_what_is_only_named_as_a_snapshot_is_passed_over(tmp_path: Path, how: str) -> None:
    save_snapshot(tmp_path, 1, {"a": torch.ones(2)})
    place = tmp_path / "step-00000002"
    if how == "file":
        place.write_text("no directory")
    elif how == "link to nothing":
        place.symlink_to(tmp_path / "nowhere")
    else:
        shutil.copytree(tmp_path / "step-00000001", place)
    with pytest.warns(UserWarning, match="passing over an incomplete snapshot: .*step-00000002"):
        assert load_snapshot(tmp_path, {"a": torch.zeros(2)}).step == 1
    with pytest.warns(UserWarning, match="passing over an incomplete snapshot: .*step-00000002"):
        assert latest_snapshot(tmp_path) == tmp_path / "step-00000001"
    with pytest.raises(DamagedSnapshotError, match="step-00000001: load that, step=1"):
        load_snapshot(tmp_path, {"a": torch.zeros(2)}, step=2)
