"""Gathers an optimizer's full state from all ranks, on one of them or on all.

It goes bucket by bucket and tensor by tensor: in addition to the state that it keeps anyway, a device holds at most
one tensor per parameter of a bucket. Before anything is sent, the ranks exchange a description of their state on the
host: one that holds nothing of a parameter doesn't know, and if ranks have made different steps, all of them raise.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import HOST, all_gather, exchange_text
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.optim.traits import is_per_param_number
from scale_core.shard import on_local_tensors
from scale_core.sharded_tensor.full_tensor import Part, join_parts
from scale_core.state.param_ownership import ParamSlice, not_elementwise
from scale_core.tree import map_leaves, map_tensors, tensors_in

State = Mapping[Any, Any]  # An optimizer's state of one parameter: tensors, numbers, and containers of them.

_EVENT = Event("optimizer state", "")


@dataclass(frozen=True, eq=False)
class ParamState:
    """An optimizer's state of one parameter: this rank's part of it, and the elements of each rank."""

    held: ParamSlice  # Each tensor of the state has the shape of its owner
    group: Group  # The ranks that have a part
    parts: Sequence[Part]  # By rank of the group, the elements that it keeps the state of
    device: torch.device  # From where its tensors are sent; of a bucket, the first parameter's
    values: State  # Empty where this rank has none
    rank_of_all: int | None = None  # The rank that keeps all of the state, of any shape; None if each keeps elements

    @property
    def describer(self) -> int:
        """The rank of the group that knows the state: the first that has elements."""
        if self.rank_of_all is not None:
            return self.rank_of_all
        return next((rank for rank, part in enumerate(self.parts) if part.numel), 0)

    @property
    def is_compared(self) -> bool:
        """Whether this rank's state must equal the state of the others; a rank without elements may have another."""
        if self.rank_of_all is not None:
            return self.group.rank == self.rank_of_all
        return bool(self.parts[self.group.rank].numel) or not any(part.numel for part in self.parts)

    def parts_of(self, whole: Tensor) -> Sequence[Part]:
        """By rank, the elements that it keeps of a tensor of the state."""
        if self.rank_of_all is None:
            return self.parts
        return [Part(0, whole.numel() if rank == self.rank_of_all else 0) for rank in range(self.group.size)]

    def tensors(self, key: Any, value: Any) -> list[Tensor]:
        """The tensors in a value of the state that are no numbers of the full parameter, each once."""
        tensor_by_id = {id(t): t for t in tensors_in(value) if not is_per_param_number(key, t.shape, self.held.shape)}
        return list(tensor_by_id.values())

    def described(self) -> dict[Any, Any]:
        """The state with full tensors on the meta device, and the values of numbers."""

        def describe(key: Any, tensor: Tensor) -> Tensor:
            if is_per_param_number(key, tensor.shape, self.held.shape):
                return tensor.detach().to("cpu", copy=True)
            shape = self.held.shape if self.rank_of_all is None else tensor.shape
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        return {key: map_tensors(partial(describe, key), value) for key, value in self.values.items()}


@on_local_tensors
def gather_optim_states(
    states: Sequence[ParamState],
    contract: Contract,
    *,
    keeps: bool,
    compared_over: Group | None = None,
    device: torch.device | None = HOST,
) -> list[dict[Any, Any]]:
    """Returns the full state of each parameter of a bucket where `keeps`, and nothing elsewhere.

    The parameters are held by one group, whose ranks call it together; one of them keeps the state, or all do.

    Args:
        states: This rank's parts of them.
        contract: Watches the waits.
        keeps: Whether this rank gets the state.
        compared_over: The ranks that must have made equal steps, where the group's are only some of them.
        device: Of the full tensors; None is where they were sent from. Numbers are on the host.

    Raises:
        ValueError: On all ranks: a state is neither a number nor of the shard's shape, or the ranks' states differ.
    """
    if not states:
        return []
    group, sender = states[0].group, states[0].device
    holders, recipients = _compare(states, contract, keeps, group if compared_over is None else compared_over)
    tensors_by_kind: dict[tuple[Any, int, torch.dtype], list[tuple[ParamState, Tensor]]] = {}
    for state, values in zip(states, holders, strict=True):
        for key, value in values.items():
            for index, tensor in enumerate(state.tensors(key, value)):
                tensors_by_kind.setdefault((key, index, tensor.dtype), []).append((state, tensor))
    full: dict[int, Tensor] = {}
    for (key, index, dtype), members in tensors_by_kind.items() if recipients else ():
        event = _EVENT._replace(unit=f"{states[0].held.name} {key} {index} {dtype}")
        parts = [state.parts_of(tensor) for state, tensor in members]
        local_tensors = [
            state.held.view(state.tensors(key, state.values[key])[index]).to(sender).reshape(-1)
            for (state, _), by_rank in zip(members, parts, strict=True)
            if by_rank[group.rank].numel
        ]
        source = torch.cat(local_tensors) if local_tensors else torch.empty(0, dtype=dtype, device=sender)
        sizes = [sum(part.numel for part in by_member) for by_member in zip(*parts, strict=True)]
        received = _send(source, sizes, group, recipients, contract, event)
        ends, pieces = [0] * group.size, list[tuple[Part, Tensor]]()
        for (state, tensor), by_rank in zip(members, parts, strict=True) if keeps else ():
            pieces = []
            for rank, part in enumerate(by_rank):
                pieces.append((part, received[rank][ends[rank] : ends[rank] + part.numel]))
                ends[rank] += part.numel
            full[id(tensor)] = join_parts(tuple(tensor.shape), pieces, dtype, device or state.device)
        del local_tensors, source, received, pieces  # Before there are the next ones.
    if not keeps:
        return []
    return [map_tensors(lambda tensor: full.get(id(tensor), tensor), values) for values in holders]


def _compare(
    states: Sequence[ParamState], contract: Contract, keeps: bool, over: Group
) -> tuple[list[dict[Any, Any]], list[int]]:
    """The description of each state, and the ranks of the group that want it."""
    group = states[0].group
    if group.backend == "fake":  # One process plays one of the ranks: the others are taken to have the same.
        return [state.described() for state in states], [group.rank if keeps else (group.rank + 1) % group.size]
    ranks = [over.rank] if group.size == 1 else [over.ranks.index(rank) for rank in group.ranks]
    problems = list(_misshapen(states))
    descriptions = {
        number: state.described()
        for number, state in enumerate(states)
        if not problems and state.describer == group.rank and state.values
    }
    rows = [
        pickle.loads(text.encode("latin-1"))
        for text in _exchange(pickle.dumps((keeps, descriptions)).decode("latin-1"), contract, over)
    ]
    holders: dict[int, tuple[int, dict[Any, Any]]] = {}
    for rank, (_, described) in reversed([*enumerate(rows)]):
        holders.update((number, (rank, values)) for number, values in described.items())
    for number, state in enumerate(states) if not problems else ():
        if state.is_compared:
            problems += _mismatches(state, over.rank, *holders.get(number, (ranks[state.describer], {})))
    for rank, text in enumerate(_exchange(problems[0] if problems else "", contract, over)):
        if text:
            raise ValueError(f"{text} (on rank {rank})")
    recipients = [member for member, rank in enumerate(ranks) if rows[rank][0]]
    return [holders.get(number, (0, {}))[1] for number in range(len(states))], recipients


def _exchange(text: str, contract: Contract, over: Group) -> list[str]:
    with contract.waiting(_EVENT):
        return exchange_text(text, over, limit_seconds=contract.limit_seconds)


def _misshapen(states: Sequence[ParamState]) -> Iterator[str]:
    for state in states:
        for key, value in state.values.items() if state.rank_of_all is None else ():
            for tensor in state.tensors(key, value):
                if tensor.shape != state.held.owner.shape:
                    yield str(not_elementwise(f"{state.held.name}.{key}", tensor.shape, state.held.owner.shape))


def _mismatches(state: ParamState, rank: int, describer: int, described: State) -> Iterator[str]:
    local, name = state.described(), state.held.name
    for key in [*described, *(key for key in local if key not in described)]:
        if key not in local or key not in described:
            having, not_there = (describer, rank) if key in described else (rank, describer)
            yield (
                f"optimizer state {name}.{key} is there on rank {having}, but not on rank {not_there}, which holds a "
                "part of the parameter, too: all ranks must step together"
            )
        elif _in_words(local[key]) != _in_words(described[key]):
            yield (
                f"optimizer state {name}.{key} differs between the ranks: {_in_words(described[key])} on rank "
                f"{describer}, {_in_words(local[key])} on rank {rank}: all ranks must step together"
            )


def _in_words(value: Any) -> str:
    """A described value; as text, NaN is equal to itself."""

    def leaf_in_words(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        return f"a tensor of {leaf.dtype}" if leaf.is_meta else f"{leaf.item()!r} ({leaf.dtype})"

    return str(map_leaves(leaf_in_words, value))


def _send(
    source: Tensor, sizes: Sequence[int], group: Group, recipients: Sequence[int], contract: Contract, event: Event
) -> list[Tensor]:
    """Sends `source` to one rank or to all; returns the tensors of each rank."""
    if not sum(sizes):
        return [source] * group.size
    to_one, tag = len(recipients) < group.size, message_tag(event)
    comes = list(sizes) if not to_one or group.rank in recipients else [0] * group.size
    received = source.new_empty(sum(comes))
    if to_one:
        goes = [source.numel() if rank in recipients else 0 for rank in range(group.size)]
        pending = all_to_all(received, source, group, output_sizes=comes, input_sizes=goes, tag=tag)
    else:
        pending = all_gather(received, source, group, sizes=sizes, tag=tag)
    with contract.waiting(event):
        pending.wait(contract.limit_seconds)
    return list(received.split(comes))
