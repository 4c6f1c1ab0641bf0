"""The manifest of a snapshot: a JSON file, written last, that makes a directory a snapshot.

It may come from a stranger, so it is data and never code, and is checked before use: file names can't leave the
directory, and the files must have the recorded lengths.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from scale_core.snapshot.safetensors_io import DTYPES, NAMES
from scale_core.state.chunks import Chunk
from scale_core.state.validation import SavedTensor

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

FILE = "manifest.json"
FORMAT = "scale-snapshot"
VERSION = 1

_TENSOR_FILE = re.compile(r"rank-\d{5,}\.safetensors")


@dataclass(frozen=True)
class SavedChunk:
    """A saved chunk of a tensor: its file, and the byte at which its data begins."""

    chunk: Chunk
    file: str
    begin: int


@dataclass(frozen=True)
class Manifest:
    """The content of a snapshot."""

    step: int  # The training step that it was taken after
    world_size: int  # How many ranks wrote it
    tensors: Mapping[str, SavedTensor]  # Each tensor's shape and dtype
    # Where the chunks of each tensor lie; together they are the tensor, each element once.
    chunks: Mapping[str, list[SavedChunk]]
    values: Mapping[str, Any]  # What is no tensor
    extra: Any  # What the caller added
    sizes: Mapping[str, int]  # The length of each file in bytes

    @property
    def saved(self) -> dict[str, Any]:
        """Each key with its `SavedTensor`, or with its value where that is no tensor."""
        return {**self.tensors, **self.values}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes a manifest and returns when it is on the disk."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": dict(manifest.sizes),
        "tensors": {
            key: {
                "dtype": NAMES[saved.dtype],
                "shape": list(saved.shape),
                "boxes": [
                    {
                        "offsets": list(at.chunk.offsets),
                        "sizes": list(at.chunk.sizes),
                        "file": at.file,
                        "begin": at.begin,
                    }
                    for at in manifest.chunks[key]
                ],
            }
            for key, saved in manifest.tensors.items()
        },
        "values": dict(manifest.values),
        "extra": manifest.extra,
    }
    with (directory / FILE).open("x", encoding="utf-8") as file:
        json.dump(document, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Reads a snapshot's manifest and checks the files beside it; ValueError names what is wrong."""
    try:
        document = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} has no {FILE}: it was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{directory / FILE} can't be read: {type(error).__name__}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{directory / FILE} is no manifest: expected the format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{directory} is of version {document.get('version')}, this program reads version {VERSION}: "
            "install the version of scale-core that wrote it"
        )
    try:
        manifest = _parsed(document)
        check_coverage(manifest)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{directory / FILE} is damaged: {type(error).__name__}: {error}") from error
    _check_files(directory, manifest)
    return manifest


def _parsed(document: Mapping[str, Any]) -> Manifest:
    tensors = {
        key: SavedTensor(_naturals(entry["shape"]), DTYPES[entry["dtype"]])
        for key, entry in document["tensors"].items()
    }
    chunks = {
        key: [
            SavedChunk(Chunk(_naturals(at["offsets"]), _naturals(at["sizes"])), at["file"], _natural(at["begin"]))
            for at in entry["boxes"]
        ]
        for key, entry in document["tensors"].items()
    }
    return Manifest(
        step=_natural(document["step"]),
        world_size=_natural(document["world_size"]),
        tensors=tensors,
        chunks=chunks,
        values=dict(document["values"]),
        extra=document["extra"],
        sizes={str(name): _natural(size) for name, size in document["files"].items()},
    )


def check_coverage(manifest: Manifest) -> None:
    """Checks that the chunks of each tensor lie within it and have as many elements as it has."""
    # (That no two of them overlap, the planner proves when they are written.)
    for key, saved in manifest.tensors.items():
        volume = 0
        for at in manifest.chunks[key]:
            if len(at.chunk.offsets) != len(saved.shape) or len(at.chunk.sizes) != len(saved.shape):
                raise ValueError(
                    f"{key}: a chunk of {len(at.chunk.sizes)} dimensions in a tensor of shape {saved.shape}"
                )
            if any(o + s > n for o, s, n in zip(at.chunk.offsets, at.chunk.sizes, saved.shape, strict=True)):
                raise ValueError(f"{key}: the chunk {at.chunk} lies outside the shape {saved.shape}")
            end = at.begin + math.prod(at.chunk.sizes) * saved.dtype.itemsize
            if end > manifest.sizes[at.file]:
                raise ValueError(f"{key}: needs {at.file} up to byte {end}, which has {manifest.sizes[at.file]}")
            volume += math.prod(at.chunk.sizes)
        if volume != math.prod(saved.shape):
            raise ValueError(f"{key}: {volume} elements were saved of {math.prod(saved.shape)}")


def _check_files(directory: Path, manifest: Manifest) -> None:
    for name, size in manifest.sizes.items():
        if not _TENSOR_FILE.fullmatch(name):
            raise ValueError(f"{directory / FILE} names the file {name!r}, which no snapshot has")
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise ValueError(f"{directory / name} is missing: {error.strerror}") from error
        if found != size:
            raise ValueError(f"{directory / name} has {found} bytes, {size} were written")


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a number of at least 0, got {value!r}")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    return tuple(_natural(value) for value in values)
