"""Full optimizer state by the names of parameters, gathered from all ranks, and sharded again.

An optimizer on shards has state in their shapes. Gathered, it is the state of an optimizer of the plain
model, under plain names. So it loads at another number of ranks, under another wrapping, with flat parameters or
without, and into a plain optimizer; and vice versa. Wrappers around optimizers have `state_dict()` and
`load_state_dict()` as well.

    {"state": {"layer.weight": {"step": tensor(3.), "exp_avg": tensor([[...]])}, ...},
     "param_groups": [{"lr": 0.001, ..., "params": ["layer.weight", ...]}]}

torch.distributed.checkpoint has this form, too. torch's own optimizers have numbers in place of names:
`shard_optim_state_dict` makes such a state, for an optimizer on shards or a plain one.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import HOST
from scale_core.consistency.all_ranks import call_on_all_ranks
from scale_core.consistency.contract import Contract
from scale_core.flat.layout import ShardSpan
from scale_core.shard import on_local_tensors, unit_shard_of
from scale_core.sharded_tensor.full_tensor import Part
from scale_core.state.full_optim_state import ParamState, gather_optim_states
from scale_core.state.param_groups import NAMES, REGROUP
from scale_core.state.param_ownership import ParamSlice, check_known
from scale_core.state.torch_state_dict import SHARDS, install_hooks
from scale_core.tree import map_tensors
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.state_dict.full import gather_other_axis
from scale_fsdp.state_dict.naming import (
    ParamLocation,
    check_same_ranks,
    locations_by_buffer,
    model_group,
    plain_order,
    slice_in_unit,
    slices_in,
)


class OptimizerLike(Protocol):
    """An optimizer, or a wrapper around one."""

    @property
    def param_groups(self) -> Any: ...

    def state_dict(self) -> Any: ...


@checked_arguments
@on_local_tensors
def full_optim_state_dict(
    model: nn.Module, optimizer: OptimizerLike, *, recipient_rank: int | None = 0
) -> dict[str, Any] | None:
    """Gathers the full state of an optimizer, by name, on the CPU. All ranks call it together, between steps.

    One unit's tensors of one key, for example its first moments, are on the device at a time.

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
        optimizer: The optimizer, or a wrapper with `param_groups` and `state_dict()`. Entries of its state dict in
            addition to "state" and "param_groups" are kept.
        recipient_rank: Which of the model's ranks gets it; None is all of them.

    Returns:
        The state on the recipient, None on the others.

    Raises:
        ValueError: On all ranks: the model lacks a parameter of the optimizer, a state is neither a number nor a tensor
            of the shard's shape, or states differ between ranks.
        RuntimeError: A unit is over other ranks than the model.
        ScaleDistributedError: A rank did something else.

    See also: [the guide to state dicts](../guides/saving.md).
    """
    check_same_ranks(model, "full_optim_state_dict")
    group = model_group(model)
    if recipient_rank is not None and not 0 <= recipient_rank < group.size:
        raise ValueError(
            f"recipient_rank: expected one of the model's ranks, 0 to {group.size - 1}, or None for all of them, got "
            f"{recipient_rank}"
        )
    install_hooks(optimizer)
    local_state = optimizer.state_dict()
    owners, contract = slices_in(model), _contract_of(model)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    values = dict(zip(params, _state_by_position(local_state), strict=True))
    buffers = list(locations_by_buffer(model))
    gatherable = {location.name for _, _, its in buffers for location in its}
    call_on_all_ranks(lambda: _check_gatherable(optimizer, owners, values, gatherable), "optimizer state", contract)
    keeps = recipient_rank in (None, group.rank)
    gathered: dict[str, dict[str, Any]] = {}
    for unit, buffer, locations in buffers:
        for divided in (False, True):  # A piece is sent along the other axis from where it was computed with.
            its = [location for location in locations if location.is_divided == divided]
            states = []
            for divided_location in its:
                spans = [buffer.layout.span(divided_location.index, rank) for rank in range(buffer.group.size)]
                parts = [Part(span.start, span.stop) for span in spans]
                local_values = values.get(divided_location.owner, {})
                states.append(
                    ParamState(
                        slice_in_unit(divided_location), buffer.group, parts, buffer.compute_device, local_values
                    )
                )
            device = None if divided else HOST
            full_states = gather_optim_states(states, contract, keeps=keeps, compared_over=group, device=device)
            for divided_location, slots in zip(its, full_states, strict=False):
                gathered[divided_location.name] = (
                    _whole_slots(slots, divided_location, unit.options.limit_seconds) if divided else slots
                )
    if not keeps:
        return None
    state: dict[str, dict[str, Any]] = {}
    for param in params:
        for part in owners[param]:
            local_values = {} if part.is_shard else {key: _to_cpu(value) for key, value in values[param].items()}
            state[part.name] = gathered.get(part.name, local_values)
    groups = [
        {**_options(saved), "params": _group_names(group["params"], owners, model)}
        for saved, group in zip(local_state["param_groups"], optimizer.param_groups, strict=True)
    ]
    extra = {key: value for key, value in local_state.items() if key not in ("state", "param_groups", SHARDS)}
    return {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": groups, **extra}


@checked_arguments(own="full")
@on_local_tensors
def shard_optim_state_dict(
    full: Mapping[str, Any], model: nn.Module, optimizer: OptimizerLike | None = None
) -> dict[str, Any]:
    """Returns this rank's shard of a full optimizer state; nothing is sent.

    It has the form of torch's optimizers: `optimizer.load_state_dict(shard_optim_state_dict(full, model, optimizer))`.

    Args:
        full: As `full_optim_state_dict` has returned it; it is not changed, nor does the result share memory with it.
        model: The optimizer's model, in any sharding, or plain.
        optimizer: The optimizer that will load it: its parameters are found by name. None: they are in the order in
            which they were saved (the order of `model.parameters()`, where those are flat).

    Raises:
        ValueError: The state is not by name, or belongs to a different model or groups; or a tensor has a different
            shape.
        TypeError: It is None, as on ranks that did not receive it.

    Examples:
        >>> import torch
        >>> from scale_fsdp import full_optim_state_dict, fully_shard, shard_optim_state_dict
        >>> model = fully_shard(torch.nn.Linear(4, 3))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> full = full_optim_state_dict(model, optimizer, recipient_rank=None)  # on all ranks
        >>> optimizer.load_state_dict(shard_optim_state_dict(full, model, optimizer))

    See also: [the guide to state dicts](../guides/saving.md).
    """
    from scale_core.state.optim_state_dict import entries_from  # Loads torch's checkpoint package: a second.

    _check_form(full)
    owners = slices_in(model)
    install_hooks(optimizer)
    groups = saved_groups(full, owners) if optimizer is None else _optimizer_groups(full, owners, optimizer)
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


def _whole_slots(slots: Mapping[str, Any], piece: ParamLocation, limit_seconds: float | None) -> dict[str, Any]:
    """The state of a parameter, put together from the pieces of the ranks along another axis; on the host."""

    def whole(value: Tensor) -> Tensor:
        if tuple(value.shape) == piece.entry.shape:
            value = gather_other_axis(value, piece.buffer, piece.index, limit_seconds)
        return value.to(HOST)

    return {key: map_tensors(whole, value) for key, value in slots.items()}


def _check_gatherable(
    optimizer: OptimizerLike,
    owners: Mapping[Tensor, Sequence[ParamSlice]],
    values: Mapping[Tensor, Mapping[str, Any]],
    gatherable: Container[str],
) -> None:
    """Checks that the state of an optimizer can be gathered, and sharded again by the names of parameters."""
    check_known(optimizer, owners)
    for param, state in values.items():
        location = owners[param][0]
        if not location.is_shard:
            continue
        if location.name not in gatherable and unit_shard_of(param) is not None:
            raise ValueError(
                f"'{location.name}' is shared with a unit outside of this model, which has its shards: pass the module "
                "that holds both units"
            )
        if location.name not in gatherable:
            raise ValueError(
                f"'{location.name}' is divided by its layer, whose other shards are not gathered here: save "
                "scale_core.state.sharded_state_dict(model, optimizer)"
            )
        for key, value in state.items():
            if not isinstance(value, Tensor) and not _is_plain(value):
                raise ValueError(
                    f"optimizer state {location.name}.{key} is a {type(value).__name__}, expected a tensor or a "
                    "number: such a state can't be gathered"
                )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    return value is None or isinstance(value, bool | int | float | str)


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
    names = [part.name for param in params for part in owners[param]]
    if any(part.shares_owner for param in params for part in owners[param]):
        order = plain_order(model)
        names.sort(key=lambda name: order[name])
    return names


def _check_form(full: Any) -> None:
    if full is None:
        raise TypeError(
            "this rank has no optimizer state to load: full_optim_state_dict gives it to one rank, so load the "
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
            f"full_optim_state_dict gives it, got {type(full).__name__}"
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
        group_names = {part.name for owner in group for part in owners[owner]}
        if differing := sorted(group_names ^ set(saved["params"])):
            where = "saved one" if differing[0] in saved["params"] else "optimizer's"
            raise ValueError(
                f"group {number} of the optimizer has other parameters than the saved one: '{differing[0]}' is only in "
                f"the {where} ({len(differing)} differ): {REGROUP}"
            )
    return groups


def saved_groups(full: Mapping[str, Any], owners: Mapping[Tensor, Sequence[ParamSlice]]) -> list[list[Tensor]]:
    """The groups of an optimizer that is built as the saved one was."""
    owner_of = {part.name: owner for owner, slices in owners.items() for part in slices}
    position = {owner: number for number, owner in enumerate(owners)}
    groups = []
    for number, saved in enumerate(full["param_groups"]):
        if unknown := [name for name in saved["params"] if name not in owner_of]:
            raise ValueError(
                f"the model has no parameter '{unknown[0]}', which is in group {number} of the saved optimizer "
                f"({len(unknown)} are unknown): it is the state of another model"
            )
        group = list(dict.fromkeys(owner_of[name] for name in saved["params"]))
        names = {part.name for owner in group for part in owners[owner]}
        if lacking := sorted(names - set(saved["params"])):
            raise ValueError(
                f"one flat parameter holds '{lacking[0]}' and others of group {number}, in which it was not saved: use "
                "a model without flatten_parameters"
            )
        if any(part.shares_owner for owner in group for part in owners[owner]):
            group.sort(key=lambda owner: position[owner])
        groups.append(group)
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _to_cpu(value) for key, value in group.items() if key not in NAMES}


def _to_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
