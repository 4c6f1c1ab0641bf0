"""What one rank alone holds of a model: to be saved by each rank for itself, without a word to the others.

The tensors are the shards as they are. What they are shards of stands in the metadata: whose they are, and which
elements of which parameter. With it a state finds its way back to the right rank only, and the files of all ranks
become the plain model's weights again, without any process group: see `consolidate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_fsdp.state_dict.full import local_state_dict_of
from scale_fsdp.state_dict.loading import LOCAL, loading_local, refuse_in_use
from scale_fsdp.state_dict.naming import Place, all_names, places_in, plain_order, tied_in
from scale_fsdp.unit import flat_name_of, paths_in, units_in

FORMAT = 1


def local_state_dict(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns this rank's shards and the module's buffers, and says in torch's `_metadata` whose they are."""
    state = local_state_dict_of(module, plain, *args, **kwargs)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    if hasattr(state, "_metadata"):
        state._metadata.setdefault(prefix[:-1], {})[LOCAL] = local_metadata_dict(module)
    return state


def local_metadata_dict(module: nn.Module) -> dict[str, Any]:
    """Returns what the shards of this rank are shards of, in values that torch.save and JSON know.

    Raises:
        ValueError: A parameter of the module belongs to a unit outside of it.
    """
    entries, (shard, replicas), buffers = _entries(module), _groups(module), _buffer_names(module)
    known = all_names(module).keys() | set(buffers)
    return {
        "format": FORMAT,
        "rank": shard.rank,
        "world_size": shard.size,
        "replica": replicas.rank,
        "parameters": {name: _describe(place, entries) for name, place in places_in(module).items()},
        "tied": tied_in(module),
        "buffer_names": buffers,
        "names": [name for name in plain_order(module) if name in known],
    }


def load_local_state_dict(
    module: nn.Module,
    plain_state: Callable[..., Any],
    plain_load: Callable[..., Any],
    state_dict: Mapping[str, Any],
    strict: bool,
) -> Any:
    """Loads what `local_state_dict` gave on this rank.

    Args:
        module: The sharded module.
        plain_state: Its `state_dict` of `nn.Module`.
        plain_load: Its `load_state_dict` of `nn.Module`.
        state_dict: What is to be loaded.
        strict: Names must be the same on both sides.

    Raises:
        ValueError: It is that of another rank, another number of ranks or another wrapping, or a tensor in it has
            another shape; nothing has been written then.
        RuntimeError: The parameters are in use.
    """
    refuse_in_use(module, "load_local_state_dict")
    given = getattr(state_dict, "_metadata", {}).get("", {}).get(LOCAL)
    if given is not None:
        _check_metadata(given, local_metadata_dict(module))
    _check_tensors(local_state_dict_of(module, plain_state), state_dict, strict)
    with loading_local():
        return plain_load(state_dict, strict)


def _describe(place: Place, entries: Mapping[int, str]) -> dict[str, Any]:
    if id(place.buffer) not in entries:
        raise ValueError(
            f"'{place.name}' belongs to a unit outside of this module: call this on the outermost sharded module"
        )
    flat, apart = place.buffer.flatten, place.unit.of_ranks
    return {
        "shape": list(place.entry.shape),
        "dtype": str(place.buffer.dtype),
        "start": place.span.start,
        "stop": place.span.stop,
        "entry": entries[id(place.buffer)] if flat else place.name,
        "offset": place.span.shard_offset if flat else 0,
        **({"ranks": list(place.unit.options.ranks.whole.ranks)} if apart else {}),
    }


def _entries(module: nn.Module) -> dict[int, str]:
    """Under which name a state dict holds the flat parameter of each buffer, by the buffer's id."""
    paths = paths_in(module)
    entries = {}
    for unit in units_in(module):
        path = paths[id(unit.module)]
        for number, buffer in enumerate(unit.buffers):
            entries[id(buffer)] = f"{path}.{flat_name_of(number)}".lstrip(".")
    return entries


def _groups(module: nn.Module) -> tuple[Group, Group]:
    """The ranks between which the module is cut, and those that hold copies of the same cut."""
    ranks = [unit.options.ranks for unit in units_in(module)]
    found = max(ranks, key=lambda each: each.whole.size)
    return found.shard, found.replicas


def _buffer_names(module: nn.Module) -> list[str]:
    names = []
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                names.append(f"{path}.{name}" if path else name)
    return names


def _check_metadata(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    mend = (
        "Make whole weights of the states of all ranks, FullyShardedDataParallel.consolidate_shard_weights(weights, "
        "metadata), and load those: model.load_state_dict(...)"
    )
    if given["world_size"] != own["world_size"]:
        raise ValueError(
            f"load_local_state_dict: expected the state of one of {own['world_size']} ranks, got that of rank "
            f"{given['rank']} of {given['world_size']}. {mend}"
        )
    if given["rank"] != own["rank"]:
        raise ValueError(
            f"load_local_state_dict: expected the state of rank {own['rank']}, got that of rank {given['rank']}, of "
            f"{own['world_size']}: read the file that this rank has written"
        )
    for name in dict.fromkeys((*own["parameters"], *given["parameters"])):
        mine, its = own["parameters"].get(name), given["parameters"].get(name)
        if mine != its:
            raise ValueError(
                f"load_local_state_dict: the state is that of another model or another wrapping; first, '{name}': "
                f"expected {_in_words(mine)}, got {_in_words(its)}. {mend}"
            )


def _in_words(parameter: Mapping[str, Any] | None) -> str:
    if parameter is None:
        return "no such parameter"
    shape = tuple(parameter["shape"])
    return (
        f"elements {parameter['start']:,} to {parameter['stop']:,} of {shape} {parameter['dtype']} in "
        f"'{parameter['entry']}' from {parameter['offset']:,} on"
    )


def _check_tensors(own: Mapping[str, Any], state_dict: Mapping[str, Any], strict: bool) -> None:
    problems = []
    for name, value in own.items():
        if not isinstance(value, Tensor):
            continue
        if name not in state_dict:
            problems += [f"'{name}' is missing"] if strict else []
        elif not isinstance(state_dict[name], Tensor):
            problems.append(f"'{name}': expected a tensor, got {type(state_dict[name]).__name__}")
        elif state_dict[name].shape != value.shape:
            problems.append(
                f"'{name}': expected this rank's shape {tuple(value.shape)}, got {tuple(state_dict[name].shape)}"
            )
    if strict:
        problems += [f"'{name}' is unexpected" for name in state_dict if name not in own]
    if problems:
        raise ValueError(
            "load_local_state_dict: the state is that of another rank, another number of ranks or another wrapping, "
            f"and nothing was loaded: {'; '.join(problems)}. Full weights are loaded by load_state_dict(...)"
        )


# Whole weights from the local states of all ranks, in one process and without a process group.
#
# Each rank's metadata says which rank it is and which elements it holds, so the files may come in any order.


@dataclass(frozen=True)
class _Shard:
    """One rank's local state and its metadata."""

    weights: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @property
    def rank(self) -> int:
        rank: int = self.metadata["rank"]
        return rank


def consolidate_shard_weights(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, Any]:
    """Returns the state dict of the plain model, on the CPU.

    Args:
        shard_weights: What `local_state_dict()` gave on each rank, in any order.
        shard_metadata: What `local_metadata_dict()` gave on each rank, in the same order.
        with_module_buffers: With the module's buffers, which are those of rank 0.
        strict: Every parameter must be there; otherwise those that a rank lacks are left out.

    Raises:
        ValueError: Weights and metadata are not one for each rank, a rank is missing or there twice, or the ranks
            saved different models; a parameter is missing or has another size.
    """
    shards = _by_rank(shard_weights, shard_metadata)
    first = shards[0]
    _check_same_model(shards)
    _check_weights(shards, strict)
    whole: dict[str, Any] = {}
    for name in first.metadata["parameters"]:
        parts = [(shard.metadata["parameters"][name], shard.weights) for shard in shards]
        if all(part["entry"] in weights for part, weights in parts):
            whole[name] = _joined(parts)
    for alias, name in first.metadata["tied"].items():
        if name in whole:
            whole[alias] = whole[name]
    if with_module_buffers:
        parameters = {part["entry"] for part in first.metadata["parameters"].values()} | set(first.metadata["tied"])
        for name, value in first.weights.items():  # Buffers, and what modules save beside tensors.
            if name not in parameters:
                whole[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    order = {name: number for number, name in enumerate(first.metadata["names"])}
    return dict(sorted(whole.items(), key=lambda item: order.get(item[0], len(order))))


def _by_rank(weights: Sequence[Mapping[str, Any]], metadata: Sequence[Any]) -> list[_Shard]:
    """The shards in the order of their ranks.

    Raises:
        ValueError: They are not one for each rank.
    """
    if len(weights) != len(metadata) or not weights:
        raise ValueError(
            f"Require metadata for each shard and non-empty shards: got {len(weights)} shards and {len(metadata)} "
            "metadata, expected what local_state_dict() and local_metadata_dict() gave on each rank"
        )
    for number, each in enumerate(metadata):
        if not isinstance(each, Mapping) or not {"rank", "world_size", "parameters"} <= each.keys():
            raise ValueError(
                f"metadata {number} is not what local_metadata_dict() gives: it must be saved beside the shard, "
                "{'weights': model.local_state_dict(), 'metadata': model.local_metadata_dict()}"
            )
    sizes = sorted({each["world_size"] for each in metadata})
    if len(sizes) > 1:
        raise ValueError(f"expected the shards of one run, got some of {' and some of '.join(map(str, sizes))} ranks")
    found: dict[int, _Shard] = {}
    twice = []
    for each, its_metadata in zip(weights, metadata, strict=True):
        rank = its_metadata["rank"]
        known = found.setdefault(rank, _Shard(each, its_metadata))
        # Under hybrid sharding several copies of the model are saved; any one of them will do.
        if known.metadata is not its_metadata and known.metadata.get("replica") == its_metadata.get("replica"):
            twice.append(rank)
    missing = [rank for rank in range(sizes[0]) if rank not in found]
    if twice or missing:
        parts = [f"given twice: {_listed(twice)}"] if twice else []
        parts += [f"missing: {_listed(missing)}"] if missing else []
        raise ValueError(f"expected one shard of each of {sizes[0]} ranks, but {'; '.join(parts)}")
    return [found[rank] for rank in range(sizes[0])]


def _check_same_model(shards: Sequence[_Shard]) -> None:
    first = shards[0].metadata["parameters"]
    for name, part in first.items():
        if "ranks" in part:
            raise ValueError(
                f"'{name}' is another parameter on each rank, as an expert is: in the state of rank 0, of a unit over "
                f"ranks {part['ranks']}. It can't be one parameter of a plain model: have all ranks call "
                "model.state_dict(), which has this rank's own experts, and each of them save that"
            )
    for shard in shards[1:]:
        other = shard.metadata["parameters"]
        for name in dict.fromkeys((*first, *other)):
            here, there = (_whole(each.get(name)) for each in (first, other))
            if here != there:
                raise ValueError(
                    f"the ranks saved different models; first, '{name}': {here} on rank 0, {there} on rank {shard.rank}"
                )
    for name in first:
        place = 0
        for shard in shards:
            part = shard.metadata["parameters"][name]
            if part["start"] < part["stop"]:
                if part["start"] != place:
                    raise ValueError(
                        f"'{name}': rank {shard.rank} holds elements {part['start']} to {part['stop']}, expected it to "
                        f"go on from {place}: the ranks saved under different wrappings"
                    )
                place = part["stop"]
        if place != math.prod(first[name]["shape"]):
            raise ValueError(f"'{name}': the ranks hold {place} of {math.prod(first[name]['shape'])} elements")


def _check_weights(shards: Sequence[_Shard], strict: bool) -> None:
    problems = []
    for shard in shards:
        lengths: dict[str, int] = {}
        for name, part in shard.metadata["parameters"].items():
            if part["entry"] not in shard.weights:
                problems += [f"'{name}' is missing in the shard of rank {shard.rank}"] if strict else []
                continue
            alone = part["entry"] == name
            needed = part["offset"] + part["stop"] - part["start"]
            lengths[part["entry"]] = needed if alone else max(needed, lengths.get(part["entry"], 0))
            have = shard.weights[part["entry"]].numel()
            if have != needed if alone else have < needed:
                problems.append(
                    f"'{name}' of rank {shard.rank}: expected {needed} elements in '{part['entry']}', got {have}"
                )
    if problems:
        raise ValueError("shards and metadata do not fit each other: " + "; ".join(problems))


def _joined(parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Tensor:
    described, weights = parts[0]
    whole = torch.empty(described["shape"], dtype=weights[described["entry"]].dtype)
    flat = whole.view(-1)
    for part, its_weights in parts:
        length = part["stop"] - part["start"]
        source = its_weights[part["entry"]].detach().reshape(-1)[part["offset"] : part["offset"] + length]
        flat[part["start"] : part["stop"]].copy_(source)
    return whole


def _whole(part: Mapping[str, Any] | None) -> str:
    return "no such parameter" if part is None else f"{tuple(part['shape'])} {part['dtype']}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
