"""Writes a state as a snapshot, as safetensors, or as a folder of torch.distributed.checkpoint (DCP).

Each is written to another name and renamed when it is complete, and no tensor is in memory before its turn.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from scale_core.state.validation import SavedTensor
from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.naming import SNAPSHOT_MARK, StoredState
from scale_snapshot.format.safetensors_io import NAMES, TensorEntry, write_tensors
from scale_snapshot.format.state_codec import decode_extra
from scale_snapshot.pretrained.folder import INDEX, FolderLayout
from scale_snapshot.snapshot import save_snapshot

MAX_SHARD_BYTES = 5 << 30
"""The size of a safetensors file above which there are several; Hugging Face's save_pretrained has the same."""


def write_snapshot(state: StoredState, destination: Path) -> Path:
    """Writes `destination/step-<step>`; of tied tensors the first name alone, as the state dicts of scale have it."""
    _check_dtypes(state.tensors)
    tensors = {key: tensor for key, tensor in state.tensors.items() if key not in state.tied}
    return save_snapshot(destination, state.step, {**tensors, **state.values}, extra=decode_extra(state.extra))


def write_safetensors(
    state: StoredState, destination: Path, *, model_only: bool, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Path:
    """Writes one file if `destination` ends in .safetensors, or else a folder, with an index where it has several."""
    tensors = _chosen(state, model_only)
    _check_dtypes(tensors)
    metadata = {"format": "pt", **({} if model_only else {SNAPSHOT_MARK: _mark(state)})}
    with _in_place_of(destination) as unfinished:
        if destination.suffix == ".safetensors":
            _write_file(unfinished, tensors, [*tensors], metadata)
            return destination
        unfinished.mkdir(parents=True)
        shapes = {key: SavedTensor(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        layout = FolderLayout.of(shapes, max_shard_bytes)
        for number, file in enumerate(layout.files):
            _write_file(unfinished / file.name, tensors, file.tensors, {"format": "pt"} if number else metadata)
        if layout.index is not None:
            (unfinished / INDEX).write_text(layout.index, encoding="utf-8")
    return destination


def write_dcp(state: StoredState, destination: Path, *, model_only: bool) -> Path:
    """Writes a folder that `torch.distributed.checkpoint.load` reads, under the keys of `sharded_state_dict`."""
    content: dict[str, Any] = dict(_chosen(state, model_only))
    if not model_only:
        content.update({**state.values, SNAPSHOT_MARK: _mark(state)})
    with _in_place_of(destination) as unfinished, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # There is one process.
        save(content, storage_writer=FileSystemWriter(unfinished, thread_count=1), no_dist=True)
    return destination


def _chosen(state: StoredState, model_only: bool) -> dict[str, LazyTensor]:
    """The tensors to be written: all by their keys, or the model's by their plain names."""
    if not model_only:
        return dict(state.tensors)
    weights = {key.removeprefix("model."): tensor for key, tensor in state.tensors.items() if key.startswith("model.")}
    if not weights:
        objects = sorted({key.partition(".")[0] for key in state.tensors})
        raise ValueError(f"it has no weights under model., but {', '.join(objects)}: name the model by --model")
    return weights


def _mark(state: StoredState) -> str:
    return json.dumps({"step": state.step, "values": state.values, "extra": state.extra}, allow_nan=False)


def _check_dtypes(tensors: Mapping[str, LazyTensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(
                f"{key} is {tensor.dtype}, which safetensors has not: convert it before, or leave it out with --skip"
            )


def _write_file(
    path: Path, tensors: Mapping[str, LazyTensor], keys: Sequence[str], metadata: Mapping[str, str]
) -> None:
    entries = [TensorEntry(key, tensors[key].dtype, tuple(tensors[key].shape)) for key in keys]
    write_tensors(path, entries, lambda index: tensors[keys[index]].load(), metadata)


@contextmanager
def _in_place_of(destination: Path) -> Iterator[Path]:
    """A context with another name to write to, which becomes `destination` at its end, or is removed."""
    unfinished = destination.with_name(f"{destination.name}.tmp-{os.getpid()}-{uuid.uuid4().hex}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        unfinished.rename(destination)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)


def counted(state: StoredState, progress: Callable[[int], None]) -> StoredState:
    """The same state; `progress` is called with the bytes of each tensor that is read."""

    def count(tensor: LazyTensor) -> LazyTensor:
        def read() -> Any:
            loaded = tensor.load()
            progress(tensor.num_bytes)
            return loaded

        return LazyTensor(tuple(tensor.shape), tensor.dtype, read, tensor.origin)

    tensors = {key: count(tensor) for key, tensor in state.tensors.items()}
    return StoredState(tensors, state.values, state.extra, state.step, state.tied)
