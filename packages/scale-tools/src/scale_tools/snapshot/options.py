"""The command line of `scale-train snapshot`, as frozen dataclasses; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, subcommand


@dataclass(frozen=True)
class LsOptions:
    """List the snapshots of a run or a folder: step, size, ranks, age, and if one is damaged, newer or unfinished."""

    path: Positional[Path]
    """A run's folder, a folder of snapshots, or one snapshot."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class VerifyOptions:
    """Read every byte of snapshots and compare it with the checksums that were taken when it was written."""

    path: Positional[Path]
    """A run's folder, a folder of snapshots (all of them are verified), or one snapshot."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class DiffOptions:
    """Compare two checkpoints of any format: keys, shapes, dtypes, and values tensor by tensor."""

    a: Positional[Path]
    """A snapshot, or any checkpoint that convert reads; of a folder of snapshots the newest."""
    b: Positional[Path]
    """The other."""
    atol: float = 0.0
    """Numbers that differ by this much at most are equal; with 0, tensors must be equal to the bit."""
    map: tuple[str, ...] = ()
    """OLD=NEW: names in A that begin with OLD begin with NEW."""
    skip: tuple[str, ...] = ()
    """What to leave out of both."""
    trust: bool = False
    """Unpickle objects of any class, which may run any code that a file says."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ConsolidateOptions:
    """Write the full weights of a snapshot's model, under their plain names, as safetensors."""

    source: Positional[Path]
    """A snapshot, or a folder of snapshots, of which the newest is taken."""
    destination: Positional[Path]
    """What to write: a file that ends in .safetensors, or else a folder."""
    model: str | None = None
    """The name under which the model was saved, if it is not model."""
    max_file_size: str = "5GB"
    """Of the files in a folder; above it there are several, with an index."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a checkpoint of a different library to a snapshot, safetensors or DCP, equal to the bit."""

    source: Positional[Path]
    """A file of torch.save, a folder of torch.distributed.checkpoint, a safetensors file, a folder of Hugging Face, the
    files that FairScale or FSDP wrote on each rank (one of them, or their folder), or a snapshot."""
    destination: Positional[Path]
    """What to write. A snapshot is written into it as step-N."""
    to: Literal["snapshot", "safetensors", "dcp"] = "snapshot"
    """The format to write."""
    step: int | None = None
    """The training step of the snapshot, if it is not what the source says, or 0."""
    map: tuple[str, ...] = ()
    """OLD=NEW: names of parameters that begin with OLD begin with NEW; "module.=" takes off what DDP puts before."""
    skip: tuple[str, ...] = ()
    """What to leave out, by its path in the source, such as optimizer or args."""
    model: str | None = None
    """The key of the model's weights in the source, if it is none of the usual ones."""
    model_only: bool = False
    """With --to safetensors or dcp: the model alone, under the names of its plain state_dict()."""
    max_file_size: str = "5GB"
    """With --to safetensors: the size of a file above which there are several, with an index."""
    trust: bool = False
    """Unpickle objects of any class, which may run any code that the source says."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class PruneOptions:
    """Remove old snapshots. Keeps the newest complete ones, and damaged, newer or unfinished ones."""

    path: Positional[Path]
    """A run's folder, or a folder of snapshots."""
    keep: int
    """How many complete snapshots stay, at least 1."""
    dry_run: bool = False
    """Only say which ones would be removed."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class SnapshotOptions:
    """List, verify, compare, convert and prune checkpoints."""

    command: (
        Annotated[LsOptions, subcommand("ls")]
        | Annotated[VerifyOptions, subcommand("verify")]
        | Annotated[DiffOptions, subcommand("diff")]
        | Annotated[ConsolidateOptions, subcommand("consolidate")]
        | Annotated[ConvertOptions, subcommand("convert")]
        | Annotated[PruneOptions, subcommand("prune")]
    )
