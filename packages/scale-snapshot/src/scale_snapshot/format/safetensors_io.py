"""Safetensors files: written one tensor at a time, with checksums of all bytes, and read in place.

The format is eight bytes with the length of a JSON header, the header (name → dtype, shape, byte range), and the data.
It is written here, by its documented layout, because a checkpoint must not need twice the memory of its tensors. What
is read goes by the manifest. The header says which save a file belongs to, and which chunks are where: a file whose
header says something else than the manifest raises an error.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_snapshot.format.checksums import BLOCK_BYTES, BlockChecksums
from scale_snapshot.format.stored_file import StoredFile

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The dtypes of the safetensors format, by its words."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

SAVED_DTYPES = DTYPES | {"C128": torch.complex128}
"""The dtypes of snapshots. Safetensors has no word for complex128, so it stands in a file as pairs of F64."""
SAVED_NAMES = {dtype: name for name, dtype in SAVED_DTYPES.items()}

_PIECE_BYTES = 1 << 20  # hashed and written at once
_SYNC_SECONDS = 30.0
_BUFFERED_BYTES = 64 << 10  # Less than a piece, so that pieces are not copied, and small tensors are written together.
_HEADER_LIMIT_BYTES = 100_000_000  # The limit of the safetensors library.


class TensorEntry(NamedTuple):
    """The header entry of a tensor, known before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileHeader(NamedTuple):
    """The first bytes of a file, and their content."""

    data: bytes
    begins: list[int]  # Where the data of each tensor begins
    num_bytes: int  # Of the file

    @classmethod
    def of(cls, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> FileHeader:
        """The header of a file with these tensors, one after the other."""
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        begins, position = [], 0
        for entry in entries:
            if entry.dtype not in SAVED_NAMES:
                raise TypeError(
                    f"{entry.name}: {entry.dtype} can't be written: convert it to one of {', '.join(SAVED_DTYPES)}, or "
                    "save its bytes, .view(torch.uint8)"
                )
            end = position + entry.num_bytes
            is_in_pairs = entry.dtype not in NAMES
            header[entry.name] = {
                "dtype": "F64" if is_in_pairs else NAMES[entry.dtype],
                "shape": [*entry.shape, 2] if is_in_pairs else list(entry.shape),
                "data_offsets": [position, end],
            }
            begins.append(position)
            position = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        return cls(struct.pack("<Q", len(text)) + text, [start + begin for begin in begins], start + position)


class WrittenFile(NamedTuple):
    """The content of a file: its length, the checksum of each block, and where the data of each tensor begins."""

    num_bytes: int
    block_bytes: int
    checksums: list[str]
    begins: list[int]


def write_tensors(
    path: Path,
    entries: Sequence[TensorEntry],
    produce: Callable[[int], Tensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> WrittenFile:
    """Writes a safetensors file and returns when it is on the disk.

    Args:
        path: The file, which is not there yet.
        entries: Its tensors.
        produce: Returns the tensor of an entry, by number.
        metadata: Further entries of its header.
        progress: Called with the number of bytes that were written since the last call.
    """
    header = FileHeader.of(entries, metadata)
    hashed = BlockChecksums(BLOCK_BYTES)
    with path.open("xb", buffering=_BUFFERED_BYTES) as file:
        synced = time.monotonic()

        def write(data: memoryview) -> None:
            nonlocal synced
            for begin in range(0, len(data), _PIECE_BYTES):  # The hashed piece is still in the processor's cache.
                piece = data[begin : begin + _PIECE_BYTES]
                hashed.update(piece)
                file.write(piece)
                if time.monotonic() - synced > _SYNC_SECONDS:  # Else a slow disk has all of it to do at the end.
                    file.flush()
                    os.fsync(file.fileno())
                    synced = time.monotonic()
                progress(len(piece))

        write(memoryview(header.data))
        for index, entry in enumerate(entries):
            # A conjugated or negated view has its values by a flag, and others in its memory.
            tensor = produce(index).detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise AssertionError(f"{entry} was announced, {tensor.dtype} {tuple(tensor.shape)} came")
            write(memory_of(tensor))
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(header.num_bytes, BLOCK_BYTES, hashed.digests(), header.begins)


class StoredTensor(NamedTuple):
    """A tensor of a file, by the file's header."""

    entry: TensorEntry
    begin: int  # The byte at which its data begins


def read_entries(file: StoredFile) -> list[StoredTensor]:
    """The tensors of a file; a ValueError says why it is not a complete safetensors file.

    The format forbids holes and bytes of two tensors. A damaged header would give a tensor the values of another one.
    """
    start, header = _read_header(file)
    tensors = [_stored_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
    position, previous = 0, "the header"
    for entry, begin in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.entry.num_bytes)):
        if begin != position:
            fault = "overlaps with" if begin < position else "leaves a hole after"
            raise ValueError(f"{entry.name} {fault} {previous}: it begins at byte {begin}, expected {position}")
        position, previous = begin + entry.num_bytes, entry.name
        if start + position > file.num_bytes:
            raise ValueError(
                f"it is cut: {entry.name} ends at byte {start + position}, and the file has {file.num_bytes}"
            )
    if start + position != file.num_bytes:
        raise ValueError(f"{previous} ends at byte {start + position}, and the file has {file.num_bytes}")
    return [tensor._replace(begin=start + tensor.begin) for tensor in tensors]


def _stored_tensor(name: str, location: Any) -> StoredTensor:
    """A tensor by its entry in the header, with its begin in the data."""
    try:
        word, shape, (begin, end) = location["dtype"], tuple(location["shape"]), location["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} has a header entry without dtype, shape and two data_offsets: {location!r}"
        ) from error
    if word not in DTYPES:
        raise ValueError(f"{name} has the dtype {word}, expected one of {', '.join(DTYPES)}")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(
            f"{name} has the shape {shape} and the bytes {begin} to {end}, expected whole numbers from 0 on"
        )
    entry = TensorEntry(name, DTYPES[word], shape)
    if end - begin != entry.num_bytes:
        raise ValueError(f"{name} of shape {entry.shape} in {word} needs {entry.num_bytes} bytes, got {end - begin}")
    return StoredTensor(entry, begin)


def read_metadata(file: StoredFile) -> dict[str, str]:
    """The metadata in the header of a file; a ValueError says why it is not a safetensors file."""
    return {str(key): str(value) for key, value in _read_header(file)[1]["__metadata__"].items()}


def _read_header(file: StoredFile) -> tuple[int, dict[str, Any]]:
    """Where the data of a file begins, and its header, which has metadata."""
    if file.num_bytes < 8:
        raise ValueError(f"no safetensors file: {file.num_bytes} bytes are too short")
    length = struct.unpack("<Q", file.read(8, 0))[0]
    if length > min(file.num_bytes - 8, _HEADER_LIMIT_BYTES):
        raise ValueError(f"no safetensors file: a header of {length} bytes in {file.num_bytes}")
    try:
        header = json.loads(file.read(length, 8).decode(), object_pairs_hook=without_duplicates)
        header.setdefault("__metadata__", {}).items()
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"no safetensors file: its header can't be read ({type(error).__name__}: {error})") from error
    return 8 + length, header


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads`; a ValueError names a key that stands twice, of which one would be lost."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} stands twice in one object")
    return unique


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; numpy's way would need numpy, which is not a dependency."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
