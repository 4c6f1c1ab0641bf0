"""Full optimizer state by the names of parameters, gathered from all ranks, and sharded again.

An optimizer on shards has state in their shapes. Gathered it is that of an optimizer of the plain model, under plain
names. So it loads at another number of ranks, under another wrapping, with flat parameters or without, and into a plain
optimizer; and vice versa. Wrappers around optimizers have `state_dict()` and `load_state_dict()` as well.

    {"state": {"layer.weight": {"step": tensor(3.), "exp_avg": tensor([[...]])}, ...},
     "param_groups": [{"lr": 0.001, ..., "params": ["layer.weight", ...]}]}

torch.distributed.checkpoint has this form, too. torch's own optimizers have numbers in place of names:
`shard_optim_state_dict` makes such a state, for an optimizer on shards or a plain one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import all_gather, exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, fingerprint_of, message_tag
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.layout import ShardSpan
from scale_core.state.param_groups import REGROUP
from scale_core.state.param_ownership import ParamSlice, check_known, is_per_param_number
from scale_core.state.torch_state_dict import SHARDS, install_hooks
from scale_fsdp.runtime.unit import Unit, units_in
from scale_fsdp.state_dict.naming import check_same_ranks, model_group, names_by_buffer, plain_order, slices_in


class StateMeta(NamedTuple):
    """What one entry of a parameter's state is."""

    dtype: str  # of the tensor; "" where it is none
    is_elements: bool  # one element for each of the parameter's; else one number
    value: Any = None  # the number

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return dtype

    def scalar(self) -> Any:
        """The number as the optimizer has it: a 0-dim tensor, or a Python value."""
        return torch.tensor(self.value, dtype=self.torch_dtype) if self.dtype else self.value

    def __str__(self) -> str:
        return f"a tensor of {self.dtype}" if self.is_elements else repr(self.value)


StateMetas = dict[str, dict[str, StateMeta]]  # by the parameter's name and the optimizer's key


def state_metas(slices: Sequence[ParamSlice], state: Mapping[str, Any]) -> StateMetas:
    """What an optimizer keeps for a tensor that holds these slices; raises ValueError for what can't be gathered."""
    return {
        held.name: {key: _state_meta(held, key, value) for key, value in state.items()}
        for held in slices
        if state or held.stop > held.start
    }


def all_gather_state_metas(describe: Callable[[], StateMetas], group: Group, contract: Contract) -> StateMetas:
    """What the optimizers of all ranks keep; raises ValueError on all ranks where one fails or they differ.

    A rank that holds nothing of a parameter may have no state of it.
    """
    try:
        error, metas = "", describe()
    except ValueError as problem:
        if group.size == 1:
            raise
        error, metas = str(problem), {}
    text = json.dumps([error, metas], sort_keys=True)
    with contract.waiting(Event("optimizer state", "")):
        digests = [row[0] for row in exchange([fingerprint_of(text)], group, limit_seconds=contract.limit_seconds)]
        if len(set(digests)) == 1 and not error:
            return metas
        texts = exchange_text(text, group, limit_seconds=contract.limit_seconds)
    by_rank = [json.loads(each) for each in texts]
    for rank, (error, _) in enumerate(by_rank):
        if error:
            raise ValueError(f"{error} (on rank {rank})")
    return _merge_state_metas([metas for _, metas in by_rank])


def _merge_state_metas(by_rank: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]) -> StateMetas:
    merged: dict[str, dict[str, tuple[int, StateMeta]]] = {}
    for rank, metas in enumerate(by_rank):
        for name, entries in metas.items():
            for key, entry in entries.items():
                meta = StateMeta(*entry)
                first, known = merged.setdefault(name, {}).setdefault(key, (rank, meta))
                if known != meta and repr(known) != repr(meta):  # NaN is not equal to itself.
                    raise ValueError(
                        f"optimizer state {name}.{key} differs between the ranks: {known} on rank {first}, {meta} on "
                        f"rank {rank}: all ranks must step together"
                    )
    for rank, metas in enumerate(by_rank):
        for name in sorted(metas):  # so that all ranks raise the same error
            if missing := sorted(merged.get(name, {}).keys() - metas[name].keys()):
                first, _ = merged[name][missing[0]]
                raise ValueError(
                    f"optimizer state {name}.{missing[0]} is there on rank {first}, but not on rank {rank}, which "
                    "holds a part of the parameter, too: all ranks must step together"
                )
    return {name: {key: meta for key, (_, meta) in entries.items()} for name, entries in merged.items()}


def _state_meta(held: ParamSlice, key: str, value: Any) -> StateMeta:
    if not isinstance(value, Tensor):
        if _is_plain(value):
            return StateMeta("", False, value)
        raise ValueError(
            f"optimizer state {held.name}.{key} is a {type(value).__name__}, expected a tensor or a number: such a "
            "state can't be gathered"
        )
    if is_per_param_number(key, value.shape, held.shape):
        return StateMeta(str(value.dtype), False, value.item())
    if value.shape != held.owner.shape:
        raise ValueError(
            f"optimizer state {held.name}.{key} has shape {tuple(value.shape)}, expected the shard's "
            f"{tuple(held.owner.shape)} or a number: this optimizer needs whole parameters, so it can't step on shards"
        )
    return StateMeta(str(value.dtype), True)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    return value is None or isinstance(value, bool | int | float | str)


class OptimizerLike(Protocol):
    """An optimizer, or a wrapper around one."""

    @property
    def param_groups(self) -> Any: ...

    def state_dict(self) -> Any: ...


def full_optim_state_dict(
    model: nn.Module, optimizer: OptimizerLike, *, recipient_rank: int | None = 0
) -> dict[str, Any] | None:
    """Gathers the full state of an optimizer, by name, on the CPU. All ranks call it together, between steps.

    One unit's tensors of one key, such as all its first moments, are on the device at a time.

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
        model: The optimizer's model: sharded, plain, or partly sharded.
        optimizer: The optimizer, or a wrapper with `param_groups` and `state_dict()`. What its state dict has beside
            "state" and "param_groups" is kept.
        recipient_rank: Which of the model's ranks gets it; None is all of them.

    Returns:
        The state on the recipient, None on the others.

    Raises:
        ValueError: On all ranks: a parameter is none of the model's, a state is neither a number nor a tensor of the
            shard's shape, or the ranks' states differ.
        RuntimeError: A unit is over other ranks than the model.
        ScaleDistributedError: A rank did something else.
    """
    check_same_ranks(model, "full_optim_state_dict")
    group = model_group(model)
    if recipient_rank is not None and not 0 <= recipient_rank < group.size:
        raise ValueError(
            f"recipient_rank: expected one of the model's ranks, 0 to {group.size - 1}, or None for all of them, got "
            f"{recipient_rank}"
        )
    install_hooks(optimizer)
    given = optimizer.state_dict()
    owners = slices_in(model)
    params = [param for each in optimizer.param_groups for param in each["params"]]
    values = dict(zip(params, _state_by_position(given), strict=True))

    def describe() -> StateMetas:
        check_known(optimizer, owners)
        metas: StateMetas = {}
        for param in params:
            if owners[param][0].is_shard:
                metas.update(state_metas(owners[param], values[param]))
        return metas

    metas = all_gather_state_metas(describe, group, _contract_of(model))
    keeps = recipient_rank in (None, group.rank)
    gathered: dict[tuple[str, str], Tensor] = {}
    for unit, buffer, names in names_by_buffer(model):
        gathered.update(_gather(unit, buffer, names, metas, values, keeps=keeps))
    if not keeps:
        return None
    state: dict[str, dict[str, Any]] = {}
    for param in params:
        for held in owners[param]:
            if not held.is_shard:
                state[held.name] = {key: _to_cpu(value) for key, value in values[param].items()}
            elif held.name in metas:
                state[held.name] = {
                    key: gathered[held.name, key] if meta.is_elements else meta.scalar()
                    for key, meta in metas[held.name].items()
                }
    groups = [
        {**_options(saved), "params": _group_names(each["params"], owners, model)}
        for saved, each in zip(given["param_groups"], optimizer.param_groups, strict=True)
    ]
    extra = {key: value for key, value in given.items() if key not in ("state", "param_groups", SHARDS)}
    return {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": groups, **extra}


def shard_optim_state_dict(
    full: Mapping[str, Any], model: nn.Module, optimizer: OptimizerLike | None = None
) -> dict[str, Any]:
    """Returns this rank's part of a full optimizer state; nothing is sent.

    It has the form of torch's optimizers: `optimizer.load_state_dict(shard_optim_state_dict(full, model, optimizer))`.

    Args:
        full: As `full_optim_state_dict` has returned it; it is not changed, nor does the result share memory with it.
        model: The optimizer's model, in any sharding, or plain.
        optimizer: The optimizer that will load it: its parameters are found by name. None: they are in the order in
            which they were saved (that of `model.parameters()`, where those are flat).

    Raises:
        ValueError: The state is not by name, or that of another model or of other groups; or a tensor has another
            shape.
        TypeError: It is None, as on ranks that did not receive it.
    """
    from scale_core.state.optim_state_dict import entries_from  # Loads torch's checkpoint package: a second.

    _check_form(full)
    owners = slices_in(model)
    install_hooks(optimizer)
    groups = _saved_groups(full, owners) if optimizer is None else _optimizer_groups(full, owners, optimizer)
    slots = entries_from(full["state"], {owner: owners[owner] for group in groups for owner in group}, {})
    numbers = {owner: number for number, owner in enumerate(owner for group in groups for owner in group)}
    # The tensors are views of the given ones, and an optimizer writes into its own.
    state = {
        numbers[owner]: {
            key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in values.items()
        }
        for owner, values in slots.items()
    }
    packed = [
        {**_options(saved), "params": [numbers[owner] for owner in group]}
        for saved, group in zip(full["param_groups"], groups, strict=True)
    ]
    extra = {key: value for key, value in full.items() if key not in ("state", "param_groups", SHARDS)}
    return {"state": state, "param_groups": packed, **extra}


def _gather(
    unit: Unit,
    buffer: FlatBuffer,
    names: Mapping[str, int],
    metas: StateMetas,
    values: Mapping[Tensor, Mapping[str, Any]],
    *,
    keeps: bool,
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Gathers all tensors of one buffer's parameters, one key and dtype after the other: ((name, key), on the host)."""
    names_by_key: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for key, meta in metas.get(name, {}).items():
            if meta.is_elements:
                names_by_key.setdefault((key, meta.dtype), []).append(name)
    event, layout, contract = Event("whole optimizer state", unit.name), buffer.layout, _contract_of(unit.module)
    for (key, _), members in sorted(names_by_key.items()):
        dtype = metas[members[0]][key].torch_dtype
        full = torch.empty(layout.full_numel, dtype=dtype, device=buffer.compute_device)  # [W * S]
        if full.numel():
            indices = {0 if buffer.flatten else names[name] for name in members}
            tensors = {index: values.get(buffer.sharded_params[index], {}).get(key) for index in indices}
            part = torch.zeros(layout.shard_numel, dtype=dtype, device=buffer.compute_device)
            pack_shard(part, {index: t for index, t in tensors.items() if t is not None}, buffer.spans, buffer.flatten)
            with contract.waiting(event):
                all_gather(full, part, buffer.group, tag=message_tag(event)).wait(contract.limit_seconds)
        for name in members if keeps else ():
            entry = layout.entries[names[name]]
            yield (name, key), _to_cpu(full.narrow(0, entry.offset, entry.numel).view(entry.shape))


def pack_shard(part: Tensor, tensors: Mapping[int, Tensor], spans: Sequence[ShardSpan], flatten: bool) -> None:
    """Writes tensors of the local shards' shapes into `part` [S], as the shards are in their flat buffer."""
    for index, tensor in tensors.items():
        target = part if flatten else part.narrow(0, spans[index].shard_offset, spans[index].numel)
        target.copy_(tensor.detach().reshape(-1))


def _contract_of(model: nn.Module) -> Contract:
    for unit in units_in(model):
        if unit.root is not None:
            unit.root.recover()
            if not unit.root.stale:  # Else it has the ranks of before.
                return unit.root.contract
        return Contract(unit.options.mesh_info.whole, unit.options.limit_seconds)
    return Contract(model_group(model))


def _state_by_position(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The state of each parameter, in the order of the groups."""
    for group in given["param_groups"]:
        for number in group["params"]:
            yield given["state"].get(number, {})


def _group_names(
    params: Sequence[Tensor], owners: Mapping[Tensor, Sequence[ParamSlice]], model: nn.Module
) -> list[str]:
    """Names of a group's parameters; in the plain model's order if one of them is flat."""
    names = [held.name for param in params for held in owners[param]]
    if any(held.shares_owner for param in params for held in owners[param]):
        order = plain_order(model)
        names.sort(key=lambda name: order[name])
    return names


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


def _optimizer_groups(
    full: Mapping[str, Any], owners: Mapping[Tensor, Sequence[ParamSlice]], optimizer: OptimizerLike
) -> list[list[Tensor]]:
    """The groups of the optimizer that will load the state, which must be the saved ones."""
    check_known(optimizer, owners)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if len(groups) != len(full["param_groups"]):
        raise ValueError(
            f"the saved optimizer has {len(full['param_groups'])} parameter groups, this one {len(groups)}: {REGROUP}"
        )
    for number, (saved, group) in enumerate(zip(full["param_groups"], groups, strict=True)):
        own = {held.name for owner in group for held in owners[owner]}
        if differing := sorted(own ^ set(saved["params"])):
            where = "saved one" if differing[0] in saved["params"] else "optimizer's"
            raise ValueError(
                f"group {number} of the optimizer has other parameters than the saved one: '{differing[0]}' is only in "
                f"the {where} ({len(differing)} differ): {REGROUP}"
            )
    return groups


def _saved_groups(full: Mapping[str, Any], owners: Mapping[Tensor, Sequence[ParamSlice]]) -> list[list[Tensor]]:
    """The groups of an optimizer that is built as the saved one was."""
    found = {held.name: owner for owner, slices in owners.items() for held in slices}
    position = {owner: number for number, owner in enumerate(owners)}
    groups = []
    for number, saved in enumerate(full["param_groups"]):
        if unknown := [name for name in saved["params"] if name not in found]:
            raise ValueError(
                f"the model has no parameter '{unknown[0]}', which is in group {number} of the saved optimizer "
                f"({len(unknown)} are unknown): it is the state of another model"
            )
        group = list(dict.fromkeys(found[name] for name in saved["params"]))
        names = {held.name for owner in group for held in owners[owner]}
        if lacking := sorted(names - set(saved["params"])):
            raise ValueError(
                f"one flat parameter holds '{lacking[0]}' and others of group {number}, in which it was not saved: use "
                "a model without flatten_parameters"
            )
        if any(held.shares_owner for owner in group for held in owners[owner]):
            group.sort(key=lambda owner: position[owner])
        groups.append(group)
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _to_cpu(value) for key, value in group.items() if key not in ("params", "param_names")}


def _to_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
