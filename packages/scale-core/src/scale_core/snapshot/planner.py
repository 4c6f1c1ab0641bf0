"""Which boxes of a state each rank writes, and which boxes of a saved one it reads.

Ranks hold what their sharding gave them, some of it twice, and the next run may hold it otherwise. The planner of
`torch.distributed.checkpoint` decides who writes what, proves that no element is written twice, and intersects what is
saved with what is held; this file hands it flat states that may hold `LocalShard`s, and moves the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

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
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from scale_core.comm.group import Group
from scale_core.snapshot.metadata import JSON, Manifest, SavedBox, check_coverage
from scale_core.snapshot.safetensors_io import Entry, read_rows, write_tensors
from scale_core.state.chunks import Box, LocalShard
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
class Own:
    """This rank's part of the state: the planner that finds its tensors, what it would write, and its values."""

    planner: _SavePlanner
    plan: SavePlan
    values: dict[str, JSON]

    @staticmethod
    def of(state: State, group: Group) -> Own:
        planner = _SavePlanner()
        planner.set_up_planner({key: value for key, value in state.items() if is_tensor(value)}, None, group.rank == 0)
        values = {key: value for key, value in state.items() if not is_tensor(value)}
        for key, value in values.items():
            _json_text(key, value)
        return Own(planner, planner.create_local_plan(), values)


@dataclass(frozen=True)
class Everyones:
    """What all ranks together hold: who writes which box, each tensor's shape and dtype, and the values."""

    plans: list[SavePlan]
    tensors: dict[str, SavedTensor]
    values: dict[str, JSON]

    @staticmethod
    def of(owned: list[tuple[SavePlan, dict[str, JSON]]]) -> Everyones:
        """Every rank plans alike, so that no plan has to be sent back.

        Raises:
            ValueError: The ranks disagree on a value or a tensor's shape or dtype, or hold elements twice or never.
        """
        tensors: dict[str, SavedTensor] = {}
        values: dict[str, JSON] = {}
        for rank, (plan, mine) in enumerate(owned):
            for item in plan.items:
                _agree(
                    item.index.fqn, tensors.setdefault(item.index.fqn, _saved_tensor(item)), _saved_tensor(item), rank
                )
            for key, value in mine.items():
                _agree(key, _json_text(key, values.setdefault(key, value)), _json_text(key, value), rank)
        plans, _ = _SavePlanner().create_global_plan(_by_first_holders([plan for plan, _ in owned]))
        return Everyones(plans, tensors, values)

    def manifest(self, step: int, written: list[Written], extra: JSON) -> Manifest:
        boxes: dict[str, list[SavedBox]] = {key: [] for key in self.tensors}
        for rank, part in enumerate(written):
            for item, begin in zip(self.plans[rank].items, part.begins, strict=True):
                boxes[item.index.fqn].append(SavedBox(_box(item), part.file, begin))
        sizes = {part.file: part.num_bytes for part in written}
        manifest = Manifest(step, len(written), self.tensors, boxes, self.values, extra, sizes)
        check_coverage(manifest)
        return manifest


def _by_first_holders(plans: list[SavePlan]) -> list[SavePlan]:
    """Leaves each whole tensor to the lowest rank that has it: those of one rank belong together.

    Buffers may differ between ranks that train the same model, such as the running mean and variance of a batch norm.
    """
    taken: set[str] = set()
    first: list[SavePlan] = []
    for plan in plans:
        items = [item for item in plan.items if item.type is not WriteItemType.TENSOR or item.index.fqn not in taken]
        taken.update(item.index.fqn for item in items if item.type is WriteItemType.TENSOR)
        first.append(replace(plan, items=items))
    return first


@dataclass(frozen=True)
class Written:
    """One rank's file: its name, where the data of each box begins, and its length in bytes."""

    file: str
    begins: list[int]
    num_bytes: int


def write_part(
    unfinished: Path, own: Own, plan: SavePlan, group: Group, reached: Callable[[str, Path], None]
) -> Written:
    """Writes this rank's boxes into a file of its own, one tensor at a time; `reached` is told of each.

    Raises:
        FileNotFoundError: This rank does not see the directory.
    """
    if not unfinished.is_dir():
        raise FileNotFoundError(f"{unfinished} can't be seen from this rank: all ranks must share the directory")
    plan = own.planner.finish_plan(plan)
    entries = [Entry(_label(item), _saved_tensor(item).dtype, _box(item).sizes) for item in plan.items]

    def produce(index: int) -> Tensor:
        reached("tensor", unfinished)
        tensor = own.planner.resolve_data(plan.items[index])
        assert isinstance(tensor, Tensor)  # the planner's bytes are for values, which it never gets
        return tensor

    path = unfinished / f"rank-{group.rank:05d}.safetensors"
    ranges = write_tensors(path, entries, produce)
    reached("written", unfinished)
    return Written(path.name, [ranges[entry.name][0] for entry in entries], path.stat().st_size)


def is_tensor(value: Any) -> bool:
    """Whether a value of a state goes into the tensor files; anything else goes into the manifest."""
    return isinstance(value, LocalShard | Tensor)


def _saved_tensor(item: WriteItem) -> SavedTensor:
    assert item.tensor_data is not None  # values never reach the planner
    return SavedTensor(tuple(item.tensor_data.size), item.tensor_data.properties.dtype)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _label(item: WriteItem) -> str:
    """The name of a box in the file, as Python would slice it: `model.weight[2:4, 0:8]`."""
    box = _box(item)
    slices = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"{item.index.fqn}[{slices}]"


def _agree(key: str, first: object, other: object, rank: int) -> None:
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


def read_parts(path: Path, manifest: Manifest, target: State) -> None:
    """Reads into each tensor of `target` what was saved of it, wherever it was saved."""
    tensors = {key: place for key, place in target.items() if key in manifest.tensors}
    planner = _LoadPlanner(tensors, _as_metadata(manifest))
    places = {(key, at.box.offsets): at for key, boxes in manifest.boxes.items() for at in boxes}
    for item in planner.create_local_plan().items:
        key, offset = item.storage_index.fqn, item.storage_index.offset
        at = places[key, tuple(offset or ())]
        planner.resolve_tensor(item).copy_(
            _read_part(path, at, Entry(key, manifest.tensors[key].dtype, at.box.sizes), item)
        )


def _read_part(path: Path, at: SavedBox, entry: Entry, item: ReadItem) -> Tensor:
    """The part of a saved box that a read asks for; its rows only are read."""
    if not entry.shape:
        return read_rows(path / at.file, at.begin, entry, 0, 1)
    part = read_rows(path / at.file, at.begin, entry, item.storage_offsets[0], item.lengths[0])
    for dim in range(1, part.ndim):
        part = part.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    return part


def _as_metadata(manifest: Manifest) -> Metadata:
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(dtype=saved.dtype),
                torch.Size(saved.shape),
                [
                    ChunkStorageMetadata(torch.Size(at.box.offsets), torch.Size(at.box.sizes))
                    for at in manifest.boxes[key]
                ],
            )
            for key, saved in manifest.tensors.items()
        }
    )
