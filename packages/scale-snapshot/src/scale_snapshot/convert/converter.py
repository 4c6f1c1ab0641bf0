"""Converts checkpoints: reads any format that is known, and writes a snapshot, safetensors or DCP."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from scale_core.arguments import checked_arguments
from scale_snapshot.convert.dcp_files import read_dcp_folder
from scale_snapshot.convert.naming import Renaming, StoredState, renamed, stored_state
from scale_snapshot.convert.rank_files import read_rank_files
from scale_snapshot.convert.safetensors_files import read_safetensors_file, read_safetensors_folder
from scale_snapshot.convert.snapshots import read_snapshot
from scale_snapshot.convert.torch_files import read_torch_file, read_torch_folder
from scale_snapshot.convert.writers import MAX_SHARD_BYTES, counted, write_dcp, write_safetensors, write_snapshot
from scale_snapshot.errors import SnapshotError
from scale_snapshot.foreign import Format, Recognized, recognize
from scale_snapshot.snapshot import latest_snapshot

Target = Literal["snapshot", "safetensors", "dcp"]


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion.

        >>> import tempfile, torch
        >>> from scale_snapshot.convert import convert_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> torch.save(torch.nn.Linear(4, 3).state_dict(), f"{folder}/weights.pt")
        >>> report = convert_checkpoint(f"{folder}/weights.pt", f"{folder}/converted")
        >>> report.step, report.num_tensors, report.num_bytes
        (0, 2, 60)

    Attributes:
        path: The output: the snapshot's directory, the safetensors file or folder, or the DCP folder.
        source: The format that was read.
        step: The training step, 0 where the format does not say.
        num_tensors: How many tensors were written.
        num_bytes: Their size.
        tied: Names that a snapshot does not list again, each with the first name of the same tensor.

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    path: Path
    source: Format
    step: int
    num_tensors: int
    num_bytes: int
    tied: dict[str, str]


@checked_arguments
def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Target = "snapshot",
    step: int | None = None,
    names: Renaming | None = None,
    model_only: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    trust: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Converts a checkpoint, one tensor at a time and equal to the bit; needs no process group.

        convert_checkpoint("pytorch_model.bin", "weights")           # a snapshot, weights/step-00000000
        snapshot = load_snapshot("weights", sharded_state_dict(model))
        convert_checkpoint("runs/checkpoints", "hf", to="safetensors", model_only=True)

    It reads state dicts of torch.save, folders of `torch.distributed.checkpoint`, safetensors files and folders,
    folders of pytorch_model.bin, snapshots, and the files per rank of FairScale's FSDP, torch's FSDP1 and scale-fsdp.
    An optimizer's state is taken over where it is saved by the parameters' names.

    Args:
        source: The file or folder; of files by rank, one of them or their folder.
        destination: A path that does not exist yet. A snapshot is written into it as `step-<step>`; safetensors into
            one file, if it ends in .safetensors, or else into a folder.
        to: "snapshot", "safetensors" or "dcp".
        step: The training step of the snapshot; by default the step of the source, or 0.
        names: Changes of names, and names to leave out.
        model_only: Write the model alone, under the names of its plain state_dict(); for safetensors and DCP.
        max_shard_bytes: The size of a safetensors file above which there are several.
        trust: Unpickle objects of any class, which may run any code that the source says.
        progress: Called with the bytes that were read since the last call, and the bytes of all.

    Raises:
        ValueError: The source is not a known checkpoint, is damaged, or holds values that would be lost; the
            destination exists; or an argument is wrong. Nothing is left at the destination.
        SnapshotError: The source is a snapshot that is damaged; or a snapshot can't be written.
        OSError: A file can't be read or written.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import load
        >>> from scale_snapshot.convert import convert_checkpoint
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 3)
        >>> torch.save(model.state_dict(), f"{folder}/weights.pt")
        >>> convert_checkpoint(f"{folder}/weights.pt", f"{folder}/converted").num_tensors
        2
        >>> load(f"{folder}/converted", {"model": model}).step
        0

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    target = Path(destination)
    if to not in ("snapshot", "safetensors", "dcp"):
        raise ValueError(f"expected to='snapshot', 'safetensors' or 'dcp', got {to!r}")
    if model_only and to == "snapshot":
        raise ValueError(
            "model_only is for safetensors and DCP: for a snapshot, leave the optimizer out with --skip optimizer (in "
            "Python names=Renaming(skip=['optimizer']))"
        )
    if max_shard_bytes < 1:
        raise ValueError(f"expected max_shard_bytes of at least 1, got {max_shard_bytes}")
    if to != "snapshot" and target.exists():
        raise ValueError(f"{target} exists already: name a new one, or remove it first")
    source_format = recognized(source)
    state = _opened(source_format, names or Renaming(), trust)
    if step is not None:
        state = replace(state, step=step)
    total = sum(tensor.num_bytes for tensor in state.tensors.values())
    if progress is not None:
        report = progress
        state = counted(state, lambda num_bytes: report(num_bytes, total))
    if to == "snapshot":
        path = write_snapshot(state, target)
    elif to == "safetensors":
        path = write_safetensors(state, target, model_only=model_only, max_shard_bytes=max_shard_bytes)
    else:
        path = write_dcp(state, target, model_only=model_only)
    written = {
        key: tensor
        for key, tensor in state.tensors.items()
        if not (to == "snapshot" and key in state.tied) and not (model_only and not key.startswith("model."))
    }
    num_bytes = sum(tensor.num_bytes for tensor in written.values())
    tied = state.tied if to == "snapshot" else {}
    return ConversionReport(path, source_format.format, state.step, len(written), num_bytes, tied)


@checked_arguments
def open_checkpoint(path: str | os.PathLike[str], names: Renaming | None = None, *, trust: bool = False) -> StoredState:
    """Returns the content of a checkpoint of any known format, its tensors still in their files.

    Args:
        path: As `convert_checkpoint` takes it.
        names: Changes of names, and names to leave out.
        trust: Unpickle objects of any class, which may run any code that the source says.

    Raises:
        ValueError: It is not a known checkpoint, is damaged, or holds values without a name.
        SnapshotError: It is a snapshot that is damaged.
        OSError: A file can't be read.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot.convert import open_checkpoint
        >>> path = f"{tempfile.mkdtemp()}/weights.pt"
        >>> torch.save(torch.nn.Linear(4, 3).state_dict(), path)
        >>> sorted(open_checkpoint(path).tensors)
        ['model.bias', 'model.weight']

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    return _opened(recognized(path), names or Renaming(), trust)


def recognized(path: str | os.PathLike[str]) -> Recognized:
    """As `recognize`, but a ValueError for a checkpoint that is unknown or can't be converted."""
    if not os.path.lexists(path):
        raise ValueError(f"{path} is not there")
    foreign = recognize(path)
    if foreign is None:
        raise ValueError(
            f"{path} is not a checkpoint of a format that is known here (snapshots, torch.save, "
            "torch.distributed.checkpoint, safetensors, Hugging Face's folders, FairScale's and FSDP's files by rank)"
        )
    if not foreign.is_convertible:
        raise ValueError(foreign.advice())
    return foreign


def _opened(found: Recognized, names: Renaming, trust: bool) -> StoredState:
    if not found.is_foreign:
        return renamed(read_snapshot(_snapshot_at(found)), names)
    try:
        return stored_state(_tree_of(found, trust), names)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if str(found.path) in text else f"{found.path}: {text}") from error


def _tree_of(found: Recognized, trust: bool) -> dict[Any, Any]:
    match found.format:
        case Format.TORCH_FILE:
            return read_torch_file(found.path, trust=trust)
        case Format.TORCH_FOLDER:
            return read_torch_folder(found.path, trust=trust)
        case Format.TORCH_SHARDS:
            return read_rank_files(found.parts, trust=trust)
        case Format.SAFETENSORS:
            return read_safetensors_file(found.path)
        case Format.SAFETENSORS_FOLDER:
            return read_safetensors_folder(found.path)
        case Format.DCP:
            return read_dcp_folder(found.path, trust=trust)
    raise AssertionError(f"{found.format} is not convertible, or is scale's own")


def _snapshot_at(found: Recognized) -> Path:
    if found.format is Format.SNAPSHOT:
        return found.path
    newest = latest_snapshot(found.path)
    if newest is None:
        raise SnapshotError(f"there is no complete snapshot in {found.path}")
    return newest
