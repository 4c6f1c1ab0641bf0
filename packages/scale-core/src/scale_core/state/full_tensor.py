"""Whole tensors in the place of the shards that a state is made of, gathered one after the other.

The ranks tell each other in one message which state they have and which elements of it. So a rank that has stepped
otherwise is found before anything is sent, and one that holds nothing of a parameter, and may have no state of it,
takes part all the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather
from scale_core.comm.control_plane import exchange_text
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract, ContractError
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.shard import Held, Shard
from scale_core.state.chunks import Box, LocalShard

_EVENT = Event("whole optimizer state", "")
_PARAMETER = Event("whole parameter of a divided layer", "")


class Slots(NamedTuple):
    """An optimizer's state of one parameter, as this rank holds it.

    Attributes:
        shard: What this rank holds of the parameter.
        device: Where it holds it.
        values: The state by its key; a `LocalShard` each, or what is the same on all ranks.
    """

    shard: Shard
    device: torch.device
    values: Mapping[str, Any]


def whole_slots(given: Sequence[Slots], *, keeps: bool = True, on_host: bool = False) -> list[dict[str, Any]]:
    """Returns the state of each parameter with whole tensors; all ranks that share one call it together, in one order.

    Args:
        given: The state of each parameter.
        keeps: Whether this rank keeps what is whole; otherwise the shards are left as they are.
        on_host: Whether each tensor is brought to the host before the next one is gathered.

    Raises:
        RuntimeError: On all ranks: one has state that another one, which holds elements of the parameter too, has not;
            or a parameter is cut along several axes.
        ScaleDistributedError: A rank did something else.
    """
    found = [dict(slots.values) for slots in given]
    groups: dict[Group, list[int]] = {}
    for number, slots in enumerate(given):
        groups.setdefault(_group_of(slots.shard), []).append(number)
    for group, numbers in groups.items():
        contract = Contract(group)
        with contract.waiting(_EVENT):
            mine = [_told(given[number]) for number in numbers]
            texts = exchange_text(json.dumps(mine), group, limit_seconds=contract.limit_seconds)
            by_rank = [json.loads(text) for text in texts]
            if any(len(told) != len(numbers) for told in by_rank):
                counts = [len(told) for told in by_rank]
                raise RuntimeError(f"the ranks' optimizers have {counts} parameters, by rank: build them alike")
            for place, number in enumerate(numbers):
                rows = [told[place] for told in by_rank]
                for key, dtype in _agreed(given[number].shard.name, rows).items():
                    whole = _gathered(given[number], key, getattr(torch, dtype), rows, group, contract)
                    if keeps:
                        found[number][key] = whole.to("cpu") if on_host else whole
    return found


@torch.no_grad()
def whole_of_part(part: Tensor, shard: Shard, group: Group, limit_seconds: float | None = None) -> Tensor:
    """Returns a whole parameter of which each rank of a group has some indices; all of them call it together.

    Before anything is sent the ranks tell each other, on the host, which elements they have. So a rank that calls it
    alone never meets a collective of others, which a transport without tags would take for this one.

    Args:
        part: What this rank has of it, [any shape].
        shard: Which elements these are.
        group: The ranks.
        limit_seconds: How long to wait for another rank; None is the group's own limit.

    Raises:
        ContractError: On all ranks: they have come with different parameters.
        ScaleDistributedError: A rank did something else.
    """
    name = shard.name.partition("@")[0]  # What follows are ranks along another axis, which these may not have alike.
    event, contract = _PARAMETER._replace(unit=name), Contract(group, limit_seconds)
    with contract.waiting(event):
        mine = json.dumps([name, shard.start, shard.stop, {}, shard.ranges])
        rows = [json.loads(text) for text in exchange_text(mine, group, limit_seconds=contract.limit_seconds)]
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
        return _joined(shard, gathered, sizes, rows)


def _group_of(shard: Shard) -> Group:
    cut = [axis.group for axis in shard.axes if axis.held is Held.SHARD and axis.group.size > 1]
    if len(cut) > 1:
        raise RuntimeError(
            f"the optimizer state of '{shard.name}' is cut along {len(cut)} axes of the mesh, and can't be made whole "
            "here: take scale_core.state.sharded_state_dict(model, optimizer) for torch.distributed.checkpoint.save"
        )
    return cut[0] if cut else Group()


def _told(slots: Slots) -> list[Any]:
    """What a rank says of a parameter: which elements it holds, which state, with its dtype, and of which indices."""
    kinds = {key: str(v.dtype).removeprefix("torch.") for key, v in slots.values.items() if isinstance(v, LocalShard)}
    return [slots.shard.name, slots.shard.start, slots.shard.stop, kinds, slots.shard.ranges]


def _agreed(name: str, rows: Sequence[Sequence[Any]]) -> dict[str, str]:
    """The dtype of each state that there is of a parameter, in one order on all ranks."""
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


def _gathered(
    slots: Slots, key: str, dtype: torch.dtype, rows: Sequence[Sequence[Any]], group: Group, contract: Contract
) -> Tensor:
    held = slots.values.get(key)
    mine = held.tensor.detach().reshape(-1) if isinstance(held, LocalShard) else torch.empty(0, dtype=dtype)
    sizes = [stop - start for _, start, stop, _, _ in rows]
    gathered = torch.empty(sum(sizes), dtype=dtype, device=slots.device)
    if gathered.numel():
        tag = message_tag(_EVENT._replace(unit=slots.shard.name))
        all_gather(gathered, mine.to(slots.device), group, sizes=sizes, tag=tag).wait(contract.limit_seconds)
    return _joined(slots.shard, gathered, sizes, rows)


def _joined(shard: Shard, gathered: Tensor, sizes: Sequence[int], rows: Sequence[Sequence[Any]]) -> Tensor:
    """The whole tensor, of all ranks' parts one behind the other."""
    begins = [0, *itertools.accumulate(sizes)]
    in_order = begins[-1] == shard.numel and all(
        not ranges and start in (begin, stop) for begin, (_, start, stop, _, ranges) in zip(begins, rows, strict=False)
    )
    return gathered.view(shard.shape) if in_order else _put_together(shard, gathered.split(sizes), rows)


def _put_together(shard: Shard, parts: Sequence[Tensor], rows: Sequence[Sequence[Any]]) -> Tensor:
    """The whole tensor, of parts that are not one range of elements each, or copies."""
    whole = torch.empty(shard.shape, dtype=parts[0].dtype, device=parts[0].device)
    found: dict[Box, Tensor] = {}
    for part, (_, start, stop, _, ranges) in zip(parts, rows, strict=True):
        held = tuple(tuple((first, last) for first, last in indices) for indices in ranges)
        found.update(LocalShard(part, shard.shape, start, stop, held).pieces)
    numel = sum(piece.numel() for piece in found.values())
    assert numel == shard.numel, f"the ranks hold {numel} of the {shard.numel} elements of {shard.name}"
    for box, piece in found.items():
        whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = piece
    return whole
