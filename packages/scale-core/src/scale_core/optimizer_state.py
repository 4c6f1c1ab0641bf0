"""An optimizer's state by the names of parameters, in both directions.

An optimizer keeps what it remembers by the tensors that it steps on, in the order in which it was given them. Here each
entry gets the name of a parameter of the plain model, `optim.<name>.<key>`, and finds its way back into whatever tensor
holds that parameter then: the parameter itself, a shard of it, or a flat one, which holds several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.boxes import LocalShard
from scale_core.holdings import Holding, check_known, is_number, named_holdings
from scale_core.shard import elements_of
from scale_core.state_match import SavedTensor, StateMismatch

GROUPS = "optim.groups"

# Options that say what the tensors of a group are called: names are saved anyway, those of the plain model.
_NOT_SAVED = frozenset({"params", "param_names"})


@runtime_checkable
class KeepsStateElsewhere(Protocol):
    """An optimizer whose state is not by the parameters it was given: it hands parts of them to another one."""

    def state_holding(self, holding: Holding) -> Holding:
        """What this rank has of the state of one of its parameters, given what the rank holds of the parameter."""
        ...


def owners_of(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, list[Holding]]:
    """Returns the optimizer's parameters, in its order, each with what is held of it, and what its state is kept by.

    Raises:
        ValueError: A parameter of the optimizer is none of the model's.
    """
    everything: dict[Tensor, list[Holding]] = {}
    for holding in named_holdings(model).values():
        everything.setdefault(holding.owner, []).append(holding)
    check_known(optimizer, everything)
    found = {param: everything[param] for group in optimizer.param_groups for param in group["params"]}
    if isinstance(optimizer, KeepsStateElsewhere):
        return {param: [optimizer.state_holding(holding) for holding in held] for param, held in found.items()}
    return found


def piece(holding: Holding, tensor: Tensor) -> LocalShard | Tensor:
    """What belongs to a holding of a tensor of its owner's shape, without a copy."""
    view = holding.view(tensor)
    if not holding.is_shard:
        return view
    return LocalShard(view, holding.shape, holding.start, holding.stop, holding.ranges)


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's part of a sharded state: see `scale_core.state.sharded_state_dict`.

    Raises:
        ValueError: As there.
    """
    owners = owners_of(model, optimizer)
    state: dict[str, Any] = {}
    for holdings in owners.values():
        for key, value in optimizer.state.get(holdings[0].owner, {}).items():
            for holding in holdings:
                state[f"optim.{holding.name}.{key}"] = _entry(holding, key, value)
    state[GROUPS] = [_group_as_json(group, owners) for group in optimizer.param_groups]
    return state


def optimizer_targets(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's part of a state to read a saved one into: see `scale_core.state.target_state_dict`.

    Raises:
        StateMismatch: As there.
    """
    owners = owners_of(model, optimizer)
    _check_groups(optimizer, saved, owners)
    holdings = {holding.name: holding for held in owners.values() for holding in held}
    groups = {
        holding.name: group
        for group in optimizer.param_groups
        for param in group["params"]
        for holding in owners[param]
    }
    rooms: dict[tuple[Tensor, str], Tensor] = {}
    target: dict[str, Any] = {}
    for full_key, name, key, value in _named_entries(saved):
        holding = _found(holdings, full_key, name)
        if holding.state == "nothing":
            continue
        if isinstance(value, SavedTensor):
            live = optimizer.state.get(holding.owner, {}).get(key)
            if live is None:
                place = (holding.owner, key)
                if place not in rooms:
                    rooms[place] = _room(key, value, holding, groups[name])
                live = rooms[place]
            value = _entry(holding, key, live)
        target[full_key] = value
    target[GROUPS] = saved[GROUPS]
    return target


def optimizer_slots(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Returns the new state of each tensor that the optimizer steps on: the tensors given, or views of them.

    Only what several parameters share is put together in a new tensor.

    Raises:
        StateMismatch: The state is that of another optimizer, or does not fit into this one.
    """
    owners = owners_of(model, optimizer)
    _check_groups(optimizer, state, owners)
    holdings = {holding.name: holding for held in owners.values() for holding in held}
    given: dict[str, dict[str, Any]] = {}
    for full_key, name, key, value in _named_entries(state):
        _found(holdings, full_key, name)
        given.setdefault(name, {})[key] = value
    return slots_from(given, owners, optimizer.state)


def slots_from(
    given: Mapping[str, Mapping[str, Any]],
    owners: Mapping[Tensor, Sequence[Holding]],
    live: Mapping[Any, Mapping[str, Any]],
) -> dict[Tensor, dict[str, Any]]:
    """Returns the state of each owner, from the entries of all that it holds.

    Args:
        given: The state of each parameter by its name: whole tensors, this rank's shards, and numbers.
        owners: What an optimizer steps on, with what each holds.
        live: The state that the optimizer has: a tensor of it whose views were given is taken as it is.

    Raises:
        StateMismatch: An entry does not fit.
    """
    slots: dict[Tensor, dict[str, Any]] = {}
    for held in owners.values():
        owner = held[0].owner
        keys = list(dict.fromkeys(key for holding in held for key in given.get(holding.name, {})))
        if keys and held[0].state != "nothing":
            has = live.get(owner, {})
            slots[owner] = {key: _slot(key, held, given, has.get(key)) for key in keys}
    return slots


def fill_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Gives the optimizer's groups their saved options, in the types that they have."""
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        for key, value in saved.items():
            if key in _NOT_SAVED:
                continue
            live = group.get(key)
            if isinstance(live, Tensor):
                live.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(live, tuple) else value


def part_of(key: str, value: LocalShard | Tensor, holding: Holding) -> Tensor:
    """Returns the elements that a holding needs, in its shape, of the whole tensor or of exactly that shard.

    Raises:
        StateMismatch: Another shape, or the shard of another range.
    """
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
    return value.tensor.view(holding.local_shape)


def _entry(holding: Holding, key: str, value: Any) -> Any:
    """One entry of a state, from the optimizer's own value for the owner of a holding."""
    name, owner = f"{holding.name}.{key}", holding.owner
    if not isinstance(value, Tensor):
        return as_json(name, value)
    if is_number(key, value.shape, owner.shape):
        # Several parameters that share it get one each, so that they are seen to agree when they are read back.
        return value.detach().clone() if holding.shares_owner else value.detach()
    if not holding.is_shard:
        return value.detach()
    if holding.state == "all":
        return LocalShard(value.detach().contiguous(), tuple(value.shape), 0, value.numel())
    if value.shape != owner.shape:
        raise ValueError(
            f"optimizer state {name} has shape {tuple(value.shape)}, expected the shard's {tuple(owner.shape)} or a "
            "number: this optimizer needs whole parameters, so it can't step on shards"
        )
    return piece(holding, value)


def _slot(key: str, held: Sequence[Holding], given: Mapping[str, Mapping[str, Any]], live: Any) -> Any:
    """The optimizer's own value for an owner, from the entries of all that it holds."""
    if not held[0].shares_owner:
        (holding,) = held
        value = given[holding.name][key]
        if not isinstance(value, Tensor):
            return value
        if is_number(key, value.shape, holding.shape):
            return value.detach()
        if not holding.is_shard:  # Whatever an optimizer keeps for a whole parameter: a sum over rows, for one.
            return value.detach()
        if holding.state == "all":
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
    if not isinstance(value, Tensor) or is_number(key, value.shape, widest.shape):
        return _common(key, values)
    parts = {holding: part_of(f"optim.{holding.name}.{key}", value, holding) for holding, value in values.items()}
    return _joined(parts, live)


def _common(key: str, values: Mapping[Holding, Any]) -> Any:
    """The one number that all parameters of a flat one have."""
    (first, value), *others = values.items()
    for other, its_value in others:
        if as_json(other.name, its_value) != as_json(first.name, value):
            raise StateMismatch(
                f"optim.{other.name}.{key} is {as_json(other.name, its_value)} and that of {first.name} is "
                f"{as_json(first.name, value)}, but one flat parameter holds both: load it into a model without "
                "flatten_parameters"
            )
    return value.detach() if isinstance(value, Tensor) else value


def _joined(parts: Mapping[Holding, Tensor], live: Any) -> Tensor:
    """The state of a flat parameter: the live one, where the parts are views of it, or a new one."""
    owner = next(iter(parts)).owner
    if isinstance(live, Tensor) and live.shape == owner.shape and _are_views_of(live, parts):
        return live
    dtype = next(iter(parts.values())).dtype
    joined = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
    for holding, part in parts.items():
        holding.view(joined).copy_(part)
    return joined


def _are_views_of(live: Tensor, parts: Mapping[Holding, Tensor]) -> bool:
    return all(holding.view(live).is_set_to(part) for holding, part in parts.items())


def _room(key: str, saved: SavedTensor, holding: Holding, group: Mapping[str, Any]) -> Tensor:
    """A tensor for one state of an owner, where and as the optimizer expects it in this group."""
    owner = holding.owner
    if not is_number(key, saved.shape, holding.shape) and saved.shape == holding.shape:
        make = torch.zeros_like if holding.shares_owner else torch.empty_like  # Between its parts a flat one is zero.
        return make(owner, dtype=saved.dtype, requires_grad=False)
    on_device = key != "step" or group.get("capturable") or group.get("fused")  # torch keeps other counts on the CPU
    return torch.empty(saved.shape, dtype=saved.dtype, device=owner.device if on_device else "cpu")


def _named_entries(state: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Yields (whole key, parameter's name, the optimizer's key, value) for each entry of optimizer state."""
    for full_key, value in state.items():
        if full_key != GROUPS and full_key.startswith("optim."):
            name, _, key = full_key.removeprefix("optim.").rpartition(".")
            yield full_key, name, key, value


def _found(holdings: Mapping[str, Holding], full_key: str, name: str) -> Holding:
    if name not in holdings:
        raise StateMismatch(f"{full_key} was saved, but the optimizer has no parameter {name}")
    return holdings[name]


def _group_as_json(group: Mapping[str, Any], owners: Mapping[Tensor, Sequence[Holding]]) -> dict[str, Any]:
    options = {key: as_json(f"option {key}", value) for key, value in group.items() if key not in _NOT_SAVED}
    return {**options, "params": [holding.name for owner in group["params"] for holding in owners[owner]]}


def as_json(name: str, value: Any) -> Any:
    """Returns a value of an optimizer as what JSON knows.

    Raises:
        ValueError: It is neither a number, a text, nor made of them.
    """
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(name, part) for part in value]
    if isinstance(value, dict):
        return {str(key): as_json(name, part) for key, part in value.items()}
    raise ValueError(f"{name} of the optimizer is a {type(value).__name__}, expected numbers, texts or lists of them")


def _check_groups(optimizer: Optimizer, state: Mapping[str, Any], owners: Mapping[Tensor, Sequence[Holding]]) -> None:
    groups = state.get(GROUPS)
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        count = f"{len(groups)} groups" if isinstance(groups, list) else "none"
        raise StateMismatch(
            f"{GROUPS}: {count} saved, the optimizer has {len(optimizer.param_groups)}: group its parameters as then"
        )
    for number, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        mine = [holding.name for owner in group["params"] for holding in owners[owner]]
        if differing := sorted(set(saved["params"]) ^ set(mine)):
            raise StateMismatch(
                f"{GROUPS}: group {number} of the optimizer has other parameters than the saved one; first: "
                f"{differing[0]} (saved {len(saved['params'])}, expected {len(mine)})"
            )
        # One side alone may have more: a scheduler adds to a group, and so do newer versions of torch.
        lost, new = sorted(saved.keys() - group.keys()), sorted(group.keys() - saved.keys() - _NOT_SAVED)
        if lost and new:
            raise StateMismatch(
                f"{GROUPS}: the saved state is that of another optimizer: its option {lost[0]} is unknown to "
                f"{type(optimizer).__name__}, whose option {new[0]} it does not have"
            )
