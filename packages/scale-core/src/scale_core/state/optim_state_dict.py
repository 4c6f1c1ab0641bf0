"""An optimizer's state by the names of parameters, in both directions.

An optimizer keeps its state by the tensors that it steps on, in their order. Here each entry gets the name of a
parameter of the plain model, `optim.<name>.<key>`, and is loaded into whatever tensor holds that parameter then: the
parameter itself, a shard of it, or a flat one, which holds several.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.dtensor import is_dtensor
from scale_core.optim.traits import is_per_param_number
from scale_core.shard import elements_of, on_local_tensors
from scale_core.state.block_state import BLOCK_SIZES, CODE_BOOKS, block_shard, num_blocks, whole_shape
from scale_core.state.local_shard import LocalShard
from scale_core.state.param_groups import (
    GROUPS,
    REGROUP,
    as_json,
    group_entries,
    is_group,
    matching_options,
    saved_groups,
)
from scale_core.state.param_ownership import (
    ParamSlice,
    check_known,
    named_param_slices,
    not_elementwise,
)
from scale_core.state.validation import Misfit, SavedTensor, StateMismatch, some_keys


@runtime_checkable
class HasShardedState(Protocol):
    """An optimizer whose state is not kept by its own parameters: it gives parts of them to an inner one."""

    def sharded_state(self, holding: ParamSlice) -> ParamSlice:
        """This rank's state of one parameter, given the slice that the rank holds of it."""
        ...


def owners_of(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, list[ParamSlice]]:
    """Returns the optimizer's parameters in its order, each with its slices and the key of its state."""
    everything: dict[Tensor, list[ParamSlice]] = {}
    for holding in named_param_slices(model).values():
        everything.setdefault(holding.owner, []).append(holding)
    check_known(optimizer, everything)
    slices_by_param = {param: everything[param] for group in optimizer.param_groups for param in group["params"]}
    if isinstance(optimizer, HasShardedState):
        return {
            param: [optimizer.sharded_state(holding) for holding in slices] for param, slices in slices_by_param.items()
        }
    return slices_by_param


def local_chunk(holding: ParamSlice, tensor: Tensor) -> LocalShard | Tensor:
    """The elements of a slice in a tensor of its owner's shape, without a copy."""
    view = holding.view(tensor)
    if not holding.is_shard:
        return _whole(holding, view)
    return LocalShard(view, holding.shape, holding.start, holding.stop, holding.ranges, written=holding.written)


def _whole(holding: ParamSlice, tensor: Tensor) -> LocalShard | Tensor:
    """A full tensor, which another stage of a pipeline may be the one to write."""
    if holding.written:
        return tensor
    return LocalShard(tensor, tuple(tensor.shape), 0, tensor.numel(), written=False)


@on_local_tensors
def optimizer_entries(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Returns the optimizers' part of a sharded state: see `scale_core.state.sharded_state_dict`."""
    state: dict[str, Any] = {}
    for optimizer in optimizers:
        owners = owners_of(model, optimizer)
        for holdings in owners.values():
            for key, value in optimizer.state.get(holdings[0].owner, {}).items():
                for holding in holdings:
                    state[f"optim.{holding.name}.{key}"] = _entry(holding, key, value)
        state.update(group_entries(optimizer, _names_by_group(optimizer, owners)))
    return state


@on_local_tensors
def optimizer_targets(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, Any],
    name_here: Callable[[str], str | None],
    *,
    allocate: bool = True,
) -> dict[str, Any]:
    """Returns the optimizers' part of a state to read a saved one into: see `scale_core.state.target_state_dict`.

    A mismatch is replaced by its expected shape or a `Misfit`; without `allocate`, all tensors are new
    ones without memory.
    """
    owner_of_key: dict[str, tuple[Optimizer, Mapping[str, Any], ParamSlice]] = {}
    target: dict[str, Any] = {}
    refused: set[Optimizer] = set()
    for number, optimizer in enumerate(optimizers):
        owners = owners_of(model, optimizer)
        for group in optimizer.param_groups:
            owner_of_key.update(
                (param_slice.name, (optimizer, group, param_slice))
                for param in group["params"]
                for param_slice in owners[param]
            )
        try:
            groups_of(optimizer, saved, owners, name_here)
        except StateMismatch as error:
            target[f"{GROUPS} {number}"] = Misfit(str(error))
            if not _fits_in_part(optimizer, saved, owners, name_here):
                refused.add(optimizer)
    if strangers := _strangers(saved, owner_of_key, name_here):
        target[f"{GROUPS} and their parameters"] = Misfit(strangers)
    rooms: dict[tuple[Tensor, str], Tensor] = {}
    for full_key, name, key, value in _named_entries(saved):
        if name not in owner_of_key:
            continue
        optimizer, its_group, holding = owner_of_key[name]
        if not isinstance(value, SavedTensor):
            target[full_key] = value
        elif holding.state == "nothing" or optimizer in refused:
            target[full_key] = LocalShard(torch.empty(0, dtype=value.dtype), value.shape, 0, 0)
        elif not _fits(key, value, holding, saved.get(f"model.{name}")):
            target[full_key] = SavedTensor(holding.shape, value.dtype)
        elif trouble := _cut_within_block(key, holding):
            target[full_key] = Misfit(trouble)
        else:
            live = optimizer.state.get(holding.owner, {}).get(key) if allocate else None
            if live is None:
                owner_and_key = (holding.owner, key)
                if owner_and_key not in rooms:
                    rooms[owner_and_key] = _empty_state(key, value, holding, its_group, allocate)
                live = rooms[owner_and_key]
            target[full_key] = _entry(holding, key, live)
    target.update((key, value) for key, value in saved.items() if is_group(key))
    return target


def _fits_in_part(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    owners: Mapping[Tensor, Sequence[ParamSlice]],
    name_here: Callable[[str], str | None],
) -> bool:
    """Whether groups differ only in their parameters, so that the state of each may be loaded."""
    try:
        groups_of(optimizer, saved, owners, name_here, strict=False)
    except StateMismatch:
        return False
    return True


def _fits(key: str, value: SavedTensor, holding: ParamSlice, weight: Any) -> bool:
    """Whether a saved state can belong to a slice, of whose parameter this `weight` was saved."""
    if is_per_param_number(key, value.shape, holding.shape) or value.shape == holding.shape:
        return True
    if isinstance(weight, SavedTensor) and weight.shape != holding.shape:
        return False
    if not _is_cut(holding):
        return True  # The state of a full parameter may have any shape.
    return key in CODE_BOOKS or (key in BLOCK_SIZES and value.shape == whole_shape(key, holding))


def _is_cut(holding: ParamSlice) -> bool:
    """Whether this rank has the state of some elements, and not all that there is of a parameter."""
    return holding.is_shard and holding.state != "all"


def _cut_within_block(key: str, holding: ParamSlice) -> str:
    """The mistake in a slice for scales of blocks; "" if there is none."""
    if key in BLOCK_SIZES and _is_cut(holding):
        try:
            num_blocks(key, holding)
        except ValueError as error:
            return str(error)
    return ""


class Loaded(NamedTuple):
    """The state to load into one optimizer."""

    optimizer: Optimizer  # It has its own yet
    # The new state of each tensor that it steps on: the tensors given, or views of them.
    slots: dict[Tensor, dict[str, Any]]
    options: list[Mapping[str, Any]]  # Of each of its groups


@on_local_tensors
def state_entries(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    name_here: Callable[[str], str | None],
    *,
    strict: bool = True,
) -> list[Loaded]:
    """Returns the state to load into each optimizer; only state that several parameters share is copied.

    Unless strict, optimizers are left out whose groups are others, and parameters without their complete state.
    """
    saved_states: dict[str, dict[str, Any]] = {}
    for _, name, key, value in _named_entries(state):
        saved_states.setdefault(name, {})[key] = value
    entries = []
    for optimizer in optimizers:
        owners = owners_of(model, optimizer)
        if strict:
            options = groups_of(optimizer, state, owners, name_here)
            entries.append(Loaded(optimizer, entries_from(saved_states, owners, optimizer.state), options))
        elif _fits_in_part(optimizer, state, owners, name_here):
            slots: dict[Tensor, dict[str, Any]] = {}
            for param, slices in owners.items():
                with suppress(StateMismatch):
                    slots.update(entries_from(saved_states, {param: slices}, optimizer.state))
            entries.append(Loaded(optimizer, slots, groups_of(optimizer, state, owners, name_here, strict=False)))
    return entries


def groups_of(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    owners: Mapping[Tensor, Sequence[ParamSlice]],
    name_here: Callable[[str], str | None],
    *,
    strict: bool = True,
) -> list[Mapping[str, Any]]:
    """Returns the saved options of each group of an optimizer; see `matching_options`."""
    names = _names_by_group(optimizer, owners)
    return matching_options(optimizer, names, saved_groups(state), name_here, strict=strict)


def _strangers(state: Mapping[str, Any], known: Container[str], name_here: Callable[[str], str | None]) -> str:
    """The mistake in saved groups that have parameters of this rank on which no optimizer steps; "" if none has."""
    for group in saved_groups(state):
        names = [
            local_name
            for local_name in map(name_here, group.names)
            if local_name is not None and local_name not in known
        ]
        if names:
            subject = f"{some_keys(names)}, which {'is not a parameter' if len(names) == 1 else 'are not parameters'}"
            return f"{GROUPS}: group {group.number} was saved with {subject} of the optimizer: {REGROUP}"
    return ""


@on_local_tensors
def entries_from(
    given: Mapping[str, Mapping[str, Any]],
    owners: Mapping[Tensor, Sequence[ParamSlice]],
    live: Mapping[Any, Mapping[str, Any]],
) -> dict[Tensor, dict[str, Any]]:
    """Returns the state of each owner, from the entries of its slices."""
    slots: dict[Tensor, dict[str, Any]] = {}
    for slices in owners.values():
        owner = slices[0].owner
        keys = list(dict.fromkeys(key for holding in slices for key in given.get(holding.name, {})))
        if keys and slices[0].state != "nothing":
            has = live.get(owner, {})
            slots[owner] = {key: _owner_value(key, slices, given, has.get(key)) for key in keys}
    return slots


def part_of(key: str, value: LocalShard | Tensor, holding: ParamSlice) -> Tensor:
    """Returns the elements of a slice, in its shape, from the full tensor or exactly that shard."""
    if tuple(value.size()) != holding.shape:
        raise StateMismatch(f"{key}: the saved shape is {tuple(value.size())}, expected {holding.shape}")
    if not isinstance(value, LocalShard):
        if not holding.is_shard:
            return value.detach()
        return elements_of(value.detach(), holding.start, holding.stop, holding.ranges).view(holding.local_shape)
    if (value.start, value.stop, value.ranges) != (holding.start, holding.stop, holding.ranges):
        raise StateMismatch(
            f"{key}: this rank holds the elements [{holding.start}, {holding.stop}), the state has [{value.start}, "
            f"{value.stop}): write it with save_snapshot and read it with load_snapshot, which exchange them"
        )
    return value.tensor.reshape(holding.local_shape)


def _entry(holding: ParamSlice, key: str, value: Any) -> Any:
    """One entry of a state, from the optimizer's own value for the owner of a slice."""
    name, owner = f"{holding.name}.{key}", holding.owner
    if not isinstance(value, Tensor):
        return as_json(name, value)
    if hasattr(value, "__tensor_flatten__") and not is_dtensor(value):
        raise ValueError(
            f"optimizer state {name} is a {type(value).__name__}, made of several tensors, which can't be saved by "
            "name: save the model without the optimizer, or take one whose state is plain tensors, such as "
            "bitsandbytes.optim.AdamW8bit"
        )
    if is_per_param_number(key, value.shape, owner.shape):
        # Several parameters that share it get one each, so that they are seen to agree when they are read back.
        return value.detach().clone() if holding.shares_owner else value.detach()
    if not holding.is_shard:
        return _whole(holding, value.detach())
    if holding.state == "all":
        return LocalShard(value.detach(), tuple(value.shape), 0, value.numel(), written=holding.written)
    if key in CODE_BOOKS and not holding.shares_owner:
        return value.detach()
    if key in BLOCK_SIZES:
        return block_shard(key, value, holding)
    if value.shape != owner.shape:
        raise not_elementwise(name, value.shape, owner.shape)
    return local_chunk(holding, value)


def _owner_value(key: str, held: Sequence[ParamSlice], given: Mapping[str, Mapping[str, Any]], live: Any) -> Any:
    """The optimizer's own value for an owner, from the entries of its slices."""
    if not held[0].shares_owner:
        (holding,) = held
        value = given[holding.name][key]
        if not isinstance(value, Tensor):
            return value
        if is_per_param_number(key, value.shape, holding.shape):
            return value.detach()
        # Whatever an optimizer keeps for a full parameter: a sum over rows, for one.
        if not _is_cut(holding) or key in CODE_BOOKS or key in BLOCK_SIZES:
            return value.tensor if isinstance(value, LocalShard) else value.detach()
        return part_of(f"optim.{holding.name}.{key}", value, holding)
    missing = [holding.name for holding in held if key not in given.get(holding.name, {})]
    if missing:
        other = next(holding.name for holding in held if holding.name not in missing)
        raise StateMismatch(
            f"optim.{missing[0]}.{key} is missing in the state, but {other} has one, and one flat parameter holds "
            "both: load it into a model without flatten_parameters"
        )
    values = {holding: given[holding.name][key] for holding in held}
    widest = max(held, key=lambda holding: len(holding.shape))  # Of a 0-dim one no shape tells a number from a state.
    value = values[widest]
    if not isinstance(value, Tensor) or is_per_param_number(key, value.shape, widest.shape):
        return _shared_number(key, values)
    parts = {holding: part_of(f"optim.{holding.name}.{key}", value, holding) for holding, value in values.items()}
    return _join(parts, live)


def _shared_number(key: str, values: Mapping[ParamSlice, Any]) -> Any:
    """The one number that all parameters of a flat one have."""
    (first, value), *others = values.items()
    for other, its_value in others:
        if as_json(other.name, its_value) != as_json(first.name, value):
            raise StateMismatch(
                f"optim.{other.name}.{key} is {as_json(other.name, its_value)} and optim.{first.name}.{key} is "
                f"{as_json(first.name, value)}, but one flat parameter holds both: load it into a model without "
                "flatten_parameters"
            )
    return value.detach() if isinstance(value, Tensor) else value


def _join(parts: Mapping[ParamSlice, Tensor], live: Any) -> Tensor:
    """The state of a flat parameter: the live one, where the parts are views of it, or a new one."""
    owner = next(iter(parts)).owner
    if isinstance(live, Tensor) and live.shape == owner.shape and _are_views_of(live, parts):
        return live
    dtype = next(iter(parts.values())).dtype
    joined = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
    for holding, part in parts.items():
        holding.view(joined).copy_(part)
    return joined


def _are_views_of(live: Tensor, parts: Mapping[ParamSlice, Tensor]) -> bool:
    return all(holding.view(live).is_set_to(part) for holding, part in parts.items())


def _empty_state(key: str, saved: SavedTensor, holding: ParamSlice, group: Mapping[str, Any], allocate: bool) -> Tensor:
    """A new tensor for one state of an owner, with the device and dtype that the optimizer expects."""
    owner = holding.owner if allocate else holding.owner.detach().to("meta")
    if not is_per_param_number(key, saved.shape, holding.shape) and saved.shape == holding.shape:
        make = torch.zeros_like if holding.shares_owner else torch.empty_like  # Between its shards a flat one is zero.
        return make(owner, dtype=saved.dtype, requires_grad=False)
    if key in BLOCK_SIZES and _is_cut(holding):
        return torch.empty(num_blocks(key, holding), dtype=saved.dtype, device=owner.device)
    on_device = key != "step" or group.get("capturable") or group.get("fused")  # torch keeps other counts on the CPU
    return torch.empty(saved.shape, dtype=saved.dtype, device=owner.device if on_device or not allocate else "cpu")


def _named_entries(state: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Yields (full key, parameter's name, the optimizer's key, value) for each entry of optimizer state."""
    for full_key, value in state.items():
        if full_key.startswith("optim.") and not is_group(full_key):
            name, _, key = full_key.removeprefix("optim.").rpartition(".")
            yield full_key, name, key, value


def _names_by_group(optimizer: Optimizer, owners: Mapping[Tensor, Sequence[ParamSlice]]) -> list[list[str]]:
    return [
        [holding.name for owner in group["params"] for holding in owners[owner]] for group in optimizer.param_groups
    ]
