"""All-gathers whole tensors from the shards of a state, one after the other.

In one message the ranks exchange which state they have and which elements of it. So a rank that has stepped otherwise
is found before any tensor is sent, and one that holds nothing of a parameter takes part all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather
from scale_core.comm.group import Group
from scale_core.consistency.all_ranks import all_gather_json
from scale_core.consistency.contract import Contract, ContractError
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.shard import Placement, Shard
from scale_core.state.chunks import Chunk, LocalShard

_EVENT = Event("whole optimizer state", "")
_PARAMETER = Event("whole parameter of a divided layer", "")


class ParamState(NamedTuple):
    """An optimizer's state of one parameter on this rank."""

    shard: Shard  # What this rank holds of the parameter
    device: torch.device  # Where it holds it
    values: Mapping[str, Any]  # The state by its key; a `LocalShard` each, or what is the same on all ranks


def gather_states(given: Sequence[ParamState], *, keeps: bool = True, on_host: bool = False) -> list[dict[str, Any]]:
    """Returns the state of each parameter with whole tensors; all ranks that share one call it in one order."""
    found = [dict(slots.values) for slots in given]
    groups: dict[Group, list[int]] = {}
    for number, slots in enumerate(given):
        groups.setdefault(_shard_group(slots.shard), []).append(number)
    for group, numbers in groups.items():
        contract = Contract(group)
        with contract.waiting(_EVENT):
            mine = [_describe(given[number]) for number in numbers]
            by_rank = all_gather_json(mine, contract, _EVENT)
            if any(len(states) != len(numbers) for states in by_rank):
                counts = [len(states) for states in by_rank]
                raise RuntimeError(f"the ranks' optimizers have {counts} parameters, by rank: build them alike")
            for place, number in enumerate(numbers):
                rows = [states[place] for states in by_rank]
                for key, dtype in _common_dtypes(given[number].shard.name, rows).items():
                    whole = _gather(given[number], key, getattr(torch, dtype), rows, group, contract)
                    if keeps:
                        found[number][key] = whole.to("cpu") if on_host else whole
    return found


@torch.no_grad()
def gather_full_param(part: Tensor, shard: Shard, group: Group, limit_seconds: float | None = None) -> Tensor:
    """Returns a whole parameter whose indices are sharded over a group; all its ranks call it together."""
    # Before anything is sent the ranks tell each other, on the host, which elements they have. So a rank that calls it
    # alone never meets a collective of others, which a transport without tags would take for this one.
    name = shard.name.partition("@")[0]  # What follows are ranks along another axis, which these may not have alike.
    event, contract = _PARAMETER._replace(unit=name), Contract(group, limit_seconds)
    with contract.waiting(event):
        mine: list[Any] = [name, shard.start, shard.stop, {}, shard.ranges]
        rows = all_gather_json(mine, contract, event)
        names = [row[0] for row in rows]
        if len(set(names)) > 1:
            raise ContractError(
                f"the ranks {list(group.ranks)} would make different parameters whole, by rank: {', '.join(names)}. "
                "All ranks must call state_dict() of the same module together"
            )
        sizes = [stop - start for _, start, stop, _, _ in rows]
        gathered = torch.empty(sum(sizes), dtype=part.dtype, device=part.device)
        if gathered.numel():
            pending = all_gather(gathered, part.detach().reshape(-1), group, sizes=sizes, tag=message_tag(event))
            pending.wait(contract.limit_seconds)
        if group.backend == "fake":  # One process plays one of the ranks: of the others there are no values.
            return gathered.new_empty(shard.shape)
        return _join(shard, gathered, sizes, rows)


def _shard_group(shard: Shard) -> Group:
    cut = [axis.group for axis in shard.axes if axis.placement is Placement.SHARD and axis.group.size > 1]
    if len(cut) > 1:
        raise RuntimeError(
            f"the optimizer state of '{shard.name}' is cut along {len(cut)} axes of the mesh, and can't be made whole "
            "here: take scale_core.state.sharded_state_dict(model, optimizer) for torch.distributed.checkpoint.save"
        )
    return cut[0] if cut else Group()


def _describe(slots: ParamState) -> list[Any]:
    """This rank's part of a parameter: its elements, the dtypes of its state, and the ranges."""
    kinds = {key: str(v.dtype).removeprefix("torch.") for key, v in slots.values.items() if isinstance(v, LocalShard)}
    return [slots.shard.name, slots.shard.start, slots.shard.stop, kinds, slots.shard.ranges]


def _common_dtypes(name: str, rows: Sequence[Sequence[Any]]) -> dict[str, str]:
    """The dtype of each state of a parameter, in one order on all ranks."""
    kinds: dict[str, str] = {}
    for _, _, _, its_kinds, _ in rows:
        kinds = {**its_kinds, **kinds}
    for rank, (its_name, start, stop, its_kinds, _) in enumerate(rows):
        if its_name != name or (its_kinds != kinds and stop > start):
            raise RuntimeError(
                f"the ranks have other state of '{name}': {sorted(kinds)} on some, {sorted(its_kinds)} of '{its_name}' "
                f"on rank {rank}: all ranks must step together"
            )
    return dict(sorted(kinds.items()))


def _gather(
    slots: ParamState, key: str, dtype: torch.dtype, rows: Sequence[Sequence[Any]], group: Group, contract: Contract
) -> Tensor:
    held = slots.values.get(key)
    mine = held.tensor.detach().reshape(-1) if isinstance(held, LocalShard) else torch.empty(0, dtype=dtype)
    sizes = [stop - start for _, start, stop, _, _ in rows]
    gathered = torch.empty(sum(sizes), dtype=dtype, device=slots.device)
    if gathered.numel():
        tag = message_tag(_EVENT._replace(unit=slots.shard.name))
        all_gather(gathered, mine.to(slots.device), group, sizes=sizes, tag=tag).wait(contract.limit_seconds)
    return _join(slots.shard, gathered, sizes, rows)


def _join(shard: Shard, gathered: Tensor, sizes: Sequence[int], rows: Sequence[Sequence[Any]]) -> Tensor:
    """The whole tensor, from all ranks' parts in rank order."""
    begins = [0, *itertools.accumulate(sizes)]
    in_order = begins[-1] == shard.numel and all(
        not ranges and start in (begin, stop) for begin, (_, start, stop, _, ranges) in zip(begins, rows, strict=False)
    )
    return gathered.view(shard.shape) if in_order else _assemble(shard, gathered.split(sizes), rows)


def _assemble(shard: Shard, parts: Sequence[Tensor], rows: Sequence[Sequence[Any]]) -> Tensor:
    """The whole tensor, from parts that are copies or no single range of elements."""
    whole = torch.empty(shard.shape, dtype=parts[0].dtype, device=parts[0].device)
    found: dict[Chunk, Tensor] = {}
    for part, (_, start, stop, _, ranges) in zip(parts, rows, strict=True):
        held = tuple(tuple((first, last) for first, last in indices) for indices in ranges)
        found.update(LocalShard(part, shard.shape, start, stop, held).chunks)
    numel = sum(piece.numel() for piece in found.values())
    assert numel == shard.numel, f"the ranks hold {numel} of the {shard.numel} elements of {shard.name}"
    for chunk, piece in found.items():
        whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
    return whole
