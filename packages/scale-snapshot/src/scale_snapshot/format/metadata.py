"""The manifest of a snapshot: a JSON file, written last, that makes a directory a snapshot.

Its first line is the same in every version of the format, and has the checksum of all the rest. So damage is
distinguished from a newer version, which is left alone. A manifest may come from a stranger: it is data and never
code, and is checked before use. File names can't leave the directory, nothing is larger than the files, and each
tensor's chunks are proved to be the tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from scale_core.sharded_tensor.chunks import Chunk
from scale_core.state.validation import SavedTensor
from scale_snapshot.errors import DamagedSnapshotError, NewerSnapshotError, SnapshotError
from scale_snapshot.format.checksums import checksum, num_blocks
from scale_snapshot.format.coverage import check_coverage, slices_of
from scale_snapshot.format.safetensors_io import SAVED_DTYPES, SAVED_NAMES, without_duplicates
from scale_snapshot.format.stored_file import is_damage, opened, retry

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

INDEX = "scale.objects"
"""The key under which a snapshot of `save` says which objects it holds; who loads a flat state may leave it out."""
FILE = "manifest.json"
FORMAT = "scale-snapshot"
VERSION = 2
LIMIT_BYTES = 256 << 20
"""No manifest is larger: read, it takes some 20 times its length."""

_DIRECTORY = re.compile(r"step-(\d{8,})")
_TENSOR_FILE = re.compile(r"rank-\d{5,9}\.safetensors")
_FIRST_LINE = re.compile(
    rb'\{"format": "scale-snapshot", "version": ([1-9][0-9]{0,8}), "checksum": "([0-9a-f]{32})",\n', re.ASCII
)
_UNPUBLISHED = b'{"format": "scale-snapshot", "version": 1, '
_SAVE = re.compile(r"[0-9a-f]{32}")
_DIMS = 64
_LARGEST = 2**63


@dataclass(frozen=True)
class SavedChunk:
    """A saved chunk of a tensor: its file, and the byte at which its data begins."""

    chunk: Chunk
    file: str
    begin: int


@dataclass(frozen=True)
class SavedFile:
    """A file of a snapshot: its length in bytes, and the checksum of each block of it."""

    num_bytes: int
    checksums: list[str]


@dataclass(frozen=True)
class Manifest:
    """The content of a snapshot."""

    save: str  # 32 hexadecimal digits that no other save has; each file has them too
    step: int  # The training step that it was taken after
    tensors: Mapping[str, SavedTensor]  # Each tensor's shape and dtype
    # Where the chunks of each tensor lie; together they are the tensor, each element once.
    chunks: Mapping[str, list[SavedChunk]]
    values: Mapping[str, Any]  # Values that are no tensors
    extra: JSON  # Of the caller, as `encode_extra` returns it
    files: Mapping[str, SavedFile]  # One for each rank that wrote it
    block_bytes: int  # Of the checksums

    @property
    def saved(self) -> dict[str, Any]:
        """Each key with its `SavedTensor`, or with its value where that is not a tensor."""
        return {**self.tensors, **self.values}

    @cached_property
    def _chunks_by_file(self) -> Mapping[str, list[tuple[str, SavedChunk]]]:
        chunks_of_files: dict[str, list[tuple[str, SavedChunk]]] = {name: [] for name in self.files}
        for key, chunks in self.chunks.items():
            for saved_chunk in chunks:
                chunks_of_files[saved_chunk.file].append((key, saved_chunk))
        return chunks_of_files

    def labels_in(self, file: str) -> set[tuple[int, str]]:
        """The byte at which each chunk of a file begins, and the name that it has there."""
        return {
            (saved_chunk.begin, label_of(key, saved_chunk.chunk)) for key, saved_chunk in self._chunks_by_file[file]
        }

    def tensors_within(self, file: str, begin: int, end: int) -> Iterator[str]:
        """The tensors that have data in these bytes of a file."""
        for key, chunks in self.chunks.items():
            size = self.tensors[key].dtype.itemsize
            if any(
                saved_chunk.file == file
                and saved_chunk.begin < end
                and begin < saved_chunk.begin + math.prod(saved_chunk.chunk.sizes) * size
                for saved_chunk in chunks
            ):
                yield key


def label_of(key: str, chunk: Chunk) -> str:
    """The name of a chunk in a file, as a Python slice: `model.weight[2:4, 0:8]`."""
    return f"{key}[{slices_of(chunk)}]"


def check_manifest(manifest: Manifest) -> None:
    """Checks that each tensor has all its elements, once each, within the files; a ValueError names another one."""
    for key, saved in manifest.tensors.items():
        for saved_chunk in manifest.chunks[key]:
            end = saved_chunk.begin + math.prod(saved_chunk.chunk.sizes) * saved.dtype.itemsize
            if end > manifest.files[saved_chunk.file].num_bytes:
                raise ValueError(
                    f"{key}: needs {saved_chunk.file} up to byte {end}, which has "
                    f"{manifest.files[saved_chunk.file].num_bytes}"
                )
        check_coverage(key, saved.shape, [saved_chunk.chunk for saved_chunk in manifest.chunks[key]])
    for name, file in manifest.files.items():
        expected = num_blocks(file.num_bytes, manifest.block_bytes)
        if len(file.checksums) != expected:
            raise ValueError(f"{name}: {len(file.checksums)} checksums of {expected} blocks")


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes a manifest and returns when it is on the disk."""
    names = {name: index for index, name in enumerate(manifest.files)}
    document = {
        "save": manifest.save,
        "step": manifest.step,
        "block_bytes": manifest.block_bytes,
        "files": [
            {"name": name, "bytes": file.num_bytes, "checksums": file.checksums}
            for name, file in manifest.files.items()
        ],
        "tensors": {
            key: {
                "dtype": SAVED_NAMES[saved.dtype],
                "shape": list(saved.shape),
                # offsets, sizes, the number of the file, the byte at which the data begins
                "chunks": [
                    [
                        list(saved_chunk.chunk.offsets),
                        list(saved_chunk.chunk.sizes),
                        names[saved_chunk.file],
                        saved_chunk.begin,
                    ]
                    for saved_chunk in manifest.chunks[key]
                ],
            }
            for key, saved in manifest.tensors.items()
        },
        "values": dict(manifest.values),
        "extra": manifest.extra,
    }
    encoded = json.dumps(document, allow_nan=False)[1:].encode() + b"\n"
    first = _first_line(VERSION, checksum(_first_line(VERSION, ""), encoded))
    if len(first) + len(encoded) > LIMIT_BYTES:
        raise ValueError(
            f"the manifest has {len(first) + len(encoded):,} bytes, and {LIMIT_BYTES:,} are the limit: "
            "put large values into tensors"
        )
    with (directory / FILE).open("xb") as file:
        file.write(first)
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())


def _first_line(version: int, digits: str) -> bytes:
    return f'{{"format": "{FORMAT}", "version": {version}, "checksum": "{digits}",\n'.encode()


def read_manifest(
    directory: Path,
    progress: Callable[[int], None] = lambda num_bytes: None,
    retry_seconds: float | None = None,
) -> Manifest:
    """Reads a snapshot's manifest and compares the lengths of the files next to it; their data is not read.

    `progress` is called as by `verify_snapshot`, and `retry_seconds` is as of `retry`.

    Raises:
        DamagedSnapshotError: The files differ from those that were written.
        NewerSnapshotError: It was written by a newer version.
        SnapshotError: It was written by a version that was never released, or it is too large.
        OSError: It can't be read at present: permissions, too many open files.
    """
    path = directory / FILE
    document = _checked_document(directory, _read_document(path, progress, retry_seconds))
    try:
        manifest = _parsed(_load_json(document))
        check_manifest(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, RecursionError) as error:
        raise DamagedSnapshotError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if (named := _DIRECTORY.fullmatch(directory.name)) and int(named[1]) != manifest.step:
        raise DamagedSnapshotError(
            f"{directory} has the snapshot of step {manifest.step}: rename it to step-{manifest.step:08d}"
        )
    check_files(directory, manifest, progress, retry_seconds)
    return manifest


def _read_document(path: Path, progress: Callable[[int], None], retry_seconds: float | None) -> bytes:
    try:
        with opened(path, progress, retry_seconds) as file:
            if file.num_bytes > LIMIT_BYTES:
                raise SnapshotError(
                    f"{path} has {file.num_bytes:,} bytes, and {LIMIT_BYTES:,} are the limit of a manifest"
                )
            return file.read(file.num_bytes, 0)
    except FileNotFoundError:
        raise DamagedSnapshotError(f"{path.parent} has no {FILE}: it is not a complete snapshot") from None
    except (OSError, EOFError) as error:
        if not is_damage(error):
            raise
        raise DamagedSnapshotError(f"{path} can't be read: {type(error).__name__}: {error}") from error


def _checked_document(directory: Path, data: bytes) -> bytes:
    """The JSON in a manifest, when checksum and version are right."""
    match = _FIRST_LINE.match(data)
    if match is None:
        if data.startswith(_UNPUBLISHED):
            raise SnapshotError(
                f"{directory} is of format version 1, which was never released; this scale-core reads version "
                f"{VERSION}: write it again with the program that wrote it"
            )
        raise DamagedSnapshotError(f"{directory / FILE} is damaged: its first line does not begin a manifest")
    version = int(match[1])
    if checksum(_first_line(version, ""), memoryview(data)[match.end() :]) != match[2].decode():
        raise DamagedSnapshotError(f"{directory / FILE} is damaged: its checksum differs")
    if version > VERSION:
        raise NewerSnapshotError(
            f"{directory} was written by a newer scale-core, format version {version}; this one reads version "
            f"{VERSION}: upgrade scale-core"
        )
    if version < VERSION:
        raise SnapshotError(f"{directory} is of format version {version}; this scale-core reads version {VERSION}")
    return data


def _load_json(data: bytes) -> Any:
    return json.loads(data, object_pairs_hook=without_duplicates, parse_float=_finite, parse_constant=_refuse_constant)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _parsed(document: Mapping[str, Any]) -> Manifest:
    files: dict[str, SavedFile] = {}
    for entry in document["files"]:
        if not _TENSOR_FILE.fullmatch(entry["name"]) or entry["name"] in files:
            raise ValueError(f"it names the file {entry['name']!r}, which no snapshot has, or twice")
        files[entry["name"]] = SavedFile(_natural(entry["bytes"]), [str(digits) for digits in entry["checksums"]])
    names = list(files)
    tensors, chunks = {}, {}
    for key, entry in document["tensors"].items():
        tensors[key] = SavedTensor(_naturals(entry["shape"]), SAVED_DTYPES[entry["dtype"]])
        chunks[key] = [
            SavedChunk(Chunk(_naturals(offsets), _naturals(sizes)), names[_natural(number)], _natural(begin))
            for offsets, sizes, number, begin in entry["chunks"]
        ]
    values = document["values"]
    if not isinstance(values, dict) or values.keys() & tensors.keys():
        raise ValueError("its values are not a dict, or have the names of tensors")
    if not _SAVE.fullmatch(document["save"]):
        raise ValueError(f"the identity of the save is {document['save']!r}")
    block_bytes = _natural(document["block_bytes"])
    if block_bytes < 1:
        raise ValueError("blocks of 0 bytes")
    return Manifest(
        save=document["save"],
        step=_natural(document["step"]),
        tensors=tensors,
        chunks=chunks,
        values=values,
        extra=document["extra"],
        files=files,
        block_bytes=block_bytes,
    )


def check_files(
    directory: Path,
    manifest: Manifest,
    progress: Callable[[int], None] = lambda num_bytes: None,
    retry_seconds: float | None = None,
) -> None:
    """Compares the lengths of the files with the recorded ones."""
    for name, file in manifest.files.items():
        path = directory / name
        try:
            file_stat = retry(path.lstat, path, progress, retry_seconds)
        except OSError as error:
            if not is_damage(error):
                raise
            raise DamagedSnapshotError(f"{path} is missing: {error.strerror}") from error
        if not stat.S_ISREG(file_stat.st_mode):
            raise DamagedSnapshotError(f"{path} is a link or no file: put the file itself there")
        if file_stat.st_size != file.num_bytes:
            raise DamagedSnapshotError(f"{path} has {file_stat.st_size} bytes, {file.num_bytes} were written")


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise TypeError(f"expected a whole number from 0 up to 2^63, got {str(value)[:40]}")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    if len(values) > _DIMS:
        raise ValueError(f"{len(values)} dimensions")
    return tuple(_natural(value) for value in values)
