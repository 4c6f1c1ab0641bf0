"""Reads safetensors: one file, or a folder of several with an index, as Hugging Face writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.naming import SNAPSHOT_MARK
from scale_snapshot.foreign import index_of
from scale_snapshot.format.safetensors_io import DTYPES


def read_safetensors_file(path: Path) -> dict[str, Any]:
    """Returns the tensors of a file by name, and the entries of its metadata by `writers`.

    Raises:
        ValueError: It is damaged, or has a dtype that torch does not know.
    """
    tree: dict[str, Any] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                part = file.get_slice(name)
                shape, word = tuple(part.get_shape()), part.get_dtype()
                if word not in DTYPES:
                    raise ValueError(f"{path}: {name} has the dtype {word}, expected one of {', '.join(DTYPES)}")
                tree[name] = LazyTensor(shape, DTYPES[word], _reader(path, name))
            mark = (file.metadata() or {}).get(SNAPSHOT_MARK)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    return tree if mark is None else {**tree, SNAPSHOT_MARK: mark}


def read_safetensors_folder(folder: Path) -> dict[str, Any]:
    """Returns the tensors of all files of a folder by name.

    Raises:
        ValueError: A file is missing or damaged, a tensor stands in two of them, or in another one than the index says.
    """
    index = index_of(folder)
    files = (
        sorted({*index.values()}) if index is not None else sorted(path.name for path in folder.glob("*.safetensors"))
    )
    tree: dict[str, Any] = {}
    for name in files:
        if not (folder / name).is_file():
            why = "it is a link to nothing" if index is None else "the index of the folder names it"
            raise ValueError(f"{folder / name} is missing, and {why}: copy the file there again")
        part = read_safetensors_file(folder / name)
        if twice := tree.keys() & part.keys() - {SNAPSHOT_MARK}:
            raise ValueError(f"{min(twice)} is in {name} and in another file of {folder}: convert one file alone")
        wrong = [key for key in part if index is not None and key != SNAPSHOT_MARK and index.get(key) != name]
        if wrong:
            raise ValueError(f"{folder}: {wrong[0]} is in {name}, and its index says {(index or {}).get(wrong[0])}")
        tree.update(part)
    if missing := (index or {}).keys() - tree.keys():
        raise ValueError(f"{folder} has an index with {min(missing)}, which no file has")
    return tree


def _reader(path: Path, name: str) -> Any:
    def read() -> Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return read
