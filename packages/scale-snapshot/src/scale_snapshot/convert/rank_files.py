"""Reads files of single ranks: FairScale's local states, scale-fsdp's, and FSDP1's sharded state dicts.

All of them are made into one table first, which says where the elements of each tensor are; the tensors are put
together from it one at a time. Formats:

- FairScale: `local_state_dict()` and `local_metadata_dict()`. A flat parameter is cut into equal chunks with zeros
  at the end ("padding"); its metadata says the names, shapes and sizes of its parameters.
- scale-fsdp: `local_state_dict()`, whose `_metadata` has the elements of each parameter on this rank; or that together
  with FairScale's metadata, as the alias of FairScale gives it.
- FSDP1 (`StateDictType.SHARDED_STATE_DICT`): each entry is a ShardedTensor, which says its indices itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_core.sharded_tensor.chunks import Chunk
from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.torch_files import lazily, load_object
from scale_snapshot.format.coverage import check_coverage

_LOCAL = "scale_fsdp.local"  # the key of scale-fsdp's metadata in torch's `_metadata`
_SHARDED = "torch.distributed._shard"
_STAND_INS = (
    f"{_SHARDED}.metadata.ShardMetadata",
    f"{_SHARDED}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARDED}.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_SHARDED}.sharded_tensor.metadata.TensorProperties",
    f"{_SHARDED}.sharded_tensor.shard.Shard",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{_SHARDED}.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed.remote_device._remote_device",
)


class _Record:
    """Stands for the classes of a pickled ShardedTensor, which need a process group: it keeps their parts."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        fields = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else state
        self.__dict__.update(fields if isinstance(fields, dict) else {"state": fields})


class _ShardedTensor(Tensor):
    """Stands for a ShardedTensor: an empty tensor of its shape, with this rank's shards."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's docs say
    shards: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.shards = list(state[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: a shard in a file has no values")


def _attribute(owner: object, name: str) -> object:
    """In place of getattr, which ShardedTensors pickle for two names."""
    return _Record if owner is _ShardedTensor else name


def _stand_ins() -> AbstractContextManager[object]:
    stand_ins: list[Any] = [(_Record, name) for name in _STAND_INS]
    stand_ins += [(_ShardedTensor, f"{_SHARDED}.sharded_tensor.api.ShardedTensor"), (_attribute, "builtins.getattr")]
    return torch.serialization.safe_globals(stand_ins)


@dataclass(frozen=True)
class FlatPart:
    """Elements `[start, stop)` of a parameter, counted in row-major order, on one rank."""

    rank: int
    entry: str  # The key in that rank's state
    offset: int  # Where they begin in its tensor
    start: int
    stop: int


def read_rank_files(files: Sequence[Path], *, trust: bool = False) -> dict[Any, Any]:
    """Returns the full state that the files of all ranks hold, its tensors as `LazyTensor`s.

    Args:
        files: The file of each rank, by rank.
        trust: Build objects of any class, which may run any code that the files say.

    Raises:
        ValueError: A rank's file is missing, or the files are of different runs; or the format does not say which
            parameters a flat one holds.
    """
    # A ShardedTensor is only ever built as its stand-in: the class itself would need a process group.
    loaded = [load_object(path, trust=trust, stand_ins=_stand_ins()) for path in files]
    for path, content in zip(files, loaded, strict=True):
        if not isinstance(content, Mapping):
            raise ValueError(f"{path} holds a {type(content).__name__}, expected a dict with this rank's state")
    if any(isinstance(value, _ShardedTensor) for value in _leaves(loaded[0])):
        return _from_sharded_tensors(files, loaded)
    return _from_flat_parameters(files, loaded)


def _from_flat_parameters(files: Sequence[Path], loaded: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    weights, metadata = zip(
        *(_weights_and_metadata(path, content) for path, content in zip(files, loaded, strict=True)), strict=True
    )
    if "parameters" in metadata[0]:
        files, loaded, weights, metadata = _in_order_of_ranks(files, loaded, weights, metadata)
        table, shapes, tied = _table_of_spans(files, metadata)
    else:
        table, shapes, tied = _table_of_chunks(files, weights, metadata)
    tensors: dict[str, LazyTensor] = {}
    for name, parts in table.items():
        _check_parts(files, weights, name, shapes[name], parts)
        dtype = weights[parts[0].rank][parts[0].entry].dtype
        tensors[name] = LazyTensor(shapes[name], dtype, _joined(weights, shapes[name], dtype, parts), ("", name))
    for name, first in tied.items():
        tensors[name] = LazyTensor(shapes[first], tensors[first].dtype, tensors[first].read, ("", first))
    for name in metadata[0].get("buffer_names", ()):
        if name not in tensors and name in weights[0]:
            tensors[name] = lazily(weights[0][name], files[0])
    others = {
        key: lazily(value, files[0])
        for key, value in loaded[0].items()
        if value is not weights[0] and value is not metadata[0] and loaded[0] is not weights[0]
    }
    return {"model": tensors, **others}


def _weights_and_metadata(path: Path, loaded: Mapping[Any, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A rank's tensors and their metadata, under whatever keys the program has chosen."""
    candidates = [value for value in loaded.values() if isinstance(value, Mapping) and _is_metadata(value)]
    states = [
        value
        for value in loaded.values()
        if isinstance(value, Mapping)
        and value
        and all(isinstance(value_of_key, Tensor) for value_of_key in value.values())
    ]
    if not candidates:
        local_states = [candidate for candidate in (loaded, *loaded.values()) if _LOCAL in _torch_metadata(candidate)]
        if len(local_states) == 1:
            return local_states[0], _torch_metadata(local_states[0])[_LOCAL]
        raise ValueError(
            f"{path} has flat parameters, and nothing says which parameters they hold: FairScale says so in "
            "model.local_metadata_dict(), to be saved beside model.local_state_dict() in one dict, and scale-fsdp in "
            "the state itself, as long as it isn't copied into another dict; torch's FSDP does not, so load it there "
            "and save it as StateDictType.SHARDED_STATE_DICT, or by torch.distributed.checkpoint"
        )
    if len(candidates) > 1 or len(states) != 1:
        raise ValueError(
            f"{path}: expected one dict of tensors and one of local_metadata_dict(), got {len(states)} and "
            f"{len(candidates)}"
        )
    return states[0], candidates[0]


def _torch_metadata(value: object) -> Mapping[str, Any]:
    """The metadata that torch keeps of the outermost module in a state dict."""
    metadata: Mapping[str, Any] = getattr(value, "_metadata", {}).get("", {})
    return metadata


def _is_metadata(value: Mapping[Any, Any]) -> bool:
    return "param_metadata" in value or {"parameters", "rank", "world_size"} <= value.keys()


def _table_of_chunks(
    files: Sequence[Path], weights: Sequence[Mapping[str, Any]], metadata: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[FlatPart]], dict[str, tuple[int, ...]], dict[str, str]]:
    """FairScale's: the chunks of a flat parameter, one after the other without their padding, are its parameters."""
    table: dict[str, list[FlatPart]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    for number, unit in enumerate(metadata[0]["param_metadata"]):
        prefix = f"{unit['fsdp_path']}." if unit["fsdp_path"] else ""
        for entry, described in unit["params"].items():
            key, begin, filled = prefix + entry, 0, []
            for rank, of_rank in enumerate(metadata):
                try:
                    padding = of_rank["param_metadata"][number]["params"][entry]["padding"]
                    length = weights[rank][key].numel() - padding
                except (LookupError, TypeError) as error:
                    raise ValueError(
                        f"{files[rank]} has no {key}, which {files[0]} has: they are of two runs"
                    ) from error
                filled.append((begin, begin + length))
                begin += length
                if unit["no_broadcast_optim_state"]:  # It is replicated.
                    _check_alike(files, weights, key)
                    break
            if begin != sum(described["numels"]):
                raise ValueError(
                    f"{key} has {sum(described['numels'])} elements, and the {len(files)} files from {files[0]} on "
                    f"hold {begin}: put the files of all ranks, and no others of their names, into one folder"
                )
            start = 0
            for name, shape, numel in zip(described["names"], described["shapes"], described["numels"], strict=True):
                shapes[prefix + name] = tuple(shape)
                table[prefix + name] = [
                    FlatPart(
                        rank, key, max(low, start) - low, max(low, start) - start, min(high, start + numel) - start
                    )
                    for rank, (low, high) in enumerate(filled)
                    if max(low, start) < min(high, start + numel) or (numel == 0 and rank == 0)
                ]
                start += numel
        # Their names are those of the unit, or of the full model: FairScale's own function takes them for the latter.
        for first, other in unit.get("shared_param_info", ()):
            table_key = first if first in table else prefix + first
            tied[other if first in table else prefix + other] = table_key
    return table, shapes, {name: first for name, first in tied.items() if first in table}


def _check_alike(files: Sequence[Path], weights: Sequence[Mapping[str, Any]], key: str) -> None:
    for path, of_rank in zip(files, weights, strict=True):
        if key in of_rank and not torch.equal(of_rank[key], weights[0][key]):
            raise ValueError(
                f"{key} differs between {path} and {files[0]}, as an expert does, and one file of full weights has "
                "only one value for it: load the checkpoint with FairScale, and save model.state_dict() on each rank"
            )


def _in_order_of_ranks(files: Any, loaded: Any, weights: Any, metadata: Any) -> tuple[Any, Any, Any, Any]:
    by_rank: dict[int, tuple[Any, ...]] = {}
    for rank_files in zip(files, loaded, weights, metadata, strict=True):
        by_rank.setdefault(rank_files[3]["rank"], rank_files)
    expected = list(range(metadata[0]["world_size"]))
    if sorted(by_rank) != expected:
        raise ValueError(
            f"{files[0]} is of {len(expected)} ranks, and the files are of "
            f"ranks {', '.join(map(str, sorted(by_rank)))}: put the files of all ranks into one folder"
        )
    ordered = [by_rank[rank] for rank in expected]
    return tuple(tuple(column) for column in zip(*ordered, strict=True))  # type: ignore[return-value]  # four columns


def _table_of_spans(
    files: Sequence[Path], metadata: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[FlatPart]], dict[str, tuple[int, ...]], dict[str, str]]:
    """Scale-fsdp's: each rank says which elements of each parameter it has."""
    table: dict[str, list[FlatPart]] = {name: [] for name in metadata[0]["parameters"]}
    shapes = {name: tuple(part["shape"]) for name, part in metadata[0]["parameters"].items()}
    for rank, of_rank in enumerate(metadata):
        if of_rank["parameters"].keys() != table.keys():
            raise ValueError(f"{files[rank]} has other parameters than {files[0]}: they are of two runs")
        for name, part in of_rank["parameters"].items():
            if part["start"] < part["stop"] or (rank == 0 and math.prod(part["shape"]) == 0):
                table[name].append(FlatPart(rank, part["entry"], part["offset"], part["start"], part["stop"]))
    return table, shapes, dict(metadata[0]["tied"])


def _check_parts(
    files: Sequence[Path],
    weights: Sequence[Mapping[str, Any]],
    name: str,
    shape: tuple[int, ...],
    parts: Sequence[FlatPart],
) -> None:
    stop = 0
    for part in parts:
        tensor = weights[part.rank].get(part.entry)
        if not isinstance(tensor, Tensor) or tensor.numel() < part.offset + part.stop - part.start:
            raise ValueError(f"{files[part.rank]} is too short in {part.entry} for {name}: is it of another run?")
        if part.start != stop:
            raise ValueError(f"{name}: elements {stop} to {part.start} of {shape} are in no file, or in two")
        stop = part.stop
    if stop != math.prod(shape):
        raise ValueError(f"{name}: the files hold {stop} of {math.prod(shape)} elements")


def _joined(
    weights: Sequence[Mapping[str, Any]], shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[FlatPart]
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        full = torch.empty(shape, dtype=dtype)
        for part in parts:
            flat = weights[part.rank][part.entry].detach().reshape(-1)
            full.view(-1)[part.start : part.stop].copy_(flat.narrow(0, part.offset, part.stop - part.start))
        return full

    return read


def _from_sharded_tensors(files: Sequence[Path], loaded: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    return {key: _from_shards(files, f"{key}", [content.get(key) for content in loaded]) for key in loaded[0]}


def _from_shards(files: Sequence[Path], name: str, values: Sequence[Any]) -> Any:
    """One entry of all ranks as one: shards are joined, anything else is taken from rank 0."""
    first = values[0]
    if isinstance(first, Mapping):
        return {
            key: _from_shards(
                files,
                f"{name}.{key}",
                [content.get(key) if isinstance(content, Mapping) else None for content in values],
            )
            for key in first
        }
    if not isinstance(first, _ShardedTensor):
        return lazily(first, files[0])
    if name.rpartition(".")[2] == "_flat_param":
        raise ValueError(
            f"{files[0]} has flat parameters of torch's FSDP (StateDictType.LOCAL_STATE_DICT), and nothing in it says "
            "which parameters they hold: load it there and save it as StateDictType.SHARDED_STATE_DICT, or by "
            "torch.distributed.checkpoint"
        )
    shape = tuple(first.shape)
    shards: list[tuple[tuple[int, ...], Tensor]] = []
    for path, value in zip(files, values, strict=True):
        if not isinstance(value, _ShardedTensor) or tuple(value.shape) != shape:
            raise ValueError(f"{path} has no {name} of shape {shape}, as {files[0]} has: they are of two runs")
        shards += [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in value.shards]
    shards = [shard for shard in shards if shard[1].numel()] if math.prod(shape) else shards[:1]
    check_coverage(
        f"{name}, in {len(files)} files from {files[0]} on",
        shape,
        [Chunk(offsets, tuple(part.shape)) for offsets, part in shards],
    )
    dtype = shards[0][1].dtype

    def read() -> Tensor:
        full = torch.empty(shape, dtype=dtype)
        for offsets, tensor in shards:
            Chunk(offsets, tuple(tensor.shape)).view_of(full).copy_(tensor)
        return full

    return LazyTensor(shape, dtype, read)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    else:
        yield value
