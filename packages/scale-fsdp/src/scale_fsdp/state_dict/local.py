"""Local state dict: the part of a model that one rank holds, which each rank saves and loads for itself.

The tensors are the shards as they are. The metadata gives the parameter and its elements in each. With it a state is
loaded by the right rank only, and the files of all ranks become the plain model's weights again, without any process
group: `consolidate_local_state_dicts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.consistency.flight_recorder import title_of_ranks
from scale_core.shard import on_local_tensors
from scale_fsdp.runtime.flattened_parameter import flat_param_name
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.state_dict.full import local_state_dict_of
from scale_fsdp.state_dict.loading import LOCAL_METADATA, check_loadable, loading_local
from scale_fsdp.state_dict.naming import (
    ParamLocation,
    all_names,
    module_names,
    param_locations,
    persistent_buffers,
    plain_order,
    tied_names,
)


def local_state_dict(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """This rank's shards and the module's buffers; torch's `_metadata` says whose they are."""
    state = local_state_dict_of(module, plain, *args, **kwargs)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    if hasattr(state, "_metadata"):
        state._metadata.setdefault(prefix[:-1], {})[LOCAL_METADATA] = shard_metadata(module)
    return state


def shard_metadata(module: nn.Module) -> dict[str, Any]:
    """The parameters and elements in this rank's shards, in values that torch.save and JSON know."""
    paths, buffers = module_names(module), list(persistent_buffers(module))
    names = all_names(module).keys() | set(buffers)
    entries = {  # the name of each buffer's flat parameter
        id(buffer): f"{paths[id(unit.module)]}.{flat_param_name(number)}".lstrip(".")
        for unit in units_in(module)
        for number, buffer in enumerate(unit.buffers)
    }
    ranks = max((unit.options.mesh_info for unit in units_in(module)), key=lambda each: each.whole.size)
    return {
        "format": 1,
        "rank": ranks.shard.rank,
        "world_size": ranks.shard.size,
        "replica": ranks.replicas.rank,
        "parameters": {name: _describe(location, entries) for name, location in param_locations(module).items()},
        "tied": tied_names(module),
        "buffer_names": buffers,
        "names": [name for name in plain_order(module) if name in names],
    }


@on_local_tensors
def load_local_state_dict(
    module: nn.Module,
    plain_state: Callable[..., Any],
    plain_load: Callable[..., Any],
    state_dict: Mapping[str, Any],
    strict: bool,
) -> Any:
    """Loads a result of `local_state_dict` on this rank; raises before anything is written."""
    check_loadable(module, "load_local_state_dict")
    metadata = getattr(state_dict, "_metadata", {}).get("", {}).get(LOCAL_METADATA)
    if metadata is not None:
        _check_metadata(metadata, shard_metadata(module))
    _check_tensors(local_state_dict_of(module, plain_state), state_dict, strict)
    with loading_local(module):
        return plain_load(state_dict, strict)


def _describe(location: ParamLocation, entries: Mapping[int, str]) -> dict[str, Any]:
    if id(location.buffer) not in entries:
        raise ValueError(
            f"'{location.name}' belongs to a unit outside of this module: call this on the outermost sharded module"
        )
    flat = location.buffer.flatten
    return {
        "shape": list(location.entry.shape),
        "dtype": str(location.buffer.dtype),
        "start": location.span.start,
        "stop": location.span.stop,
        "entry": entries[id(location.buffer)] if flat else location.name,
        "offset": location.span.shard_offset if flat else 0,
        **({"ranks": list(location.unit.options.mesh_info.whole.ranks)} if location.unit.rank_suffix else {}),
    }


def _check_metadata(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    fix = (
        "Make full weights of the states of all ranks, consolidate_local_state_dicts(states) of "
        "scale_fsdp.state_dict.local, and load those: model.load_state_dict(...)"
    )
    if given["world_size"] != own["world_size"]:
        raise ValueError(
            f"load_local_state_dict: expected the state of one of {own['world_size']} ranks, got the state "
            f"of rank {given['rank']} of {given['world_size']}. {fix}"
        )
    if given["rank"] != own["rank"]:
        raise ValueError(
            f"load_local_state_dict: expected the state of rank {own['rank']}, got the state of rank "
            f"{given['rank']}, of {own['world_size']} ranks: read the file that this rank has written"
        )
    for name in dict.fromkeys((*own["parameters"], *given["parameters"])):
        expected, got = own["parameters"].get(name), given["parameters"].get(name)
        if expected != got:
            raise ValueError(
                f"load_local_state_dict: the state belongs to another model or another wrapping; first, '{name}': "
                f"expected {_format_entry(expected)}, got {_format_entry(got)}. {fix}"
            )


def _format_entry(parameter: Mapping[str, Any] | None) -> str:
    if parameter is None:
        return "no such parameter"
    return (
        f"elements {parameter['start']:,} to {parameter['stop']:,} of {_format_shape(parameter)} in "
        f"'{parameter['entry']}' from {parameter['offset']:,} on"
    )


def _check_tensors(own: Mapping[str, Any], state_dict: Mapping[str, Any], strict: bool) -> None:
    expected = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    problems = []
    if strict:
        problems += [f"'{name}' is missing" for name in expected if name not in state_dict]
        problems += [f"'{name}' is unexpected" for name in state_dict if name not in own]
    for name in expected.keys() & state_dict.keys():
        shape, value = tuple(expected[name].shape), state_dict[name]
        if not isinstance(value, Tensor):
            problems.append(f"'{name}': expected a tensor, got {type(value).__name__}")
        elif tuple(value.shape) != shape:
            problems.append(f"'{name}': expected this rank's shape {shape}, got {tuple(value.shape)}")
    if problems:
        raise ValueError(
            "load_local_state_dict: the state belongs to another rank, another number of ranks or another wrapping, "
            f"and nothing was loaded: {'; '.join(problems)}. Full weights are loaded by load_state_dict(...)"
        )


class _RankState(NamedTuple):
    """One rank's local state and its metadata."""

    weights: Mapping[str, Any]
    metadata: Mapping[str, Any]


@checked_arguments
@on_local_tensors
def consolidate_local_state_dicts(local_state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the plain model's state dict, on the CPU, from the local states of all ranks; needs no process group.

        >>> import torch
        >>> from scale_fsdp import fully_shard
        >>> from scale_fsdp.state_dict.local import consolidate_local_state_dicts
        >>> model = fully_shard(torch.nn.Linear(2, 3))
        >>> consolidate_local_state_dicts([model.local_state_dict()])["weight"].shape
        torch.Size([3, 2])

    Buffers are taken from rank 0.

    Args:
        local_state_dicts: The result of `local_state_dict()` on each rank, or from a file, in any order.

    Raises:
        ValueError: A state lacks its metadata, a rank is missing or occurs twice, the ranks saved different models, or
            a parameter is missing or has a different size.

    See also: [the guide to state dicts](../guides/saving.md).
    """
    metadata = [
        getattr(state_dict, "_metadata", {}).get("", {}).get(LOCAL_METADATA) for state_dict in local_state_dicts
    ]
    for number, of_state in enumerate(metadata):
        if of_state is None:
            raise ValueError(
                f"state {number} of {len(metadata)} does not say which elements its tensors are: expected what "
                "local_state_dict() has returned, without a prefix and not copied into another dict, which loses "
                "torch's `_metadata`"
            )
    return consolidate_shards(local_state_dicts, metadata)


@on_local_tensors
def consolidate_shards(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, Any]:
    """The plain model's state dict, from each rank's tensors and their `shard_metadata`.

    Args:
        shard_weights: The `local_state_dict()` of each rank, in any order.
        shard_metadata: The metadata of each rank, in the same order.
        with_module_buffers: With the module's buffers, which are taken from rank 0.
        strict: Every parameter must be there; otherwise those that a rank lacks are left out.

    Raises:
        ValueError: As for `consolidate_local_state_dicts`; weights and metadata are not one for each rank.
    """
    shards = _by_rank(shard_weights, shard_metadata)
    first = shards[0]
    _check_same_model(shards)
    _check_weights(shards, strict)
    full: dict[str, Any] = {}
    for name in first.metadata["parameters"]:
        parts = [(shard.metadata["parameters"][name], shard.weights) for shard in shards]
        if all(part["entry"] in weights for part, weights in parts):
            full[name] = _concatenate(parts)
    for alias, name in first.metadata["tied"].items():
        if name in full:
            full[alias] = full[name]
    if with_module_buffers:
        parameters = {part["entry"] for part in first.metadata["parameters"].values()} | set(first.metadata["tied"])
        for name, value in first.weights.items():  # buffers, and extra state of modules
            if name not in parameters:
                full[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    order = {name: number for number, name in enumerate(first.metadata["names"])}
    return dict(sorted(full.items(), key=lambda item: order.get(item[0], len(order))))


def _by_rank(weights: Sequence[Mapping[str, Any]], metadata: Sequence[Any]) -> list[_RankState]:
    """The states in the order of their ranks."""
    if len(weights) != len(metadata) or not weights:
        raise ValueError(
            f"expected the local state of each rank with its metadata, got {len(weights)} states and {len(metadata)} "
            "metadata"
        )
    for number, entry in enumerate(metadata):
        if not isinstance(entry, Mapping) or not {"rank", "world_size", "parameters"} <= entry.keys():
            raise ValueError(
                f"metadata {number} does not say which elements the state's tensors are: expected the "
                "metadata of the same rank's local_state_dict()"
            )
    sizes = sorted({entry["world_size"] for entry in metadata})
    if len(sizes) > 1:
        raise ValueError(f"expected the shards of one run, got some of {' and some of '.join(map(str, sizes))} ranks")
    states: dict[int, _RankState] = {}
    twice = []
    for state in map(_RankState, weights, metadata):
        rank = state.metadata["rank"]
        earlier = states.setdefault(rank, state)
        # Under hybrid sharding each replica is saved; any one of them will do.
        if earlier is not state and earlier.metadata.get("replica") == state.metadata.get("replica"):
            twice.append(rank)
    missing = [rank for rank in range(sizes[0]) if rank not in states]
    found_wrong = {"given twice": twice, "missing": missing}
    wrong = [f"{problem}: {title_of_ranks(ranks)}" for problem, ranks in found_wrong.items() if ranks]
    if wrong:
        raise ValueError(f"expected one shard of each of {sizes[0]} ranks, but {'; '.join(wrong)}")
    return [states[rank] for rank in range(sizes[0])]


def _check_same_model(states: Sequence[_RankState]) -> None:
    first = states[0].metadata["parameters"]
    for name, part in first.items():
        if "ranks" in part:
            raise ValueError(
                f"'{name}' is another parameter on each rank, as an expert is, in the state of rank 0 of a unit over "
                f"ranks {part['ranks']}: have all ranks call model.state_dict(), and each of them save that"
            )
    for rank, state in enumerate(states):
        other = state.metadata["parameters"]
        for name in dict.fromkeys((*first, *other)):
            expected, got = _format_shape(first.get(name)), _format_shape(other.get(name))
            if expected != got:
                raise ValueError(
                    f"the ranks saved different models; first, '{name}': {expected} on rank 0, {got} on rank {rank}"
                )
    for name in first:
        stop = 0
        for rank, state in enumerate(states):
            part = state.metadata["parameters"][name]
            if part["start"] < part["stop"]:
                if part["start"] != stop:
                    raise ValueError(
                        f"'{name}': rank {rank} holds elements {part['start']} to {part['stop']}, expected it to go on "
                        f"from {stop}: the ranks saved under different wrappings"
                    )
                stop = part["stop"]
        if stop != math.prod(first[name]["shape"]):
            raise ValueError(f"'{name}': the ranks hold {stop} of {math.prod(first[name]['shape'])} elements")


def _check_weights(states: Sequence[_RankState], strict: bool) -> None:
    problems = []
    for rank, (weights, metadata) in enumerate(states):
        for name, part in metadata["parameters"].items():
            entry, needed = part["entry"], part["offset"] + part["stop"] - part["start"]
            if entry not in weights:
                problems += [f"'{name}' is missing in the shard of rank {rank}"] if strict else []
            elif (got := weights[entry].numel()) < needed or (entry == name and got > needed):
                problems.append(f"'{name}' of rank {rank}: expected {needed} elements in '{entry}', got {got}")
    if problems:
        raise ValueError("shards and metadata do not fit each other: " + "; ".join(problems))


def _concatenate(parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Tensor:
    first, weights = parts[0]
    full = torch.empty(first["shape"], dtype=weights[first["entry"]].dtype)
    for part, weights in parts:
        local = weights[part["entry"]].detach().reshape(-1)
        full.view(-1)[part["start"] : part["stop"]].copy_(local.narrow(0, part["offset"], part["stop"] - part["start"]))
    return full


def _format_shape(part: Mapping[str, Any] | None) -> str:
    return "no such parameter" if part is None else f"{tuple(part['shape'])} {part['dtype']}"
