"""Reads files of torch.save: a full state, or several files with an index.

Nothing but tensors and plain values is unpickled (`weights_only`). Files of the zip format are mapped into memory, so
that a tensor is read when it is written elsewhere; older ones are read at once. The zip format has a checksum of
each record, which torch.load does not look at: all of them are compared first.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.safetensors_files import read_files_of_folder

_DAMAGE = (RuntimeError, EOFError, LookupError, AttributeError, ImportError, TypeError, AssertionError, struct.error)
"""What torch.load raises on damaged files, besides ValueError."""

_REFUSED = re.compile(r"GLOBAL ([\w.]+)|<class '([\w.]+)'>")


def read_torch_file(path: Path, *, trust: bool = False) -> dict[Any, Any]:
    """Returns the content of a file, its tensors as `LazyTensor`s.

    Args:
        path: The file.
        trust: Build objects of any class, which may run any code that the file says.

    Raises:
        ValueError: It holds objects of other classes, it is damaged, or it is not a dict.
    """
    content = load_object(path, trust=trust)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, expected a state dict: save model.state_dict() and not the model"
        )
    tree: dict[Any, Any] = lazily(content, path)
    return tree


def read_torch_folder(folder: Path, *, trust: bool = False) -> dict[Any, Any]:
    """Returns the tensors of a folder of `pytorch_model*.bin`, by name."""
    names = [path.name for path in folder.glob("pytorch_model*.bin")]
    return read_files_of_folder(folder, names, partial(read_torch_file, trust=trust))


def load_object(path: Path, *, trust: bool = False, stand_ins: AbstractContextManager[object] | None = None) -> Any:
    """The result of torch.load for a file; `stand_ins` is a context that allows more classes."""
    with stand_ins if stand_ins is not None else nullcontext():
        return load_stored(path, str(path), trust=trust)


def load_stored(source: Path | IO[bytes], place: str, *, trust: bool) -> Any:
    """The result of torch.load for a file, or for one in memory; a ValueError names the mistake at `place`."""
    is_zip = zipfile.is_zipfile(source)
    if is_zip:
        _check_crc32(source, place)
    if not isinstance(source, Path):
        source.seek(0)
    mmap = is_zip and isinstance(source, Path)
    try:
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust)
    except pickle.UnpicklingError as error:
        names = sorted({match[1] or match[2] for match in _REFUSED.finditer(str(error))})
        if not names:
            raise ValueError(f"{place} can't be read: {str(error).splitlines()[-1]}") from error
        raise ValueError(
            f"{place} holds objects of {', '.join(names)}, and building them may run any code that the file says. If "
            "you trust whoever made it: --trust (in Python trust=True); otherwise save tensors, numbers and texts alone"
        ) from error
    except _DAMAGE as error:
        raise ValueError(
            f"{place} can't be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def _check_crc32(source: Path | IO[bytes], place: str) -> None:
    """Reads all records of a zip file, a piece at a time, and compares their checksums."""
    try:
        with zipfile.ZipFile(source) as records:
            # torch.serialization.set_crc32_options(False) leaves zeros there.
            has_checksums = any(record.CRC for record in records.infolist())
            damaged = records.testzip() if has_checksums else None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, *_DAMAGE) as error:
        raise ValueError(f"{place} is damaged: {type(error).__name__}: {error}") from error
    if damaged is not None:
        raise ValueError(f"{place} is damaged: the checksum (CRC32) of its record {damaged} differs: copy it again")


def lazily(value: Any, path: Path) -> Any:
    """A tree with its tensors as `LazyTensor`s."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            raise ValueError(
                f"{path} holds a {type(value).__name__} of layout {value.layout}, expected dense tensors: save "
                "model.state_dict() of all ranks together, as torch.distributed.checkpoint.save does"
            )
        return of_tensor(value)
    if isinstance(value, Mapping):
        return {key: lazily(part, path) for key, part in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [lazily(part, path) for part in value]
    return value


def of_tensor(tensor: Tensor) -> LazyTensor:
    """A tensor that is in memory, or mapped into it."""
    tensor = tensor.detach()
    origin = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else None
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.resolve_conj().resolve_neg(), origin)
