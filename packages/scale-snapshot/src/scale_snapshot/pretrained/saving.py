"""Saves a model as a folder of safetensors files, each rank its own shards, at the places where they belong."""

from __future__ import annotations

import copy
import errno
import itertools
import math
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike, group_of
from scale_core.consistency.all_ranks import CollectiveCall, Progress
from scale_core.shard import on_local_tensors
from scale_core.sharded_tensor.chunks import Chunk
from scale_core.state.local_shard import LocalShard
from scale_core.state.state_dict import persistent_buffers, sharded_state_dict
from scale_core.state.validation import SavedTensor
from scale_snapshot.errors import SnapshotError
from scale_snapshot.format.planner import GlobalPlan, LocalPlan
from scale_snapshot.format.safetensors_io import memory_of
from scale_snapshot.pretrained.conversion import Conversions, SavedPiece, model_of_transformers, natural_key
from scale_snapshot.pretrained.folder import INDEX, FolderLayout, NewFile, size_in_bytes
from scale_snapshot.program_state.objects import unwrapped
from scale_snapshot.snapshot import sync

_STAGED_BYTES = 16 << 20
"""Of what is brought to the host, or put in order, at once."""


@checked_arguments
@on_local_tensors
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    config: Any = None,
    save_original_format: bool = True,
    process_group: GroupLike = None,
) -> Path:
    """Saves the weights of a model, and its configuration, as a folder that Hugging Face's libraries and vLLM read.

    To be called on every rank, with a folder that all of them see. Nothing is gathered: all ranks write at once, each
    its own shards, at their places in the files, and no byte is written twice. The folder is there in the end as a
    complete, or not there.

        save_pretrained(model, "finished")
        AutoModelForCausalLM.from_pretrained("finished")       # in any program

    Args:
        model: Sharded, divided, cut into stages, several of these, or plain.
        folder: It must not exist, or be empty.
        max_shard_size: Of the data of a file, in bytes or as a text; above it there are several, with an index.
        config: The writer of `config.json`, by its `save_pretrained` or `to_json_file`; None is the model's own.
        save_original_format: Whether to write the names and shapes in which the model was published, if transformers
            has different ones, for example for experts. transformers reads both.
        process_group: The ranks that hold the model together; the default group if None.

    Returns:
        The folder.

    Raises:
        ValueError: `max_shard_size` is not a size.
        SnapshotError: On every rank, if any rank fails: the folder is not empty, the disk is full, a conversion can't
            be undone, or experts differ between ranks. Nothing is written under this name then.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import save_pretrained
        >>> folder = save_pretrained(torch.nn.Linear(4, 3), tempfile.mkdtemp())
        >>> [file.name for file in folder.iterdir()]
        ['model.safetensors']

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    ranks, inner, path = group_of(process_group), unwrapped(model), Path(folder)
    limit = size_in_bytes(max_shard_size)
    together = CollectiveCall(ranks, f"saving {path}", SnapshotError)
    created: list[Path] = []
    try:
        local_plan = together.each_rank(lambda: LocalPlan.of(_state(inner), ranks))
        plans = together.all_ranks(lambda: (local_plan.plan, local_plan.values))
        everyones = together.each_rank(lambda: GlobalPlan.of(plans))
        pieces = together.rank0(lambda: _pieces(inner, everyones, save_original_format))
        layout = together.each_rank(lambda: FolderLayout.of(_saved_tensors(pieces, everyones.tensors), limit))
        unfinished = together.rank0(lambda: _prepare(path, layout.files, created))
        parts = local_plan.parts(everyones.plans[ranks.rank])
        together.all_ranks_with_progress(lambda progress: _write(unfinished, parts, pieces, layout, progress))
        together.rank0(lambda: _commit(unfinished, path, layout.index, inner, config))
    finally:
        for created_path in created:
            shutil.rmtree(created_path, ignore_errors=True)
    return path


def _state(model: nn.Module) -> dict[str, Any]:
    """This rank's shards by plain names."""
    state = {key.removeprefix("model."): value for key, value in sharded_state_dict(model).items()}
    for name in state:
        if "@" in name:
            raise ValueError(
                f"{name}: each rank has another one for itself, which has no name in a folder of weights: save it by "
                "scale_snapshot.save"
            )
    buffers = {name for name, _ in persistent_buffers(model)}
    for name, value in state.items():
        # A parameter that several ranks have in full is written by any of them, and not by the first that has it.
        if not isinstance(value, LocalShard) and name not in buffers:
            state[name] = LocalShard(value.contiguous(), tuple(value.shape), 0, value.numel())
    return state


Pieces = Mapping[str, tuple[SavedPiece, ...]]


def _pieces(model: nn.Module, everyones: GlobalPlan, original: bool) -> Pieces:
    """The saved tensors of each of the model's tensors."""
    everyones.check()
    ignored = getattr(model_of_transformers(model), "_keys_to_ignore_on_save", None) or ()
    tensors = {
        name: tensor
        for name, tensor in everyones.tensors.items()
        if not any(re.fullmatch(pattern, name) or pattern == name for pattern in ignored)
    }
    conversions = Conversions.for_saving(model) if original else Conversions()
    pieces_by_name = {name: assembled.pieces for name, assembled in conversions.split(tensors).items()}
    names = [piece.name for pieces in pieces_by_name.values() for piece in pieces]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tensors would be named {twice}: pass save_original_format=False")
    return pieces_by_name


def _saved_tensors(pieces: Pieces, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    saved_tensors = {
        piece.name: SavedTensor(piece.shape, tensors[name].dtype) for name, parts in pieces.items() for piece in parts
    }
    return {name: saved_tensors[name] for name in sorted(saved_tensors, key=natural_key)}


def _prepare(path: Path, files: Iterable[NewFile], made: list[Path]) -> Path:
    """Makes a folder next to the destination, with files of full length that begin with their headers."""
    if path.exists() and (not path.is_dir() or next(path.iterdir(), None) is not None):
        raise FileExistsError(f"{path} is there, and not empty: save into another folder, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}")
    unfinished.mkdir()
    made.append(unfinished)
    for new in files:
        with (unfinished / new.name).open("xb") as file:
            file.write(new.header.data)
            file.truncate(new.header.num_bytes)
    return unfinished


def _write(
    unfinished: Path,
    parts: Iterable[tuple[str, Chunk, Tensor]],
    pieces: Pieces,
    layout: FolderLayout,
    progress: Progress,
) -> None:
    """Writes this rank's shards, and returns when they are on the disk."""
    if not unfinished.is_dir():
        raise FileNotFoundError(f"{unfinished} can't be seen from this rank: all ranks must share the folder")
    descriptors: dict[str, int] = {}
    try:
        for name, chunk, tensor in parts:
            for piece in pieces.get(name, ()):
                common = chunk.intersection(piece.chunk)
                if common is None:
                    continue
                file, begin = layout.places[piece.name]
                if file not in descriptors:
                    descriptors[file] = os.open(unfinished / file, os.O_WRONLY | os.O_CLOEXEC)
                elements = common.relative_to(chunk).view_of(tensor)
                _write_part(descriptors[file], begin, piece.chunk, common, elements)
                progress(tensor.nbytes)
        for descriptor in descriptors.values():
            os.fsync(descriptor)
            progress(0)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _write_part(descriptor: int, begin: int, whole: Chunk, part: Chunk, elements: Tensor) -> None:
    """Writes a part of a box whose elements stand in the file one after the other from the byte `begin` on."""
    strides = [math.prod(whole.sizes[dim + 1 :]) * elements.element_size() for dim in range(len(whole.sizes))]
    run_dim = len(whole.sizes)  # From it on, the elements stand in one piece.
    while run_dim and part.sizes[run_dim - 1] == whole.sizes[run_dim - 1]:
        run_dim -= 1
    run_dim = max(run_dim - 1, 0)
    for offsets, block in _blocks(elements, part.offsets):
        data = memory_of(block)
        run_bytes = math.prod(block.shape[run_dim:]) * block.element_size()
        outer = itertools.product(*(range(size) for size in block.shape[:run_dim]))
        for number, index in enumerate(outer):
            starts = [offset - first for offset, first in zip(offsets, whole.offsets, strict=True)]
            for dim, steps in enumerate(index):
                starts[dim] += steps
            position = begin + sum(start * stride for start, stride in zip(starts, strides, strict=True))
            _write_bytes(descriptor, data[number * run_bytes : (number + 1) * run_bytes], position)


def _blocks(elements: Tensor, offsets: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The elements on the host and in order, all at once where they are so already, or a part of them at a time."""
    is_there = (
        elements.device.type == "cpu" and elements.is_contiguous() and not (elements.is_conj() or elements.is_neg())
    )
    if is_there or elements.nbytes <= _STAGED_BYTES:
        yield offsets, elements.detach().cpu().contiguous().resolve_conj().resolve_neg()
        return
    dim = next(dim for dim, size in enumerate(elements.shape) if size > 1)
    count = max(1, _STAGED_BYTES * elements.shape[dim] // elements.nbytes)
    for first in range(0, elements.shape[dim], count):
        moved = (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :])
        yield from _blocks(elements.narrow(dim, first, min(count, elements.shape[dim] - first)), moved)


def _write_bytes(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def _commit(unfinished: Path, path: Path, index: str | None, model: nn.Module, config: Any) -> None:
    if index is not None:
        (unfinished / INDEX).write_text(index, encoding="utf-8")
    _write_config(unfinished, model, config)
    for written in (unfinished, *unfinished.iterdir()):
        sync(written)
    try:
        unfinished.rename(path)  # Also in the place of an empty folder.
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise FileExistsError(f"{path} was written by another program meanwhile, and stays unchanged") from error
        raise
    sync(path.parent)


def _write_config(folder: Path, model: nn.Module, config: Any) -> None:
    """Writes `config.json` and `generation_config.json`, as far as the model has them."""
    carrier: Any = model_of_transformers(model)
    written: Any = _own_config(carrier) if config is None and carrier is not None else config
    if hasattr(written, "save_pretrained"):
        written.save_pretrained(folder)
    elif hasattr(written, "to_json_file"):
        written.to_json_file(folder / "config.json")
    generation: Any = getattr(carrier, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _own_config(carrier: Any) -> Any:
    """The model's configuration, with the class and the dtype by which programs build it."""
    config = copy.deepcopy(carrier.config)
    if hasattr(config, "architectures"):
        config.architectures = [type(carrier).__name__]
        dtypes = [param.dtype for param in carrier.parameters() if param.is_floating_point()]
        if dtypes:
            key = "dtype" if hasattr(config, "dtype") else "torch_dtype"
            setattr(config, key, str(dtypes[0]).removeprefix("torch."))
    return config
