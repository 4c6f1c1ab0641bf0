"""Reads that a file system refuses for a moment are repeated, and what stays unread is not called damaged."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scale_core.testing import run_ranks
from scale_snapshot import DamagedSnapshotError, SnapshotError, latest_snapshot, load_snapshot, save_snapshot
from scale_snapshot.format.stored_file import opened, retry

TENSORS = "rank-00000.safetensors"


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        save_snapshot(folder, step, {"a": torch.full((4,), float(step))})


class FailingDisk:
    """Reads of files whose path ends in one of `names` fail `times` times; also stale handles, when they are open."""

    def __init__(self, number: int, times: int, *names: str) -> None:
        self.number, self.left, self.names = number, times, names
        self.opened: dict[int, str] = {}
        self.failed: list[str] = []
        self._open, self._close, self._preadv = os.open, os.close, os.preadv

    def install(self, set_attribute: Callable[[object, str, object], None]) -> None:
        set_attribute(os, "open", self.open)
        set_attribute(os, "close", self.close)
        set_attribute(os, "preadv", self.preadv)

    def open(self, path: str | Path, flags: int, *rest: int) -> int:
        descriptor = self._open(path, flags, *rest)
        self.opened[descriptor] = os.fspath(path)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.opened.pop(descriptor, None)
        self._close(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = self.opened[descriptor]
        if self.left and path.endswith(self.names):
            self.left -= 1
            self.failed.append(path)
            raise OSError(self.number, os.strerror(self.number))
        return self._preadv(descriptor, buffers, offset)


@pytest.mark.fault(109)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["manifest.json", TENSORS])
def test_the_newest_snapshot_is_loaded_after_a_failed_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    save(tmp_path, 1, 2)
    disk = FailingDisk(number, 2, f"step-00000002/{name}")
    disk.install(monkeypatch.setattr)
    with pytest.warns(UserWarning, match=rf"step-00000002/{name}: {os.strerror(number)}; trying again for 60 s"):
        loaded = load_snapshot(tmp_path, {"a": torch.zeros(4)})
    assert (loaded.step, loaded.state["a"].tolist()) == (2, [2.0] * 4)
    assert len(disk.failed) == 2


@pytest.mark.fault(110)
@pytest.mark.filterwarnings("ignore:.*trying again:UserWarning")
@pytest.mark.parametrize("name", ["manifest.json", TENSORS])
def test_what_stays_unread_is_an_error_and_nothing_older_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save(tmp_path, 1, 2)
    monkeypatch.setenv("SCALE_READ_RETRY_SECONDS", "0.2")
    FailingDisk(errno.EIO, 10**6, f"step-00000002/{name}").install(monkeypatch.setattr)
    into = torch.zeros(4)
    message = (
        rf"Input/output error, also when tried again for 0\.2 s: .*{name}.* It can't be read now, which says nothing "
        r"about damage: load it again when the file system answers, or load the one before it, step=1, and save into "
        r"another directory$"
    )
    for step in (None, 2):
        with pytest.raises(SnapshotError, match=message) as caught:
            load_snapshot(tmp_path, {"a": into}, step=step)
        assert not isinstance(caught.value, DamagedSnapshotError)
    with pytest.raises(OSError, match=r"also when tried again"):
        latest_snapshot(tmp_path, verify=True)
    assert into.tolist() == [0.0] * 4
    assert load_snapshot(tmp_path, {"a": into}, step=1).step == 1


@pytest.mark.fault(110)
@pytest.mark.filterwarnings("ignore:.*trying again:UserWarning")
def test_an_unread_snapshot_is_not_set_aside_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)
    monkeypatch.setenv("SCALE_READ_RETRY_SECONDS", "0.2")
    with monkeypatch.context() as patched:
        FailingDisk(errno.EIO, 10**6, TENSORS).install(patched.setattr)
        with pytest.raises(SnapshotError, match=r"Input/output error, also when tried again"):
            save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert load_snapshot(tmp_path, {"a": torch.zeros(4)}).step == 2


def fail_on_rank_1(folder: Path) -> tuple[int, list[float], int]:
    disk = FailingDisk(errno.ESTALE, 3 if dist.get_rank() == 1 else 0, TENSORS)
    disk.install(setattr)
    into = torch.zeros(4)
    with warnings.catch_warnings(action="ignore"):
        loaded = load_snapshot(folder, {"a": into})
    return loaded.step, into.tolist(), len(disk.failed)


@pytest.mark.fault(109)
def test_ranks_wait_for_one_whose_reads_fail_for_a_moment(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    found = run_ranks(fail_on_rank_1, 2, tmp_path)
    assert [each[:2] for each in found] == [(2, [2.0] * 4)] * 2
    assert [each[2] for each in found] == [0, 3]


def fail_for_good_on_rank_1(folder: Path) -> str:
    os.environ["SCALE_READ_RETRY_SECONDS"] = "0.2"
    FailingDisk(errno.EIO, 10**6 if dist.get_rank() == 1 else 0, TENSORS).install(setattr)
    with warnings.catch_warnings(action="ignore"), pytest.raises(SnapshotError) as caught:
        load_snapshot(folder, {"a": torch.zeros(4)})
    return str(caught.value)


@pytest.mark.fault(110)
def test_all_ranks_hear_what_one_can_not_read(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    one, other = run_ranks(fail_for_good_on_rank_1, 2, tmp_path)
    assert one == other and "on rank 1 of 2: OSError: [Errno 5] Input/output error, also when tried again" in one
    assert one.endswith("step=1, and save into another directory")


def test_what_time_does_not_mend_is_raised_at_once(tmp_path: Path) -> None:
    calls = []

    def refuse() -> None:
        calls.append(1)
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        retry(refuse, tmp_path)
    assert len(calls) == 1


def test_a_file_is_opened_again_after_a_read_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    disk = FailingDisk(errno.ESTALE, 1, "file")
    disk.install(monkeypatch.setattr)
    told: list[int] = []
    into = bytearray(4)
    with (
        opened(tmp_path / "file", told.append) as file,
        pytest.warns(UserWarning, match="Stale file handle; trying again"),
    ):
        file.read_into([memoryview(into)], 3)
    assert bytes(into) == b"3456" and told == [0, 4]
    assert not disk.opened  # Nothing stays open.
