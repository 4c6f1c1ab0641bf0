"""Gathers the optimizer state of all ranks on the host of one of them, or of all.

It goes bucket by bucket and tensor by tensor: beside the state that it keeps anyway, a device holds at most one tensor
per parameter of a bucket.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather, all_to_all, exchange_text
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.tree import map_tensors, tensors_in
from scale_oss.partition import group_in_buckets
from scale_oss.state_placement import Range, StatePlacement

State = dict[Any, Any]  # An optimizer's state of one parameter: tensors, numbers, and containers of them.


class Recipient(NamedTuple):
    """The rank that gets the whole state."""

    rank: int | None  # the global rank; None is all ranks
    is_this_rank: bool

    def members(self, group: Group) -> list[int]:
        """The ranks of a group that get it."""
        if group.size == 1:
            return [0] if self.is_this_rank else []
        return [member for member, rank in enumerate(group.ranks) if self.rank in (None, rank)]


def gather_states(
    placements: Sequence[StatePlacement],
    states: Mapping[Tensor, State],
    recipient: Recipient,
    contract: Contract,
    bucket_numel: int,
) -> dict[int, State]:
    """Gathers the state of each parameter on the host of the recipient, by the number of its placement.

    All ranks call it together; on all ranks alike it raises ValueError where a state of an element-wise optimizer is
    neither a number nor a tensor of the parameter's shape, or ranks have not stepped alike.
    """
    found: dict[int, State] = {}
    by_group: dict[Group, list[int]] = {}
    for number, placement in enumerate(placements):
        by_group.setdefault(placement.group, []).append(number)
    for group, numbers in by_group.items():
        if not recipient.members(group):
            continue
        for run in group_in_buckets([_numel(placements[number]) for number in numbers], bucket_numel):
            members = {numbers[index]: placements[numbers[index]] for index in run}
            found.update(_StateGather(members, states, group, recipient.members(group), contract).run())
    return found


class _StateGather:
    """The gather of one bucket."""

    def __init__(
        self,
        placements: Mapping[int, StatePlacement],
        states: Mapping[Tensor, State],
        group: Group,
        recipients: Sequence[int],
        contract: Contract,
    ) -> None:
        self._placements, self._group, self._contract = placements, group, contract
        self._mine = {
            number: states[placement.optimizer_param]
            for number, placement in placements.items()
            if placement.optimizer_param is not None and states.get(placement.optimizer_param)
        }
        self._recipients, self._receives = recipients, group.rank in recipients

    def run(self) -> dict[int, State]:
        described = self._describe()
        tensors = {number: large_tensors_in(state) for number, state in described.items()}
        whole: dict[int, Tensor] = {}
        for turn in range(max(map(len, tensors.values()), default=0)):
            members = {number: found[turn] for number, found in tensors.items() if turn < len(found)}
            for dtype in sorted({tensor.dtype for tensor in members.values()}, key=str):
                alike = {number: tensor for number, tensor in members.items() if tensor.dtype == dtype}
                whole.update(self._gather(turn, dtype, alike))
        if not self._receives:
            return {}
        return {
            number: map_tensors(lambda tensor: whole.get(id(tensor), tensor), state)
            for number, state in described.items()
        }

    # What there is to gather, which only its holders know.

    def _describe(self) -> dict[int, State]:
        """The states of all parameters, with full tensors on the meta device.

        Numbers have their values: they are the same on all ranks that have them.
        """
        problems = "\n".join(self._unsupported())
        mine = {
            number: self._described(number, state)
            for number, state in self._mine.items()
            if not problems and self._placements[number].first_holder == self._group.rank
        }
        found: dict[int, State] = {}
        for text in self._exchange_text(pickle.dumps(mine).decode("latin-1")):
            found.update(pickle.loads(text.encode("latin-1")))
        if not problems:
            problems = "\n".join(self._mismatches(found))
        if raised := [f"{text} (on rank {rank})" for rank, text in enumerate(self._exchange_text(problems)) if text]:
            raise ValueError(raised[0])
        return dict(sorted(found.items()))

    def _unsupported(self) -> Iterator[str]:
        for number, state in self._mine.items():
            placement = self._placements[number]
            if placement.owner is not None or placement.optimizer_param is None:
                continue
            for tensor in large_tensors_in(state):
                if tensor.shape != placement.optimizer_param.shape:
                    yield (
                        f"the optimizer keeps a tensor of shape {tuple(tensor.shape)} for '{placement.name}', of which "
                        f"this rank has {tuple(placement.optimizer_param.shape)}: expected that shape, or a number. "
                        "Build an optimizer that needs whole tensors by OSS(..., elementwise=False)"
                    )

    def _mismatches(self, found: Mapping[int, State]) -> Iterator[str]:
        for number, state in self._mine.items():
            if not _same_state(self._described(number, state), found.get(number, {})):
                yield (
                    f"the optimizer's state of '{self._placements[number].name}' is not the same on all ranks that "
                    "hold a part of it: all ranks must step together"
                )
        for number in sorted(found.keys() - self._mine.keys()):
            placement = self._placements[number]
            if placement.owner is None and placement.optimizer_param is not None:
                yield (
                    f"this rank has no optimizer state of '{placement.name}', others have: all ranks must step together"
                )

    def _described(self, number: int, state: State) -> State:
        placement = self._placements[number]

        def describe(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0:
                return tensor.detach().to("cpu", copy=True)
            shape = tensor.shape if placement.owner is not None else placement.shape
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        described: State = map_tensors(describe, dict(state))
        return described

    def _exchange_text(self, text: str) -> list[str]:
        with self._contract.waiting(Event("optimizer state", "")):
            return exchange_text(text, self._group, limit_seconds=self._contract.limit_seconds)

    # The tensors.

    def _gather(self, turn: int, dtype: torch.dtype, described: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """One tensor of each parameter's state, on the host, by the `id` of its description."""
        held = {number: self._ranges(number, tensor) for number, tensor in described.items()}
        sizes = [sum(held[number][rank].numel for number in described) for rank in range(self._group.size)]
        device = next(iter(self._placements.values())).param.device
        mine = [
            large_tensors_in(self._mine[number])[turn].detach().to(device).reshape(-1)
            for number in described
            if held[number][self._group.rank].numel
        ]
        source = torch.cat(mine) if mine else torch.empty(0, dtype=dtype, device=device)
        parts = self._send(source, sizes, Event("optimizer state", f"{min(described)} {turn} {dtype}"))
        if not parts:
            return {}
        whole: dict[int, Tensor] = {}
        for number, tensor in described.items():
            flat = torch.empty(tensor.numel(), dtype=dtype, device="cpu")
            for rank, (start, stop) in enumerate(held[number]):
                flat[start:stop] = parts[rank][: stop - start]
                parts[rank] = parts[rank][stop - start :]
            whole[id(tensor)] = flat.view(tensor.shape)
        return whole

    def _ranges(self, number: int, tensor: Tensor) -> Sequence[Range]:
        """The elements of a state that each rank has."""
        placement = self._placements[number]
        if placement.owner is None:
            return placement.ranges
        return [Range(0, tensor.numel() if rank == placement.owner else 0) for rank in range(self._group.size)]

    def _send(self, source: Tensor, sizes: Sequence[int], event: Event) -> list[Tensor]:
        """Sends `source` to the recipients; returns what came from each rank, or nothing."""
        tag, size = message_tag(event), self._group.size
        whole = source.new_empty(sum(sizes) if self._receives else 0)
        if len(self._recipients) == size:
            pending = all_gather(whole, source, self._group, sizes=sizes, tag=tag)
        else:
            goes = [source.numel() if rank in self._recipients else 0 for rank in range(size)]
            comes = list(sizes) if self._receives else [0] * size
            pending = all_to_all(whole, source, self._group, output_sizes=comes, input_sizes=goes, tag=tag)
        with self._contract.waiting(event):
            pending.wait(self._contract.limit_seconds)
        return list(whole.split(list(sizes))) if self._receives else []


def _numel(placement: StatePlacement) -> int:
    return max(1, sum(held.numel for held in placement.ranges))


def large_tensors_in(state: Any) -> list[Tensor]:
    """The tensors of a state with at least one dimension, in order, each once."""
    return list({id(tensor): tensor for tensor in tensors_in(state) if tensor.ndim}.values())


_ANY = torch.zeros(())


def _same_state(one: State, other: State) -> bool:
    """Whether two descriptions are equal."""
    (form, tensors), (other_form, others) = _without_tensors(one), _without_tensors(other)
    return (list(one), form) == (list(other), other_form) and all(
        a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or torch.equal(a, b) or bool(a.isnan() & b.isnan()))
        for a, b in zip(tensors, others, strict=True)
    )


def _without_tensors(state: State) -> tuple[State, list[Tensor]]:
    """The state with one and the same tensor in all places, and its own tensors."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return _ANY

    return map_tensors(take, state), tensors
