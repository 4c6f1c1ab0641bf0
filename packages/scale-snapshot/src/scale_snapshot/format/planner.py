"""Plans which chunks of a state each rank writes, and which saved chunks it reads.

Ranks hold the elements of their sharding, some of them twice, and the next run may shard otherwise. The planner of
`torch.distributed.checkpoint` decides the writer of each element, and checks that no element is written twice; this
file gives it flat states with `LocalShard`s. Reads are the intersections of saved and held chunks. Both plans are
proved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from scale_core.comm.group import Group
from scale_core.sharded_tensor.chunks import Chunk
from scale_core.state.local_shard import LocalShard
from scale_core.state.validation import SavedTensor
from scale_snapshot.format.coverage import check_coverage
from scale_snapshot.format.metadata import JSON, Manifest, SavedChunk, SavedFile, check_manifest, label_of
from scale_snapshot.format.reads import Read
from scale_snapshot.format.safetensors_io import TensorEntry, write_tensors

State: TypeAlias = Mapping[str, Any]


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, for a flat dict that may hold `LocalShard`s and tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, LocalShard) else super().lookup_object(index)


@dataclass(frozen=True)
class LocalPlan:
    """This rank's plan: the planner that finds its tensors, its writes, and its values."""

    planner: _SavePlanner
    plan: SavePlan
    values: dict[str, JSON]

    @staticmethod
    def of(state: State, group: Group) -> LocalPlan:
        planner = _SavePlanner()
        tensors = {key: value for key, value in state.items() if is_tensor(value)}
        for key, tensor in tensors.items():
            _check_has_values(key, tensor)
        planner.set_up_planner(tensors, None, group.rank == 0)
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
        """Computed in the same way on every rank, so that no plan has to be sent back."""
        tensors: dict[str, SavedTensor] = {}
        values: dict[str, JSON] = {}
        for rank, (plan, local_items) in enumerate(owned):
            for item in plan.items:
                _check_equal(
                    item.index.fqn, tensors.setdefault(item.index.fqn, _saved_tensor(item)), _saved_tensor(item), rank
                )
            for key, value in local_items.items():
                _check_equal(key, _json_text(key, values.setdefault(key, value)), _json_text(key, value), rank)
        if both := sorted(tensors.keys() & values.keys()):
            raise ValueError(f"{both[0]} is a tensor on some ranks and a value on others: save the same on all of them")
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
    """Leaves each full tensor to the lowest rank that has it, because the tensors of one rank belong together."""
    # Buffers may differ between ranks that train the same model, for example the running mean and variance of a batch
    # norm.
    taken_keys: set[str] = set()
    first: list[SavePlan] = []
    for plan in plans:
        items = [
            item for item in plan.items if item.type is not WriteItemType.TENSOR or item.index.fqn not in taken_keys
        ]
        taken_keys.update(item.index.fqn for item in items if item.type is WriteItemType.TENSOR)
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
    unfinished: Path,
    save: str,
    own: LocalPlan,
    plan: SavePlan,
    group: Group,
    at_stage: Callable[[str, Path], None],
    progress: Callable[[int], None],
) -> WriteResult:
    """Writes this rank's chunks into its own file, one tensor at a time, as DCP's `StorageWriter.write_data`."""
    if not unfinished.is_dir():
        raise FileNotFoundError(f"{unfinished} can't be seen from this rank: all ranks must share the directory")
    plan = own.planner.finish_plan(plan)
    entries = [
        TensorEntry(label_of(item.index.fqn, _chunk_of(item)), _saved_tensor(item).dtype, _chunk_of(item).sizes)
        for item in plan.items
    ]

    def produce(index: int) -> Tensor:
        at_stage("tensor", unfinished)
        tensor = own.planner.resolve_data(plan.items[index])
        assert isinstance(tensor, Tensor)  # the planner's bytes are for values, which it never gets
        return tensor

    path = unfinished / f"rank-{group.rank:05d}.safetensors"
    written = write_tensors(path, entries, produce, {"format": "scale-snapshot", "save": save}, progress)
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


def _check_equal(key: str, first: object, other: object, rank: int) -> None:
    if first != other:
        raise ValueError(f"{key} differs between the ranks: {first} on a lower rank, {other} on rank {rank}")


def _json_text(key: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}: expected a tensor, or a finite value that JSON knows") from error


def _check_has_values(key: str, tensor: Tensor) -> None:
    if isinstance(tensor, LocalShard):
        return
    if tensor.is_meta:
        raise ValueError(f"{key} is on the meta device, where there is nothing to save: give it values first")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{key} has the layout {tensor.layout}, which can't be saved: save {key}.to_dense()")


class SavedChunks(Protocol):
    """Where the chunks of saved tensors lie: a `Manifest`, for one."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """Each tensor's shape and dtype."""

    @property
    def chunks(self) -> Mapping[str, list[SavedChunk]]:
        """The chunks of each tensor; together they are the tensor, each element once."""


def plan_reads(manifest: SavedChunks, target: State) -> list[Read]:
    """The reads into the tensors of `target`: each element of each of them exactly once, which is proved here.

    Raises:
        ValueError: A tensor can't be written to: it has no memory, or several elements share theirs.
    """
    reads: list[Read] = []
    for key, destination in target.items():
        if key in manifest.tensors:
            _check_has_memory(key, destination)
            for chunk, piece in _pieces_held(destination).items():
                reads += _reads_of(key, chunk, piece, manifest)
    return reads


def _reads_of(key: str, held: Chunk, piece: Tensor, manifest: SavedChunks) -> list[Read]:
    """Of each saved chunk of a tensor the part that is in the chunk `held`, whose elements are `piece`."""
    reads: list[Read] = []
    filled: list[Chunk] = []
    for saved_chunk in manifest.chunks[key]:
        chunk, dtype = saved_chunk.chunk, manifest.tensors[key].dtype
        common = chunk.intersection(held)
        if common is not None:
            filled.append(common.relative_to(held))
            into = piece if common == held else filled[-1].view_of(piece)
            part = common.relative_to(chunk)
            reads.append(Read(saved_chunk.file, saved_chunk.begin, chunk.sizes, part, dtype, into))
    check_coverage(f"reading {key}", held.sizes, filled)
    return reads


def _check_has_memory(key: str, place: Tensor) -> None:
    if place.is_meta:
        raise ValueError(f"{key} is on the meta device, where there is no memory to load into: call to_empty before")
    tensor = place.tensor if isinstance(place, LocalShard) else place
    if tensor.numel() and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            f"{key}: its elements share memory, as `expand` makes them, so they can't be loaded one by one: build it "
            "with .clone()"
        )


def _pieces_held(place: Tensor) -> dict[Chunk, Tensor]:
    if isinstance(place, LocalShard):
        return place.chunks
    return {Chunk((0,) * place.ndim, tuple(place.shape)): place.detach()}
