"""Loads a folder of safetensors files into a model: each rank the bytes of its own shards, into their memory."""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.shard import on_local_tensors
from scale_core.state.param_ownership import named_param_slices
from scale_core.state.state_dict import model_tensors, names_in_model, persistent_buffers, sharded_state_dict
from scale_core.state.validation import SavedTensor, StateDifferences, StateMismatch, compare_states
from scale_snapshot.errors import SnapshotError
from scale_snapshot.format.metadata import SavedChunk
from scale_snapshot.format.planner import plan_reads
from scale_snapshot.format.reads import Read, read_tensors
from scale_snapshot.format.stored_file import opened
from scale_snapshot.pretrained.conversion import Assembled, Conversions, model_of_transformers
from scale_snapshot.pretrained.folder import WeightFolder, open_folder
from scale_snapshot.pretrained.materialize import Init, materialize
from scale_snapshot.program_state.objects import unwrapped

Progress = Callable[[int, int], object]

_logger = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20  # The progress is reported each time this many bytes are loaded.
_COMPARED_BYTES = 16 << 20


@checked_arguments
@on_local_tensors
def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    init: Init | None = None,
    key_mapping: Mapping[str, str] | None = None,
    cast: bool = False,
    strict: bool = True,
    progress: Progress | None = None,
    process_group: GroupLike = None,
) -> None:
    """Loads weights as `save_pretrained` of Hugging Face writes them, or a download from the hub has them.

    To be called on every rank, after the model is sharded, divided or cut into stages, and before its optimizer is
    built. Each rank reads only the bytes of its own shards, straight into their memory. Bytes that several ranks of a
    node need are read from the disk once. Names, shapes and dtypes are compared before anything is changed.

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        fully_shard_modules(model, no_split_policy(model), options=ShardOptions(init=False))
        load_pretrained(model, folder)

    Args:
        model: Sharded, divided, cut into stages, several of these, or plain. Meta tensors get memory.
        folder: Holds `model.safetensors.index.json` and its files, or `model.safetensors`; or one such file.
        device: The device of memory for meta tensors; None is this rank's accelerator, or the host where the ranks
            communicate by gloo or there is none.
        init: Called with each module that directly has buffers on meta which no file has, for example rotary
            frequencies, to fill them. None is the `_init_weights` of a model of transformers.
        key_mapping: Regular expressions for saved names, and their replacements, as in `from_pretrained`.
            Conversions that transformers knows for its models are applied automatically.
        cast: Whether floating-point numbers are converted to the dtypes of the model.
        strict: False loads matching tensors, and warns of the rest, for which the model must have values.
        progress: Called with the bytes that this rank has read and those that it reads in all, again and again.
        process_group: The ranks that hold the model together; the default group if None.

    Raises:
        ForeignCheckpointError: On every rank: the checkpoint has a different format, for example `pytorch_model.bin`.
            The error says how to convert it.
        SnapshotError: On every rank: the folder belongs to a different model, it is damaged, a conversion is not known,
            or a buffer on meta has got no values. For a different model the cause is a `StateMismatch`, which lists the
            tensors that are missing, unexpected or of a different shape or dtype, with near names.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import load_pretrained, save_pretrained
        >>> folder = save_pretrained(torch.nn.Linear(4, 3), tempfile.mkdtemp())
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 3)  # or sharded: `fully_shard(model, init=False)`
        >>> load_pretrained(model, folder)  # memory, and values
        >>> model(torch.ones(2, 4)).shape
        torch.Size([2, 3])

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    ranks, inner, path = group_of(process_group), unwrapped(model), Path(folder)
    together = CollectiveCall(ranks, f"loading {path}", SnapshotError)
    files = together.rank0(lambda: open_folder(path))
    matched = together.each_rank(lambda: _match(inner, files, key_mapping))
    differences = StateDifferences.of_ranks(together.all_ranks(lambda: matched.compare(inner)))
    if cast:
        differences.other_dtype.clear()
    if differences and strict:
        mismatch = StateMismatch(_refusal(differences))
        raise SnapshotError(f"{together.doing} failed: {mismatch}") from mismatch
    together.rank0(lambda: _check_copies(files, matched.copies))
    fits = {name: part for name, part in matched.parts.items() if name not in differences.keys}
    together.each_rank(lambda: _allocate(inner, fits, device, init, ranks))
    if differences and ranks.rank == 0:
        warnings.warn(f"{path} is loaded in part, as strict=False says: {differences}", stacklevel=3)
    reads = together.each_rank(lambda: _plan(inner, files, fits))
    overwriting = CollectiveCall(ranks, f"loading {path}, which has overwritten a part of the model,", SnapshotError)
    tell = progress or partial(_log, path, ranks.rank)
    overwriting.all_ranks_with_progress(lambda still_working: _read(reads, tell, still_working))


@dataclass(frozen=True)
class _Match:
    """The content of the files for this rank."""

    parts: dict[str, Assembled]  # By the first names of this rank's tensors
    unknown: dict[str, SavedTensor]  # Without a name in the model
    copies: list[tuple[str, str]]  # Pairs of saved tensors that are one in the model

    def compare(self, model: nn.Module) -> StateDifferences:
        """The differences on this rank."""
        carrier = model_of_transformers(model)
        optional = [re.compile(pattern) for pattern in getattr(carrier, "_keys_to_ignore_on_load_missing", None) or ()]
        model_values = {
            name: tensor
            for name, tensor in model_tensors(model).items()
            if name in self.parts or not any(pattern.search(name) for pattern in optional)
        }
        file_values = {name: part.tensor for name, part in self.parts.items()}
        return compare_states(model_values, {**file_values, **self.unknown})


def _match(model: nn.Module, files: WeightFolder, key_mapping: Mapping[str, str] | None) -> _Match:
    names, tensors = names_in_model(model), model_tensors(model)
    matched = _Match({}, {}, [])
    for target, part in Conversions.for_loading(model, key_mapping).assemble(files.tensors, names).items():
        first = names.get(target, target)
        if target not in names:
            matched.unknown[target] = part.tensor
        elif first in matched.parts:  # Tied in the model, and saved twice.
            pairs = zip(matched.parts[first].pieces, part.pieces, strict=True)
            matched.copies.extend((one.name, other.name) for one, other in pairs)
        elif first in tensors:
            matched.parts[first] = part
    return matched


def _refusal(differences: StateDifferences) -> str:
    near = [
        f"{name} may be the saved {other}"
        for name in differences.missing[:10]
        for other in difflib.get_close_matches(name, differences.unexpected, 1, 0.8)
    ]
    way = (
        "build the model by the config.json of the folder, rename by key_mapping=, or load what fits with strict=False"
    )
    if differences.keys == differences.other_dtype.keys():
        way = "build the model in that dtype, or convert with cast=True"
    hints = f" ({'; '.join(near)})" if near else ""
    return f"the folder has the weights of another model: {differences}{hints}: {way}"


def _check_copies(files: WeightFolder, copies: Sequence[tuple[str, str]]) -> None:
    """Checks that copies in the files of one tensor of the model are equal."""
    for pair in copies:
        tensors, places = [files.tensors[name] for name in pair], [files.places[name] for name in pair]
        sizes = [tensor.dtype.itemsize * torch.Size(tensor.shape).numel() for tensor in tensors]
        with opened(Path(places[0].file)) as one, opened(Path(places[1].file)) as other:
            are_equal = tensors[0] == tensors[1] and all(
                one.read(min(_COMPARED_BYTES, sizes[0] - offset), places[0].begin + offset)
                == other.read(min(_COMPARED_BYTES, sizes[0] - offset), places[1].begin + offset)
                for offset in range(0, sizes[0], _COMPARED_BYTES)
            )
        if not are_equal:
            raise ValueError(
                f"{pair[0]} and {pair[1]} are one tensor in the model and differ in the files: build the model without "
                "tying them (tie_word_embeddings=False)"
            )


def _allocate(
    model: nn.Module, fits: Mapping[str, Assembled], device: torch.device | str | None, init: Init | None, group: Group
) -> None:
    buffers, slices = dict(persistent_buffers(model)), named_param_slices(model)
    lacking = [name for name, param_slice in slices.items() if param_slice.owner.is_meta and name not in fits]
    if lacking:
        raise ValueError(
            f"{', '.join(lacking[:10])}: on the meta device, and nothing that is saved fits: build it outside of "
            "torch.device('meta') or initialize it, so that it has values, and load what fits over them"
        )
    accelerator = compat.accelerator() if group.backend != "gloo" else None
    target_device = torch.device(device) if device is not None else accelerator or torch.device("cpu")
    fill = init or getattr(model_of_transformers(model), "_init_weights", None)
    materialize(model, target_device, fill, {buffer for name, buffer in buffers.items() if name in fits})


def _plan(model: nn.Module, files: WeightFolder, fits: Mapping[str, Assembled]) -> list[Read]:
    saved = _SavedParts(
        {name: part.tensor for name, part in fits.items()},
        {
            name: [SavedChunk(piece.chunk, *files.places[piece.name]) for piece in part.pieces]
            for name, part in fits.items()
        },
    )
    target = {key.removeprefix("model."): destination for key, destination in sharded_state_dict(model).items()}
    return plan_reads(saved, {name: destination for name, destination in target.items() if name in fits})


@dataclass(frozen=True)
class _SavedParts:
    """The model's tensors as they are in the files."""

    tensors: Mapping[str, SavedTensor]
    chunks: Mapping[str, list[SavedChunk]]


def _read(reads: Sequence[Read], progress: Progress, still_working: Callable[[int], None]) -> None:
    total, done = sum(_num_bytes(read) for read in reads), 0
    for batch in _batches(sorted(reads, key=lambda read: (read.file, read.span))):
        read_tensors(Path(), batch, still_working)
        done += sum(_num_bytes(read) for read in batch)
        progress(done, total)


def _num_bytes(read: Read) -> int:
    return read.into.numel() * read.dtype.itemsize


def _batches(reads: Sequence[Read]) -> Iterator[list[Read]]:
    ends = itertools.accumulate(map(_num_bytes, reads))
    for _, batch in itertools.groupby(zip(reads, ends, strict=True), key=lambda pair: pair[1] // _BATCH_BYTES):
        yield [read for read, _ in batch]


def _log(path: Path, rank: int, done: int, total: int) -> None:
    if rank == 0:
        _logger.info("load_pretrained(%s): %.1f of %.1f GB of this rank", path, done / 1e9, total / 1e9)
