"""The files of a folder of weights: their names, their content, and the layout of new ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scale_core.state.validation import SavedTensor
from scale_snapshot.errors import ForeignCheckpointError
from scale_snapshot.foreign import Format, read_index, recognize
from scale_snapshot.format.safetensors_io import FileHeader, TensorEntry, read_entries
from scale_snapshot.format.stored_file import opened

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Place(NamedTuple):
    """Where the data of a tensor begins."""

    file: str
    begin: int


@dataclass(frozen=True)
class WeightFolder:
    """The tensors of a folder, by their names in the files."""

    tensors: Mapping[str, SavedTensor]
    places: Mapping[str, Place]


def open_folder(path: Path) -> WeightFolder:
    """Reads the index and the headers of a folder, or of one file.

    Raises:
        FileNotFoundError: There is nothing, or nothing that is known.
        ForeignCheckpointError: It is a checkpoint of another format; the error says how it is converted.
        ValueError: A file is missing or damaged, or has other tensors than the index says.
    """
    index = read_index(path / INDEX) if (path / INDEX).is_file() else None
    tensors: dict[str, SavedTensor] = {}
    places: dict[str, Place] = {}
    for file in _files(path, index):
        # A folder of the hub's cache has links, and reading follows none.
        actual = Path(os.path.realpath(file))
        if not actual.is_file():
            raise ValueError(f"{file} is missing, which {INDEX} names: download or copy it again")
        try:
            with opened(actual) as stored:
                entries = read_entries(stored)
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise ValueError(f"{file} is damaged: {error}: download or copy it again") from error
        for entry, begin in entries:
            if index is not None and index.get(entry.name) != file.name:
                raise ValueError(f"{entry.name} is in {file}, and {INDEX} says {index.get(entry.name)}")
            tensors[entry.name] = SavedTensor(entry.shape, entry.dtype)
            places[entry.name] = Place(str(actual), begin)
    if missing := (index or {}).keys() - tensors.keys():
        raise ValueError(f"{path / INDEX} has {min(missing)}, which no file has: download or copy the folder again")
    return WeightFolder(tensors, places)


def _files(path: Path, index: Mapping[str, str] | None) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if index is not None:
        return [path / name for name in sorted({*index.values()})]
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    foreign = recognize(path)
    if foreign is not None and foreign.format is not Format.SAFETENSORS_FOLDER:
        raise ForeignCheckpointError(foreign.advice(to="safetensors"))
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) == 1:
        return files
    listing = ", ".join(file.name for file in files) or "no safetensors file"
    raise FileNotFoundError(
        f"{path} has neither {INDEX} nor {WEIGHTS}, but {listing}: pass the folder that save_pretrained or a download "
        "from the hub has left, or one file"
    )


@dataclass(frozen=True)
class NewFile:
    """A file that is to be written."""

    name: str
    header: FileHeader
    tensors: list[str]  # in the order of their data


@dataclass(frozen=True)
class FolderLayout:
    """The content of a new folder.

    Attributes:
        files: The files of weights.
        places: Where each tensor goes.
        index: The content of the index, or None where there is one file.
    """

    files: list[NewFile]
    places: dict[str, Place]
    index: str | None

    @staticmethod
    def of(tensors: Mapping[str, SavedTensor], max_shard_bytes: int) -> FolderLayout:
        """Lays tensors out in files of at most so many bytes, in order; a larger tensor has a file of its own.

        Args:
            tensors: By their names.
            max_shard_bytes: Of the data of a file.
        """
        entries = [TensorEntry(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        parts = _split_by_size(entries, max_shard_bytes)
        names = (
            [WEIGHTS] if len(parts) == 1 else [_file_name(number, len(parts)) for number in range(1, len(parts) + 1)]
        )
        files: list[NewFile] = []
        places: dict[str, Place] = {}
        for name, part in zip(names, parts, strict=True):
            # Larger elements first: readers want each tensor to begin at a multiple of its element's size.
            part.sort(key=lambda entry: -entry.dtype.itemsize)
            header = FileHeader.of(part, {"format": "pt"})
            files.append(NewFile(name, header, [entry.name for entry in part]))
            places.update({entry.name: Place(name, begin) for entry, begin in zip(part, header.begins, strict=True)})
        if len(files) == 1:
            return FolderLayout(files, places, None)
        about = {"total_size": sum(entry.num_bytes for entry in entries)}
        index = {"metadata": about, "weight_map": {name: places[name].file for name in sorted(places)}}
        return FolderLayout(files, places, json.dumps(index, indent=2) + "\n")


def _file_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _split_by_size(entries: Iterable[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    """At least one list, also of nothing."""
    parts: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if parts[-1] and filled + entry.num_bytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(entry)
        filled += entry.num_bytes
    return parts


def size_in_bytes(size: int | str) -> int:
    """A size as a number, or as a text.

    >>> size_in_bytes("5GB"), size_in_bytes("1.5 MiB"), size_in_bytes(100)
    (5000000000, 1572864, 100)

    Raises:
        ValueError: It is none, or less than 1.
    """
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])
    if type(size) is not int or size < 1:
        raise ValueError(f'expected max_shard_size as a number of bytes, or a text such as "5GB", got {size!r}')
    return size
