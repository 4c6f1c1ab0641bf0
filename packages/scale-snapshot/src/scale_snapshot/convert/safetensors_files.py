"""Reads safetensors: one file, or a folder of several with an index, as Hugging Face writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.naming import SNAPSHOT_MARK
from scale_snapshot.foreign import index_of
from scale_snapshot.format.safetensors_io import StoredTensor, memory_of, read_entries, read_metadata
from scale_snapshot.format.stored_file import opened


def read_safetensors_file(path: Path) -> dict[str, Any]:
    """Returns the tensors of a file by name, and the entries of its metadata by `writers`.

    Raises:
        ValueError: It is damaged, or has a dtype that torch does not know.
    """
    actual = Path(os.path.realpath(path))  # A folder of the hub's cache has links, and reading follows none.
    try:
        with opened(actual) as file:
            tensors, mark = read_entries(file), read_metadata(file).get(SNAPSHOT_MARK)
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    tree: dict[str, Any] = {
        stored.entry.name: LazyTensor(stored.entry.shape, stored.entry.dtype, _reader(actual, stored))
        for stored in tensors
    }
    return tree if mark is None else {**tree, SNAPSHOT_MARK: mark}


def read_safetensors_folder(folder: Path) -> dict[str, Any]:
    """Returns the tensors of all files of a folder by name; raises as `read_files_of_folder` does."""
    return read_files_of_folder(folder, [path.name for path in folder.glob("*.safetensors")], read_safetensors_file)


def read_files_of_folder(folder: Path, names: Sequence[str], read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Returns the tensors of a folder by name: of the files in its index, or of `names` if there is no index.

    Raises:
        ValueError: A file is missing or damaged, a tensor is in two files, or the index names a different file for it.
    """
    index = index_of(folder)
    tree: dict[str, Any] = {}
    for name in sorted(names if index is None else {*index.values()}):
        if not (folder / name).is_file():
            why = "it is a link to nothing" if index is None else "the index of the folder names it"
            raise ValueError(f"{folder / name} is missing, and {why}: copy the file there again")
        part = read(folder / name)
        if twice := tree.keys() & part.keys() - {SNAPSHOT_MARK}:
            raise ValueError(f"{min(twice)} is in {name} and in another file of {folder}: convert one file alone")
        wrong = [key for key in part if index is not None and key != SNAPSHOT_MARK and index.get(key) != name]
        if wrong:
            raise ValueError(f"{folder}: {wrong[0]} is in {name}, and its index says {(index or {}).get(wrong[0])}")
        tree.update(part)
    if missing := (index or {}).keys() - tree.keys():
        raise ValueError(f"{folder} has an index with {min(missing)}, which no file has")
    return tree


def _reader(path: Path, stored: StoredTensor) -> Callable[[], Tensor]:
    def read() -> Tensor:
        # On the host inside of torch.device(...), too: the file is read into its memory.
        tensor = torch.empty(stored.entry.shape, dtype=stored.entry.dtype, device="cpu")
        if tensor.nbytes:
            with opened(path) as file:
                file.read_into([memory_of(tensor)], stored.begin)
        return tensor

    return read
