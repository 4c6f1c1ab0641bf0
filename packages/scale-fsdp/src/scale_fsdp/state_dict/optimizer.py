"""The whole state of an optimizer by the names of parameters, gathered from all ranks, and cut for them again.

An optimizer on shards keeps state in their shapes. Gathered it is that of an optimizer of the plain model: under the
plain names, in whole tensors. So it loads at another number of ranks, under another wrapping, with flat parameters or
without, and into a plain optimizer; and the other way round. It is asked for by `state_dict()` and loaded by
`load_state_dict()`, which wrappers around optimizers have as well.

    {"state": {"layer.weight": {"step": tensor(3.), "exp_avg": tensor([[...]])}, ...},
     "param_groups": [{"lr": 0.001, ..., "params": ["layer.weight", ...]}]}

In this form torch.distributed.checkpoint speaks of optimizers, too. torch's own optimizers have numbers in place of
names: `shard_optim_state_dict` makes that of it, for an optimizer on shards or a plain one.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import all_gather
from scale_core.comm.control_plane import exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, identity, message_tag
from scale_core.flat.buffer import FlatBuffer
from scale_core.state.param_groups import REGROUP
from scale_core.state.param_ownership import Holding, check_known, is_number
from scale_core.state.torch_state_dict import SHARDS, view
from scale_fsdp.state_dict.naming import check_none_apart, holdings_in, names_by_buffer, plain_order, ranks_in
from scale_fsdp.unit import Unit, units_in

# What kinds of state the ranks' optimizers keep, agreed on before anything is gathered.
#
# Each entry of an optimizer's state is one number for a parameter, the same on all ranks, or a tensor of the shard's
# shape. A rank that holds nothing of a parameter may have no entry, so what there is to gather is said by all together.


@dataclass(frozen=True)
class Kind:
    """What one entry of a parameter's state is.

    Attributes:
        dtype: Of the tensor; "" where it is none.
        is_elements: It has one element for each of the parameter's; else it is a number.
        value: The number.
    """

    dtype: str
    is_elements: bool
    value: Any = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return dtype

    def number(self) -> Any:
        """The number as the optimizer has it: a 0-dim tensor, or a value of Python's."""
        return torch.tensor(self.value, dtype=self.torch_dtype) if self.dtype else self.value


Kinds = dict[str, dict[str, Kind]]
"""The kinds of state by the parameter's name and the optimizer's key."""


def kinds_of(holdings: Sequence[Holding], state: Mapping[str, Any]) -> Kinds:
    """Returns the kinds of state that an optimizer keeps for a tensor that holds these.

    Raises:
        ValueError: An entry is neither a number nor a tensor of the shard's shape.
    """
    return {
        holding.name: {key: _kind(holding, key, value) for key, value in state.items()}
        for holding in holdings
        if state or holding.stop > holding.start
    }


def agree_on_kinds(describe: Callable[[], Kinds], group: Group, contract: Contract) -> Kinds:
    """Returns what all ranks together have, where each describes its own.

    Raises:
        ValueError: On all ranks alike: one could not describe its state, or they differ.
    """
    try:
        error, mine = "", describe()
    except ValueError as problem:
        error, mine = str(problem), {}
    if group.size == 1:
        if error:
            raise ValueError(error)
        return mine
    told = {
        name: {key: [kind.dtype, kind.is_elements, kind.value] for key, kind in kinds.items()}
        for name, kinds in mine.items()
    }
    text = json.dumps([error, told], sort_keys=True)
    with contract.waiting(Event("optimizer state", "")):
        digests = [row[0] for row in exchange([identity(text)], group, limit_seconds=contract.limit_seconds)]
        if len(set(digests)) == 1 and not error:
            return mine
        texts = exchange_text(text, group, limit_seconds=contract.limit_seconds)
    return _merged([json.loads(each) for each in texts])


def _kind(holding: Holding, key: str, value: Any) -> Kind:
    if not isinstance(value, Tensor):
        if _is_plain(value):
            return Kind("", False, value)
        raise ValueError(
            f"optimizer state {holding.name}.{key} is a {type(value).__name__}, expected a tensor or a number: what "
            "such an optimizer keeps can't be gathered"
        )
    if is_number(key, value.shape, holding.shape):
        return Kind(str(value.dtype), False, value.item())
    if value.shape != holding.owner.shape:
        raise ValueError(
            f"optimizer state {holding.name}.{key} has shape {tuple(value.shape)}, expected the shard's "
            f"{tuple(holding.owner.shape)} or a number: this optimizer needs whole parameters, so it can't step on "
            "shards"
        )
    return Kind(str(value.dtype), True)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _merged(told: Sequence[tuple[str, Mapping[str, Mapping[str, Sequence[Any]]]]]) -> Kinds:
    failed = [(rank, error) for rank, (error, _) in enumerate(told) if error]
    if failed:
        raise ValueError(f"{failed[0][1]} (on rank {failed[0][0]})")
    merged: dict[str, dict[str, tuple[int, Kind]]] = {}
    for rank, (_, kinds) in enumerate(told):
        for name, entries in kinds.items():
            for key, (dtype, is_elements, value) in entries.items():
                kind = Kind(dtype, is_elements, value)
                first, known = merged.setdefault(name, {}).setdefault(key, (rank, kind))
                if not _are_same(known, kind):
                    raise ValueError(
                        f"optimizer state {name}.{key} differs between the ranks: {_in_words(known)} on rank {first}, "
                        f"{_in_words(kind)} on rank {rank}: all ranks must step together"
                    )
    for rank, (_, kinds) in enumerate(told):
        for name in sorted(kinds.keys() & merged.keys()):  # In an order that is the same on all ranks.
            for key in sorted(merged[name].keys() - kinds[name].keys()):
                raise ValueError(
                    f"optimizer state {name}.{key} is there on rank {merged[name][key][0]}, but not on rank {rank}, "
                    "which holds a part of the parameter, too: all ranks must step together"
                )
    return {name: {key: kind for key, (_, kind) in entries.items()} for name, entries in merged.items()}


def _are_same(one: Kind, other: Kind) -> bool:
    both_nan = all(isinstance(kind.value, float) and math.isnan(kind.value) for kind in (one, other))
    return one == other or (both_nan and one.dtype == other.dtype)


def _in_words(kind: Kind) -> str:
    return f"a tensor of {kind.dtype}" if kind.is_elements else repr(kind.value)


_NAMES = ("params", "param_names")


class HasState(Protocol):
    """What is asked of an optimizer, or of a wrapper around one."""

    @property
    def param_groups(self) -> Any: ...

    def state_dict(self) -> Any: ...


def full_optim_state_dict(
    model: nn.Module, optimizer: HasState, *, recipient_rank: int | None = 0
) -> dict[str, Any] | None:
    """Gathers the whole state of an optimizer, by name, on the CPU. All ranks call it together, between steps.

    One unit's tensors of one kind, such as all its first moments, are on the device at a time.

        >>> import torch
        >>> from scale_fsdp import full_optim_state_dict, fully_shard, shard_optim_state_dict
        >>> model = fully_shard(torch.nn.Linear(3, 2))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> full = full_optim_state_dict(model, optimizer)
        >>> full["state"]["weight"]["exp_avg"].shape
        torch.Size([2, 3])
        >>> plain = torch.nn.Linear(3, 2)
        >>> plain_optimizer = torch.optim.Adam(plain.parameters())
        >>> plain_optimizer.load_state_dict(shard_optim_state_dict(full, plain, plain_optimizer))

    Args:
        model: What the optimizer trains: sharded, plain, or partly sharded.
        optimizer: The optimizer, or a wrapper with `param_groups` and `state_dict()`. What its state dict has beside
            "state" and "param_groups" is kept.
        recipient_rank: Which of the model's ranks gets it; None is all of them.

    Returns:
        The state on the recipient, None on the others.

    Raises:
        ValueError: On all ranks: a parameter is none of the model's, a state is neither a number nor a tensor of the
            shard's shape, or the ranks have not stepped alike.
        RuntimeError: A unit is over other ranks than the model.
        ScaleDistributedError: A rank did something else.
    """
    check_none_apart(model, "full_optim_state_dict")
    group = ranks_in(model)
    if recipient_rank is not None and not 0 <= recipient_rank < group.size:
        raise ValueError(
            f"recipient_rank: expected one of the model's ranks, 0 to {group.size - 1}, or None for all of them, got "
            f"{recipient_rank}"
        )
    view(optimizer)
    given = optimizer.state_dict()
    owners = holdings_in(model)
    params = [param for each in optimizer.param_groups for param in each["params"]]
    values = dict(zip(params, _by_position(given), strict=True))

    def describe() -> Kinds:
        check_known(optimizer, owners)
        kinds: Kinds = {}
        for param in params:
            if owners[param][0].is_shard:
                kinds.update(kinds_of(owners[param], values[param]))
        return kinds

    kinds = agree_on_kinds(describe, group, _contract_of(model))
    keeps = recipient_rank in (None, group.rank)
    gathered: dict[tuple[str, str], Tensor] = {}
    for unit, buffer, names in names_by_buffer(model):
        _gather(gathered, unit, buffer, names, kinds, values, keeps=keeps)
    if not keeps:
        return None
    state: dict[str, dict[str, Any]] = {}
    for param in params:
        for holding in owners[param]:
            if not holding.is_shard:
                state[holding.name] = {key: _on_host(value) for key, value in values[param].items()}
            elif holding.name in kinds:
                state[holding.name] = {
                    key: gathered[holding.name, key] if kind.is_elements else kind.number()
                    for key, kind in kinds[holding.name].items()
                }
    groups = [
        {**_options(saved), "params": _names(each["params"], owners, model)}
        for saved, each in zip(given["param_groups"], optimizer.param_groups, strict=True)
    ]
    extra = {key: value for key, value in given.items() if key not in ("state", "param_groups", SHARDS)}
    return {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": groups, **extra}


def shard_optim_state_dict(
    full: Mapping[str, Any], model: nn.Module, optimizer: HasState | None = None
) -> dict[str, Any]:
    """Makes this rank's state for an optimizer out of the whole one; nothing is sent.

    It has the form of torch's optimizers: `optimizer.load_state_dict(shard_optim_state_dict(full, model, optimizer))`.

    Args:
        full: As `full_optim_state_dict` has returned it; it is not changed, nor does the result share memory with it.
        model: What the optimizer trains: sharded otherwise than then, or plain.
        optimizer: What will load it: its parameters are found by name. With None they are taken to be in the order in
            which they were saved (that of `model.parameters()`, where those are flat), as in the program that saved.

    Raises:
        ValueError: The state is not by name, or that of another model or of other groups; or a tensor has another
            shape.
        TypeError: It is None, as on ranks that did not receive it.
    """
    from scale_core.state.optim_state_dict import slots_from  # Loads torch's checkpoint package, which takes a second.

    _check_form(full)
    owners = holdings_in(model)
    view(optimizer)
    groups = _saved_groups(full, owners) if optimizer is None else _own_groups(full, owners, optimizer)
    slots = slots_from(full["state"], {owner: owners[owner] for group in groups for owner in group}, {})
    numbers = {owner: number for number, owner in enumerate(owner for group in groups for owner in group)}
    # The tensors are views of the given ones as yet, and an optimizer writes into its own.
    state = {numbers[owner]: {key: _copied(value) for key, value in values.items()} for owner, values in slots.items()}
    packed = [
        {**_options(saved), "params": [numbers[owner] for owner in group]}
        for saved, group in zip(full["param_groups"], groups, strict=True)
    ]
    extra = {key: value for key, value in full.items() if key not in ("state", "param_groups", SHARDS)}
    return {"state": state, "param_groups": packed, **extra}


# Gathering.


def _gather(
    gathered: dict[tuple[str, str], Tensor],
    unit: Unit,
    buffer: FlatBuffer,
    names: Mapping[str, int],
    kinds: Kinds,
    values: Mapping[Tensor, Mapping[str, Any]],
    *,
    keeps: bool,
) -> None:
    """Gathers all tensors of one buffer's parameters, one key and dtype after the other."""
    wanted: dict[tuple[str, Kind], list[str]] = {}
    for name in names:
        for key, kind in kinds.get(name, {}).items():
            if kind.is_elements:
                wanted.setdefault((key, kind), []).append(name)
    for (key, kind), members in sorted(wanted.items(), key=lambda item: (item[0][0], item[0][1].dtype)):
        mine = _packed(buffer, [names[name] for name in members], key, kind, values)
        whole = _everyones(unit, buffer, mine)
        for name in members if keeps else ():
            entry = buffer.layout.entries[names[name]]
            gathered[name, key] = _on_host(whole.narrow(0, entry.offset, entry.numel).view(entry.shape))


def _packed(
    buffer: FlatBuffer, numbers: Sequence[int], key: str, kind: Kind, values: Mapping[Tensor, Mapping[str, Any]]
) -> Tensor:
    """This rank's part [S] of one kind of state, laid out as the shard is."""
    mine = torch.zeros(buffer.layout.shard_numel, dtype=kind.torch_dtype, device=buffer.compute_device)
    for number in dict.fromkeys(0 if buffer.flatten else number for number in numbers):
        value = values.get(buffer.exposed[number], {}).get(key)
        if value is not None and buffer.flatten:
            mine.copy_(value.detach())
        elif value is not None:
            span = buffer.spans[number]
            mine.narrow(0, span.shard_offset, span.numel).copy_(value.detach().reshape(-1))
    return mine


def _everyones(unit: Unit, buffer: FlatBuffer, mine: Tensor) -> Tensor:
    """The parts of all ranks, [W * S]."""
    whole = torch.empty(buffer.layout.full_numel, dtype=mine.dtype, device=mine.device)
    if not whole.numel():
        return whole
    event = Event("whole optimizer state", unit.name)
    contract = _contract_of(unit.module)
    with contract.waiting(event):
        all_gather(whole, mine, buffer.group, tag=message_tag(event)).wait(contract.limit_seconds)
    return whole


def _contract_of(model: nn.Module) -> Contract:
    for unit in units_in(model):
        if unit.root is not None:
            unit.root.recover()
            if not unit.root.stale:  # Else it has the ranks of before.
                return unit.root.contract
        return Contract(unit.options.ranks.whole, unit.options.limit_seconds)
    return Contract(ranks_in(model))


def _by_position(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The state of each parameter, in the order of the groups."""
    for group in given["param_groups"]:
        for number in group["params"]:
            yield given["state"].get(number, {})


def _names(params: Sequence[Tensor], owners: Mapping[Tensor, Sequence[Holding]], model: nn.Module) -> list[str]:
    """The names of a group's parameters; where one is flat, in the order in which the plain model lists them."""
    names = [holding.name for param in params for holding in owners[param]]
    if any(holding.shares_owner for param in params for holding in owners[param]):
        order = plain_order(model)
        names.sort(key=lambda name: order[name])
    return names


# Cutting.


def _check_form(full: Any) -> None:
    if full is None:
        raise TypeError(
            "this rank has no optimizer state to load: gather_full_optim_state_dict gives it to one rank, so load the "
            "saved file on every rank, or gather it with recipient_rank=None"
        )
    named = isinstance(full, Mapping) and {"state", "param_groups"} <= full.keys()
    if named and not all(isinstance(name, str) for group in full["param_groups"] for name in group["params"]):
        raise ValueError(
            "expected the state of an optimizer by the names of parameters, got one by numbers, as torch's own "
            "state_dict() gives it: load it into an optimizer of the plain model, and write "
            "full_optim_state_dict(plain_model, plain_optimizer)"
        )
    if not named:
        raise ValueError(
            "expected the state of an optimizer, {'state': ..., 'param_groups': ...}, as "
            f"gather_full_optim_state_dict gives it, got {type(full).__name__}"
        )


def _own_groups(
    full: Mapping[str, Any], owners: Mapping[Tensor, Sequence[Holding]], optimizer: HasState
) -> list[list[Tensor]]:
    """The groups of the optimizer that will load the state, which must be the saved ones."""
    check_known(optimizer, owners)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if len(groups) != len(full["param_groups"]):
        raise ValueError(
            f"the saved optimizer has {len(full['param_groups'])} parameter groups, this one {len(groups)}: {REGROUP}"
        )
    for number, (saved, group) in enumerate(zip(full["param_groups"], groups, strict=True)):
        mine = {holding.name for owner in group for holding in owners[owner]}
        if differing := sorted(mine ^ set(saved["params"])):
            where = "saved one" if differing[0] in saved["params"] else "optimizer's"
            raise ValueError(
                f"group {number} of the optimizer has other parameters than the saved one: '{differing[0]}' is only in "
                f"the {where} ({len(differing)} differ): {REGROUP}"
            )
    return groups


def _saved_groups(full: Mapping[str, Any], owners: Mapping[Tensor, Sequence[Holding]]) -> list[list[Tensor]]:
    """The groups of an optimizer that is built as the saved one was."""
    found = {holding.name: owner for owner, held in owners.items() for holding in held}
    place = {owner: number for number, owner in enumerate(owners)}
    groups = []
    for number, saved in enumerate(full["param_groups"]):
        if unknown := [name for name in saved["params"] if name not in found]:
            raise ValueError(
                f"the model has no parameter '{unknown[0]}', which is in group {number} of the saved optimizer "
                f"({len(unknown)} are unknown): it is the state of another model"
            )
        group = list(dict.fromkeys(found[name] for name in saved["params"]))
        names = {holding.name for owner in group for holding in owners[owner]}
        if lacking := sorted(names - set(saved["params"])):
            raise ValueError(
                f"one flat parameter holds '{lacking[0]}' and others of group {number}, in which it was not saved: use "
                "a model without flatten_parameters"
            )
        if any(holding.shares_owner for owner in group for holding in owners[owner]):
            group.sort(key=lambda owner: place[owner])
        groups.append(group)
    return groups


# Copies.


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _on_host(value) for key, value in group.items() if key not in _NAMES}


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
