"""Whole weights from the local states of all ranks, in one process and without a process group.

Each rank's metadata says which rank it is and which elements it holds, so the files may come in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
