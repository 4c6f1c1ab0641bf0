"""The command line of `scale-train snapshot`, as frozen dataclasses; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, subcommand


@dataclass(frozen=True)
class LsOptions:
    """List the snapshots of a run or a folder: step, size, ranks, age, and state (damaged, newer, unfinished)."""

    path: Positional[Path]
    """A run's folder, a folder of snapshots, or one snapshot."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class VerifyOptions:
    """Read every byte of snapshots, and compare it with the checksums from the time of writing."""

    path: Positional[Path]
    """A run's folder, a folder of snapshots (all of them are verified), or one snapshot."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class DiffOptions:
    """Compare two checkpoints of any format: keys, shapes, dtypes, and values tensor by tensor."""

    a: Positional[Path]
    """A snapshot, or any checkpoint that convert reads. Of a folder of snapshots it takes the newest."""
    b: Positional[Path]
    """The other checkpoint."""
    atol: float = 0.0
    """Largest difference of equal numbers (0: equal to the bit)."""
    map: tuple[str, ...] = ()
    """OLD=NEW: names in A that begin with OLD begin with NEW."""
    skip: tuple[str, ...] = ()
    """Paths to leave out of both, for example optimizer."""
    trust: bool = False
    """Unpickle objects of any class. Use it only for files that you trust, because unpickling may run code in them."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ConsolidateOptions:
    """Write the full weights of a snapshot's model, under their plain names, as safetensors."""

    source: Positional[Path]
    """A snapshot, or a folder of snapshots. Of a folder it takes the newest."""
    destination: Positional[Path]
    """File that ends in .safetensors, or folder, to write."""
    model: str | None = None
    """Name of the model in the snapshot, if it is not model."""
    max_file_size: str = "5GB"
    """Largest size of one file. If the weights are larger, there are several files, with an index."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a checkpoint of a different library to a snapshot, safetensors or DCP, equal to the bit."""

    source: Positional[Path]
    """A file of torch.save, a folder of torch.distributed.checkpoint, a safetensors file, a folder of Hugging Face, the
    files that FairScale or FSDP wrote on each rank (one of them, or their folder), or a snapshot."""
    destination: Positional[Path]
    """File or folder to write. A snapshot is written into it as step-N."""
    to: Literal["snapshot", "safetensors", "dcp"] = "snapshot"
    """The format to write."""
    step: int | None = None
    """Training step of the snapshot; by default the step in the source, otherwise 0."""
    map: tuple[str, ...] = ()
    """OLD=NEW: names of parameters that begin with OLD begin with NEW. "module.=" removes the prefix of DDP."""
    skip: tuple[str, ...] = ()
    """Paths in the source to leave out, for example optimizer or args."""
    model: str | None = None
    """The key of the model's weights in the source, if it is not one of the usual keys."""
    model_only: bool = False
    """With --to safetensors or dcp: write only the model, with the names of its plain state_dict()."""
    max_file_size: str = "5GB"
    """With --to safetensors: largest size of one file. Larger weights become several files, with an index."""
    trust: bool = False
    """Unpickle objects of any class. Use it only for files that you trust, because unpickling may run code in them."""
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
    """Only list the snapshots that would be removed."""
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
