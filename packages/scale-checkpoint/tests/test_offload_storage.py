"""Files that hold activations: nothing is left behind, and a full disk is said in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper, offload_activations
from scale_checkpoint.offload import storage
from scale_checkpoint.offload.storage import Folder, backend_for
from scale_checkpoint.offload.store import Store


def open_files(folder: Path) -> int:
    """How many files in a folder this process holds, those without a name included."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # The listing's own.
    return sum(link.startswith(str(folder)) for link in links)


def test_a_nameless_file_is_closed_with_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_FILE_BYTES", 8000)
    store = Store(Folder(tmp_path))
    tensors = [torch.randn(1000) for _ in range(4)]
    packed = [store.pack(tensor) for tensor in tensors]
    assert list(tmp_path.iterdir()) == [] and open_files(tmp_path) == 2
    assert all(torch.equal(p.unpack(), t) for p, t in zip(packed, tensors, strict=True))
    del packed[:2]
    assert open_files(tmp_path) == 1
    packed.clear()
    store._backend._file = None  # type: ignore[attr-defined]  # The one that the next tensors would go to.
    assert open_files(tmp_path) == 0


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("broken")

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Breaks())
    with pytest.raises(KeyError), offload_activations(model, to=tmp_path, min_bytes=1):
        model(torch.randn(8, 64))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_folder_the_size_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_checkpointing(nn.Linear(64, 64), "offload", offload_to=tmp_path, min_bytes=1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "pwrite", full)
        with pytest.raises(OSError, match=r"offloading 0.5 MiB .*No space left on device; \d+ MiB are free") as caught:
            model(torch.randn(2048, 64))
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)
    model(torch.randn(2048, 64)).sum().backward()


def test_a_file_is_written_and_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(storage.os, "pwrite", lambda file, view, offset: write(file, view[:1000], offset))
    monkeypatch.setattr(storage.os, "preadv", lambda file, views, offset: read(file, [views[0][:700]], offset))
    tensor = torch.randn(1000)
    assert torch.equal(Store(Folder(tmp_path)).pack(tensor).unpack(), tensor)


def test_a_place_is_the_host_or_a_folder_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"write pathlib.Path\('/data'\)"):
        backend_for("/data")  # type: ignore[arg-type]
    with pytest.raises(NotADirectoryError, match=r"there is no folder .*missing"):
        checkpoint_wrapper(nn.Tanh(), offload_to=tmp_path / "missing")
