"""Tensors in a safetensors file, written and read one at a time.

The format is eight bytes with the length of a JSON header, the header (name → dtype, shape, byte range), and the data.
It is written here, by its documented layout, because a checkpoint must not need twice the memory of what it saves, nor
execute what it reads, nor trust what it reads: every length is checked against the file.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorEntry(NamedTuple):
    """The header entry of a tensor, known before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, entries: Sequence[TensorEntry], produce: Callable[[int], Tensor]
) -> dict[str, tuple[int, int]]:
    """Writes a safetensors file and returns when it is on the disk."""
    header, ranges, position = {}, {}, 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise TypeError(
                f"{entry.name}: {entry.dtype} can't be written, expected one of {', '.join(NAMES.values())}"
            )
        ranges[entry.name] = (position, position + entry.num_bytes)
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": list(ranges[entry.name]),
        }
        position += entry.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index, entry in enumerate(entries):
            tensor = produce(index).detach().to("cpu").contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise AssertionError(f"{entry} was announced, {tensor.dtype} {tuple(tensor.shape)} came")
            file.write(_bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())
    start = 8 + len(text)
    return {name: (start + begin, start + end) for name, (begin, end) in ranges.items()}


def read_rows(path: Path, begin: int, entry: TensorEntry, first: int, count: int) -> Tensor:
    """Reads the rows `[first, first + count)` of a tensor; a 0-dim tensor has one row."""
    shape = (count, *entry.shape[1:]) if entry.shape else ()
    tensor = torch.empty(shape, dtype=entry.dtype)
    row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    with path.open("rb", buffering=0) as file:
        file.seek(begin + first * row_bytes)
        buffer, filled = memoryview(_bytes_of(tensor)), 0
        while filled < len(buffer):
            got = file.readinto(buffer[filled:])
            if not got:
                raise EOFError(f"{path.name} ends inside {entry.name}: {len(buffer)} bytes expected, {filled} found")
            filled += got
    return tensor


def _bytes_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a contiguous CPU tensor; numpy's way would need numpy, which is no dependency."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
