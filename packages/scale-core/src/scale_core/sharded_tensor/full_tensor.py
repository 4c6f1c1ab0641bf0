"""Full tensors from the parts that ranks hold: ranges of elements, or of some indices, also of copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather
from scale_core.comm.group import Group
from scale_core.consistency.all_ranks import all_gather_json
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.errors import ContractError
from scale_core.shard import Ranges, Shard, on_local_tensors
from scale_core.sharded_tensor.chunks import cut_in_chunks

_PARAMETER = Event("full parameter of a divided layer", "")


class Part(NamedTuple):
    """Which elements of a tensor a rank has: those from `start` to `stop` of the indices in `ranges`; see `Shard`."""

    start: int
    stop: int
    ranges: Ranges = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@torch.no_grad()
@on_local_tensors
def gather_full_param(part: Tensor, shard: Shard, group: Group, limit_seconds: float | None = None) -> Tensor:
    """Returns a full parameter whose indices are sharded over a group; all its ranks call it together."""
    # Before anything is sent the ranks tell each other, on the host, which elements they have. So a rank that calls it
    # alone never meets a collective of others, which a transport without tags would take for this one.
    name = shard.name.partition("@")[0]  # The rest are ranks along another axis, which may differ.
    event, contract = _PARAMETER._replace(unit=name), Contract(group, limit_seconds)
    (parts,) = gather_parts([(name, Part(shard.start, shard.stop, shard.ranges))], contract, event)
    with contract.waiting(event):
        sizes = [part.numel for part in parts]
        gathered = torch.empty(sum(sizes), dtype=part.dtype, device=part.device)
        if gathered.numel():
            pending = all_gather(gathered, part.detach().reshape(-1), group, sizes=sizes, tag=message_tag(event))
            pending.wait(contract.limit_seconds)
        if group.backend == "fake":  # One process plays one of the ranks: of the others there are no values.
            return gathered.new_empty(shard.shape)
        in_order = not any(part.ranges for part in parts) and list(accumulate(sizes)) == [part.stop for part in parts]
        if in_order:
            return gathered.view(shard.shape)
        pieces = list(zip(parts, gathered.split(sizes), strict=True))
        return join_parts(shard.shape, pieces, part.dtype, part.device)


def gather_parts(mine: Sequence[tuple[str, Part]], contract: Contract, event: Event) -> list[list[Part]]:
    """Returns which elements each rank has, by rank, of each of these parameters; the same ones on all ranks."""
    by_rank = all_gather_json(mine, contract, event.phase)  # The names are compared below.
    for names in zip_longest(*([name for name, _ in rows] for rows in by_rank), fillvalue="none"):
        if len(set(names)) > 1:
            raise ContractError(
                f"the ranks {list(contract.group.ranks)} would gather different full parameters, by rank: "
                f"{', '.join(names)}. All ranks must gather the same tensors in the same order, by state_dict() or "
                "full_tensor(), and step on the same parameters"
            )

    def part_of(start: int, stop: int, ranges: Ranges) -> Part:
        return Part(start, stop, tuple(tuple((first, last) for first, last in dim_ranges) for dim_ranges in ranges))

    return [[part_of(*part) for _, part in rows] for rows in zip(*by_rank, strict=True)]


def join_parts(
    shape: tuple[int, ...], pieces: Sequence[tuple[Part, Tensor]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The full tensor, from the parts of all ranks with their elements; some may be copies of others."""
    full = torch.empty(shape, dtype=dtype, device=device)
    by_part = {part: piece for part, piece in pieces if part.numel}
    numel = sum(part.numel for part in by_part)
    assert numel == full.numel(), f"the ranks hold {numel} of the {full.numel()} elements of {shape}"
    for part, piece in by_part.items():
        if part.ranges:
            for chunk, elements in cut_in_chunks(piece, shape, *part).items():
                chunk_dims = zip(chunk.offsets, chunk.sizes, strict=True)
                full[tuple(slice(first, first + size) for first, size in chunk_dims)] = elements
        else:
            full.view(-1)[part.start : part.stop] = piece
    return full


def gather_shard(local: Tensor, shard: Shard) -> Tensor:
    """Returns the full tensor of a shard, over all axes that divide it; all ranks that share it call this together."""
    groups = shard.divided_groups
    event = Event("full_tensor", shard.name.partition("@")[0])
    pieces, part = local.reshape(-1), Part(shard.start, shard.stop, shard.ranges)
    for group in groups[:-1]:  # The ranks of an inner axis have ranges of one piece, which another axis divides.
        contract = Contract(group)
        (parts,) = gather_parts([(event.unit, part)], contract, event)
        sizes = [member.numel for member in parts]
        gathered = torch.empty(sum(sizes), dtype=local.dtype, device=local.device)
        if gathered.numel():
            with contract.waiting(event):
                work = all_gather(gathered, pieces, group, sizes=sizes, tag=message_tag(event))
                work.wait(contract.limit_seconds)
        if group.backend == "fake":
            return local.new_empty(shard.shape)
        by_start = sorted(zip(parts, gathered.split(sizes), strict=True), key=lambda pair: pair[0].start)
        pieces = torch.cat([piece for _, piece in by_start])
        filled = [member for member in parts if member.numel] or [part]
        part = Part(min(member.start for member in filled), max(member.stop for member in filled), shard.ranges)
    return gather_full_param(pieces, replace(shard, start=part.start, stop=part.stop), groups[-1])
