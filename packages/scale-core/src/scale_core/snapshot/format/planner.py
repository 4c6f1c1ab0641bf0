"""Plans which chunks of a state each rank writes, and which saved chunks it reads.

Ranks hold what their sharding gave them, some of it twice, and the next run may shard otherwise. The planner of
`torch.distributed.checkpoint` decides who writes what, checks that no element is written twice, and intersects what is
saved with what is held; this file gives it flat states with `LocalShard`s, and proves what it plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from scale_core.comm.group import Group
from scale_core.snapshot.format.coverage import check_coverage, slices_of
from scale_core.snapshot.format.metadata import JSON, Manifest, SavedChunk, SavedFile, check_manifest
from scale_core.snapshot.format.reads import Read
from scale_core.snapshot.format.safetensors_io import TensorEntry, write_tensors
from scale_core.state.chunks import Chunk, LocalShard
from scale_core.state.validation import SavedTensor

State: TypeAlias = Mapping[str, Any]


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, for a flat dict that may hold `LocalShard`s beside tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, LocalShard) else super().lookup_object(index)


@dataclass(frozen=True)
class LocalPlan:
    """This rank's plan: the planner that finds its tensors, what it would write, and its values."""

    planner: _SavePlanner
    plan: SavePlan
    values: dict[str, JSON]

    @staticmethod
    def of(state: State, group: Group) -> LocalPlan:
        planner = _SavePlanner()
        planner.set_up_planner({key: value for key, value in state.items() if is_tensor(value)}, None, group.rank == 0)
        values = {key: value for key, value in state.items() if not is_tensor(value)}
        for key, value in values.items():
            _json_text(key, value)
        return LocalPlan(planner, planner.create_local_plan(), values)

    def parts(self, plan: SavePlan) -> Iterator[tuple[str, Chunk, Tensor]]:
        """Yields each chunk that the rank writes by a global plan: the key, which elements it has, and these."""
        plan = self.planner.finish_plan(plan)
        for item in plan.items:
            tensor = self.planner.resolve_data(item)
            assert isinstance(tensor, Tensor)  # the planner's bytes are for values, which it never gets
            yield item.index.fqn, _chunk_of(item), tensor


@dataclass(frozen=True)
class GlobalPlan:
    """All ranks' plan: who writes which chunk, each tensor's shape and dtype, and the values."""

    plans: list[SavePlan]
    tensors: dict[str, SavedTensor]
    values: dict[str, JSON]

    @staticmethod
    def of(owned: list[tuple[SavePlan, dict[str, JSON]]]) -> GlobalPlan:
        """Computed alike on every rank, so that no plan has to be sent back."""
        tensors: dict[str, SavedTensor] = {}
        values: dict[str, JSON] = {}
        for rank, (plan, mine) in enumerate(owned):
            for item in plan.items:
                _check_equal(
                    item.index.fqn, tensors.setdefault(item.index.fqn, _saved_tensor(item)), _saved_tensor(item), rank
                )
            for key, value in mine.items():
                _check_equal(key, _json_text(key, values.setdefault(key, value)), _json_text(key, value), rank)
        plans, _ = _SavePlanner().create_global_plan(_by_first_holders([plan for plan, _ in owned]))
        return GlobalPlan(plans, tensors, values)

    def check(self) -> None:
        """Proves that the ranks together write each element of each tensor, once."""
        chunks: dict[str, list[Chunk]] = {key: [] for key in self.tensors}
        for plan in self.plans:
            for item in plan.items:
                chunks[item.index.fqn].append(_chunk_of(item))
        for key, saved in self.tensors.items():
            check_coverage(key, saved.shape, chunks[key])

    def manifest(self, save: str, step: int, written: list[WriteResult], extra: JSON) -> Manifest:
        chunks: dict[str, list[SavedChunk]] = {key: [] for key in self.tensors}
        for rank, part in enumerate(written):
            for item, begin in zip(self.plans[rank].items, part.begins, strict=True):
                chunks[item.index.fqn].append(SavedChunk(_chunk_of(item), part.file, begin))
        files = {part.file: SavedFile(part.num_bytes, part.checksums) for part in written}
        manifest = Manifest(
            save, step, self.tensors, chunks, self.values, extra, files, block_bytes=written[0].block_bytes
        )
        check_manifest(manifest)
        return manifest


def _by_first_holders(plans: list[SavePlan]) -> list[SavePlan]:
    """Leaves each whole tensor to the lowest rank that has it, as those of one rank belong together."""
    # Buffers may differ between ranks that train the same model, such as the running mean and variance of a batch norm.
    taken: set[str] = set()
    first: list[SavePlan] = []
    for plan in plans:
        items = [item for item in plan.items if item.type is not WriteItemType.TENSOR or item.index.fqn not in taken]
        taken.update(item.index.fqn for item in items if item.type is WriteItemType.TENSOR)
        first.append(replace(plan, items=items))
    return first


@dataclass(frozen=True)
class WriteResult:
    """One rank's file: its name, length and checksums, and where the data of each chunk begins."""

    file: str
    num_bytes: int
    block_bytes: int
    checksums: list[str]
    begins: list[int]


def write_part(
    unfinished: Path, save: str, own: LocalPlan, plan: SavePlan, group: Group, at_stage: Callable[[str, Path], None]
) -> WriteResult:
    """Writes this rank's chunks into its own file, one tensor at a time; calls `at_stage` for each."""
    if not unfinished.is_dir():
        raise FileNotFoundError(f"{unfinished} can't be seen from this rank: all ranks must share the directory")
    plan = own.planner.finish_plan(plan)
    entries = [TensorEntry(_label(item), _saved_tensor(item).dtype, _chunk_of(item).sizes) for item in plan.items]

    def produce(index: int) -> Tensor:
        at_stage("tensor", unfinished)
        tensor = own.planner.resolve_data(plan.items[index])
        assert isinstance(tensor, Tensor)  # the planner's bytes are for values, which it never gets
        return tensor

    path = unfinished / f"rank-{group.rank:05d}.safetensors"
    written = write_tensors(path, entries, produce, {"format": "scale-snapshot", "save": save})
    at_stage("written", unfinished)
    return WriteResult(path.name, *written)


def is_tensor(value: Any) -> bool:
    """Whether a value of a state goes into the tensor files; anything else goes into the manifest."""
    return isinstance(value, LocalShard | Tensor)


def _saved_tensor(item: WriteItem) -> SavedTensor:
    assert item.tensor_data is not None  # values never reach the planner
    return SavedTensor(tuple(item.tensor_data.size), item.tensor_data.properties.dtype)


def _chunk_of(item: WriteItem) -> Chunk:
    assert item.tensor_data is not None
    return Chunk(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _label(item: WriteItem) -> str:
    """The name of a chunk in the file, as a Python slice: `model.weight[2:4, 0:8]`."""
    return f"{item.index.fqn}[{slices_of(_chunk_of(item))}]"


def _check_equal(key: str, first: object, other: object, rank: int) -> None:
    if first != other:
        raise ValueError(f"{key} differs between the ranks: {first} on a lower rank, {other} on rank {rank}")


def _json_text(key: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}: expected a tensor, or a finite value that JSON knows") from error


class _LoadPlanner(DefaultLoadPlanner):
    """torch's planner, for a flat dict that may hold `LocalShard`s beside tensors."""

    def __init__(self, target: dict[str, Any], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Not through set_up_planner, which replaces by None what it does not know.
        self.state_dict, self.original_state_dict, self.metadata = target, target, metadata
        self.is_coordinator = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held = self.state_dict[index.fqn]
        found: Tensor = (
            held.__get_tensor_shard__(index) if isinstance(held, LocalShard) else super().lookup_tensor(index)
        )
        return found.detach()


class SavedChunks(Protocol):
    """Where the chunks of saved tensors lie: a `Manifest`, for one."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """Each tensor's shape and dtype."""

    @property
    def chunks(self) -> Mapping[str, list[SavedChunk]]:
        """The chunks of each tensor; together they are the tensor, each element once."""


def plan_reads(manifest: SavedChunks, target: State) -> list[Read]:
    """What to read into the tensors of `target`: each element of each of them exactly once, which is proved here."""
    tensors = {key: place for key, place in target.items() if key in manifest.tensors}
    planner = _LoadPlanner(tensors, _as_metadata(manifest))
    places = {(key, at.chunk.offsets): at for key, chunks in manifest.chunks.items() for at in chunks}
    reads: list[Read] = []
    held = {(key, chunk.offsets): chunk for key, place in tensors.items() for chunk in _chunks_held(place)}
    filled: dict[tuple[str, tuple[int, ...]], list[Chunk]] = {place: [] for place in held}
    for item in planner.create_local_plan().items:
        key = item.storage_index.fqn
        at = places[key, tuple(item.storage_index.offset or ())]
        into = Chunk(tuple(item.dest_offsets), tuple(item.lengths))
        filled[key, tuple(item.dest_index.offset or ())].append(into)
        part = Chunk(tuple(item.storage_offsets), tuple(item.lengths))
        reads.append(
            Read(at.file, at.begin, at.chunk.sizes, part, manifest.tensors[key].dtype, planner.resolve_tensor(item))
        )
    for place, chunk in held.items():
        check_coverage(f"reading {place[0]}", chunk.sizes, filled[place])
    return reads


def _chunks_held(place: Tensor) -> list[Chunk]:
    if isinstance(place, LocalShard):
        return list(place.chunks)
    return [Chunk((0,) * place.ndim, tuple(place.shape))]


def _as_metadata(manifest: SavedChunks) -> Metadata:
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(dtype=saved.dtype),
                torch.Size(saved.shape),
                [
                    ChunkStorageMetadata(torch.Size(at.chunk.offsets), torch.Size(at.chunk.sizes))
                    for at in manifest.chunks[key]
                ],
            )
            for key, saved in manifest.tensors.items()
        }
    )
