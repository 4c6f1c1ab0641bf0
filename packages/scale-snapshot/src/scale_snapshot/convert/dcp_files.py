"""Reads a folder of torch.distributed.checkpoint (DCP), one tensor at a time, without running code in it.

Its `.metadata` is a pickle, and `dcp.load` runs whatever that says. Here it may build the classes that DCP itself puts
there, and nothing else; the chunks are files of torch.save, read with `weights_only`.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from scale_core.sharded_tensor.chunks import Chunk
from scale_core.state.dcp import put_at
from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.torch_files import load_stored
from scale_snapshot.format.coverage import check_coverage

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", name)
    for name in (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    )
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"),
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata alone."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib"):  # Where it was written; Python 3.13 has these classes elsewhere.
            module = "pathlib"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _path_text if name in _PATHS else getattr(importlib.import_module(module), name)


def _path_text(*parts: str) -> str:
    return "/".join(parts)


def read_dcp_folder(folder: Path, *, trust: bool = False) -> dict[Any, Any]:
    """Returns the tree that was given to `dcp.save`, its tensors as `LazyTensor`s.

    Args:
        folder: The folder, as given to `dcp.save`.
        trust: Build objects of any class, in its metadata and in its values, which may run any code.

    Raises:
        ValueError: Its metadata holds objects of other classes; a file is missing or shorter than it says; the chunks
            of a tensor are not all of it, each element once.
    """
    metadata = _read_metadata(folder, trust)
    try:
        return _tree(folder, metadata, trust)
    except (AttributeError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{folder / '.metadata'} is damaged: {type(error).__name__}: {error}") from error


def _read_metadata(folder: Path, trust: bool) -> Metadata:
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = (pickle.Unpickler if trust else _MetadataUnpickler)(file).load()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is a pickle that names {error}, which DCP does not put there, and building it may run any code "
            "that the file says. If you trust whoever made it: --trust (in Python trust=True)"
        ) from error
    except FileNotFoundError:
        raise ValueError(f"{folder} has no .metadata: it was never finished, save it again") from None
    except (EOFError, ValueError, TypeError, AttributeError, ImportError, LookupError, MemoryError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} holds a {type(metadata).__name__}, expected DCP's Metadata")
    return metadata


def _tree(folder: Path, metadata: Metadata, trust: bool) -> dict[Any, Any]:
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in metadata.storage_data.items()
    }
    for info in places.values():
        _check_place(folder, info)
    tree: dict[Any, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        value: Any
        if isinstance(entry, TensorStorageMetadata):
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            shape, dtype = tuple(entry.size), entry.properties.dtype
            located = [(offsets, sizes, places[name, offsets]) for offsets, sizes in chunks]
            check_coverage(f"{folder}: {name}", shape, [Chunk(*chunk) for chunk in chunks])
            stored = sum(info.length for _, _, info in located)
            if math.prod(shape) * dtype.itemsize > stored:
                raise ValueError(f"{folder}: {name} of shape {shape} {dtype} is said to be in {stored} bytes")
            value = LazyTensor(shape, dtype, _reader(folder, name, shape, dtype, located))
        else:
            value = _load(folder, places[name, None], trust)
        path = (metadata.planner_data or {}).get(name, (name,))
        put_at(tree, path if isinstance(path, tuple) else (name,), value)
    return {key: _with_lists(value) for key, value in tree.items()}


def _check_place(folder: Path, info: Any) -> None:
    name = info.relative_path
    if type(name) is not str or Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{folder / '.metadata'} names the file {name!r}, expected one of that folder")
    if info.transform_descriptors if hasattr(info, "transform_descriptors") else None:
        raise ValueError(f"{folder / name} is compressed ({info.transform_descriptors}): save it without extensions")
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        raise ValueError(f"{folder / name} is missing: {error.strerror}") from error
    if not (info.offset >= 0 and info.length >= 0 and info.offset + info.length <= size):
        raise ValueError(f"{folder / name} has {size} bytes, and {info.offset + info.length} are needed: it is cut off")


def _reader(
    folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[tuple[Any, Any, Any]]
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        full = torch.empty(shape, dtype=dtype)
        for offsets, sizes, info in chunks:
            part = _load(folder, info, trust=False)
            if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (sizes, dtype):
                raise ValueError(
                    f"{folder / info.relative_path}: the chunk of {name} at {offsets} is no {sizes} {dtype}"
                )
            Chunk(offsets, sizes).view_of(full).copy_(part)
        return full

    return read


def _load(folder: Path, info: Any, trust: bool) -> Any:
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        stored = file.read(info.length)
    return load_stored(io.BytesIO(stored), f"{folder / info.relative_path} from byte {info.offset} on", trust=trust)


def _with_lists(value: Any) -> Any:
    """A value in which dicts by number, made from lists, are lists again."""
    if not isinstance(value, Mapping):
        return value
    tree = {key: _with_lists(part) for key, part in value.items()}
    is_list = bool(tree) and all(type(key) is int for key in tree) and sorted(tree) == list(range(len(tree)))
    return [tree[key] for key in sorted(tree)] if is_list else tree
