"""The state of a model and its optimizer, as pieces that outlive the number of ranks and the wrapping.

`sharded_state_dict` names every piece by the parameter's name in the plain model, never by its position, so that what
was saved under one wrapping loads under another; `load_sharded_state_dict` puts a state back, into a fresh optimizer
too, and compares everything before it writes anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.boxes import Box, LocalShard, boxes
from scale_core.shard import Held, full_shape, shard_of
from scale_core.state_match import SavedTensor, StateMismatch, check_alike, check_keys

__all__ = [
    "GROUPS",
    "Box",
    "LocalShard",
    "SavedTensor",
    "StateMismatch",
    "boxes",
    "load_sharded_state_dict",
    "sharded_state_dict",
    "target_state_dict",
]

GROUPS = "optim.groups"
# The numbers that torch's optimizers keep per parameter: for a 0-dim parameter no shape could tell them.
_COUNTS = frozenset({"step", "mu_product", "mu", "eta"})


def sharded_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Returns what this rank holds of a model and its optimizer, without communication and without copies.

    - `model.<name>`: each parameter, a `LocalShard` or, where the ranks hold all of it, a tensor; each persistent
      buffer. A tied parameter stands once, under its first name.
    - `optim.<name>.<key>`: the optimizer's state of that parameter. Tensors of the shard's shape are `LocalShard`s;
      0-dim tensors (`step`) and plain numbers are the same on every rank.
    - `optim.groups`: the hyperparameters of each group and the names of its parameters, ready for JSON.

    Raises:
        ValueError: A parameter of the optimizer is none of the model's, the ranks hold summands of a parameter, or
            a state of an optimizer is neither a shard nor a number, so that it can't be put together again.
    """
    state: dict[str, Any] = {}
    for name, param in named_shards(model).items():
        state[f"model.{name}"] = _piece(name, param, param)
    for name, buffer in _persistent_buffers(model):
        state[f"model.{name}"] = buffer.detach()
    if optimizer is not None:
        names = _optimizer_names(model, optimizer)
        for owner, name in names.items():
            for key, value in optimizer.state.get(owner, {}).items():
                state[f"optim.{name}.{key}"] = _slot(f"{name}.{key}", value, owner)
        state[GROUPS] = [_group_as_json(group, names) for group in optimizer.param_groups]
    return state


def target_state_dict(model: nn.Module, optimizer: Optimizer | None, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state to read a saved one into: like `sharded_state_dict`, but with all that was saved.

    The parameters and buffers are the live ones; so are the optimizer's tensors where it has them. A fresh optimizer
    has none: they are allocated here, and handed to it by `load_sharded_state_dict(..., copy=False)`.

    Args:
        model: The built model.
        optimizer: Its optimizer; with None the saved optimizer state is left out.
        saved: For each saved key a `SavedTensor`, or the saved value itself where that is no tensor.

    Raises:
        StateMismatch: The saved state is that of another model, or of another kind of optimizer, or the optimizer has
            other parameters.
    """
    target = sharded_state_dict(model)
    # The model before the optimizer: of another model, the first parameter that differs is what helps.
    check_keys(target, {key: None for key in saved if key.startswith("model.")})
    for key, piece in target.items():
        check_alike(key, saved[key], piece)
    if optimizer is None:
        return target
    names = _optimizer_names(model, optimizer)
    _check_groups(optimizer, saved, names)
    params = {name: param for param, name in names.items()}
    for full_key, name, key, value in _optimizer_entries(saved):
        if name not in params:
            raise StateMismatch(f"{full_key} was saved, but the optimizer has no parameter {name}")
        param = params[name]
        if isinstance(value, SavedTensor):
            live = optimizer.state.get(param, {}).get(key)
            value = _slot(f"{name}.{key}", _room(key, value, param, optimizer) if live is None else live, param)
        target[full_key] = value
    target[GROUPS] = saved[GROUPS]
    return target


def load_sharded_state_dict(
    state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer | None = None, *, copy: bool = True
) -> None:
    """Puts a state into a model and an optimizer that are built already; the optimizer may be fresh.

    Where this rank holds a shard, the value may be that shard or the full tensor. (The shards of other ranks go
    through a snapshot, which exchanges them.)

    Args:
        state: As `sharded_state_dict` returns it.
        model: The built model.
        optimizer: Its optimizer; with None the optimizer state is left out.
        copy: Whether the optimizer gets tensors of its own; False hands it those of `state`.

    Raises:
        StateMismatch: A missing or unexpected key, another shape, dtype or range; nothing has been written then.
    """
    own = sharded_state_dict(model)
    given = {key: value for key, value in state.items() if key.startswith("model.")}
    check_keys(own, given)
    sources: dict[str, Tensor] = {}
    for key, piece in own.items():
        check_alike(key, SavedTensor(tuple(given[key].size()), given[key].dtype), piece)
        start, stop = (piece.start, piece.stop) if isinstance(piece, LocalShard) else (0, piece.numel())
        sources[key] = _part(key, given[key], tuple(piece.size()), start, stop)
    slots = _slots(state, model, optimizer) if optimizer is not None else {}
    for key, piece in own.items():
        tensor = piece.tensor if isinstance(piece, LocalShard) else piece
        if not tensor.is_set_to(sources[key]):
            tensor.copy_(sources[key].view(tensor.shape))
    if optimizer is not None:
        _fill_groups(optimizer, state[GROUPS])
        optimizer.state.clear()
        for param, values in slots.items():
            optimizer.state[param] = {
                key: value.clone() if copy and isinstance(value, Tensor) else value for key, value in values.items()
            }


def named_shards(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the model's parameters by their names in the plain model; a tied one once.

    Raises:
        ValueError: Two parameters claim one name.
    """
    found: dict[str, nn.Parameter] = {}
    for listed, param in model.named_parameters():
        shard = shard_of(param)
        name = listed if shard is None else shard.name
        if name in found:
            raise ValueError(f"two parameters are named {name}: the second is listed as {listed}")
        found[name] = param
    return found


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    outer = _outer_prefix(model)
    seen: set[Tensor] = set()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer not in seen:
                seen.add(buffer)
                yield f"{path}.{name}".lstrip(".").removeprefix(outer), buffer


def _outer_prefix(model: nn.Module) -> str:
    """What a wrapper around the model adds to every name, seen on a parameter that knows its plain name."""
    for listed, param in model.named_parameters():
        shard = shard_of(param)
        if shard is not None and listed.endswith(f".{shard.name}"):
            return listed.removesuffix(shard.name)
    return ""


def _optimizer_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """The optimizer's parameters, in its order, with their names."""
    names: dict[Tensor, str] = {param: name for name, param in named_shards(model).items()}
    found: dict[Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {number}, of shape {tuple(param.shape)}, is none "
                    "of the model's: build the optimizer after the model is wrapped, from model.parameters()"
                )
            found[param] = names[param]
    return found


def _piece(name: str, tensor: Tensor, param: Tensor) -> LocalShard | Tensor:
    shard = shard_of(param)
    if shard is None:
        return tensor.detach()
    if any(axis.held is Held.PARTIAL for axis in shard.axes):
        raise ValueError(f"{name}: each rank holds a summand of it: reduce it before its state is taken")
    return LocalShard(tensor.detach(), shard.shape, shard.start, shard.stop)


def _slot(name: str, value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return _as_json(name, value)
    if shard_of(param) is None or _is_replicated(name.rpartition(".")[2], value.shape, param.shape):
        return value.detach()
    if value.shape != param.shape:
        raise ValueError(
            f"optimizer state {name} has shape {tuple(value.shape)}, expected the shard's {tuple(param.shape)} or a "
            "number: this optimizer needs whole parameters, so it can't step on shards"
        )
    return _piece(name, value, param)


def _is_replicated(key: str, shape: Sequence[int], param_shape: Sequence[int]) -> bool:
    """Whether an optimizer's state is one number for the whole parameter, and not the state of its one element."""
    return len(shape) == 0 and (key in _COUNTS or len(param_shape) > 0)


def _group_as_json(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    options = {key: _as_json(f"option {key}", value) for key, value in group.items() if key != "params"}
    return {**options, "params": [names[param] for param in group["params"]]}


def _as_json(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(name, part) for part in value]
    if isinstance(value, dict):
        return {str(key): _as_json(name, part) for key, part in value.items()}
    raise ValueError(f"{name} of the optimizer is a {type(value).__name__}, expected numbers, texts or lists of them")


def _optimizer_entries(state: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Yields (whole key, parameter's name, the optimizer's key, value) for each entry of optimizer state."""
    for full_key, value in state.items():
        if full_key != GROUPS and full_key.startswith("optim."):
            name, _, key = full_key.removeprefix("optim.").rpartition(".")
            yield full_key, name, key, value


def _room(key: str, saved: SavedTensor, param: Tensor, optimizer: Optimizer) -> Tensor:
    """An empty tensor for one state of one parameter, where and as the optimizer expects it."""
    if not _is_replicated(key, saved.shape, full_shape(param)) and saved.shape == tuple(full_shape(param)):
        return torch.empty_like(param, dtype=saved.dtype, requires_grad=False)
    group = next(group for group in optimizer.param_groups if any(param is other for other in group["params"]))
    on_device = key != "step" or group.get("capturable") or group.get("fused")  # torch keeps other counts on the CPU
    return torch.empty(saved.shape, dtype=saved.dtype, device=param.device if on_device else "cpu")


def _part(key: str, value: LocalShard | Tensor, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    """The elements `[start, stop)` of `value`, which must be the full tensor or exactly that shard."""
    if tuple(value.size()) != shape:
        raise StateMismatch(f"{key}: the saved shape is {tuple(value.size())}, expected {shape}")
    if isinstance(value, Tensor):
        return value.detach() if stop - start == value.numel() else value.detach().reshape(-1)[start:stop]
    if (value.start, value.stop) != (start, stop):
        raise StateMismatch(
            f"{key}: this rank holds the elements [{start}, {stop}), the state has [{value.start}, {value.stop}): "
            "write it with save_snapshot and read it with load_snapshot, which exchange them"
        )
    return value.tensor


def _slots(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """For each parameter of the optimizer its new state on this rank: the tensors given, or views of them."""
    names = _optimizer_names(model, optimizer)
    _check_groups(optimizer, state, names)
    params = {name: param for param, name in names.items()}
    found: dict[Tensor, dict[str, Any]] = {}
    for full_key, name, key, value in _optimizer_entries(state):
        if name not in params:
            raise StateMismatch(f"{full_key} was saved, but the optimizer has no parameter {name}")
        param = params[name]
        if isinstance(value, LocalShard | Tensor) and not _is_replicated(key, value.size(), full_shape(param)):
            value = _slot_part(full_key, value, param)
        found.setdefault(param, {})[key] = value.tensor if isinstance(value, LocalShard) else value
    return found


def _slot_part(full_key: str, value: LocalShard | Tensor, param: Tensor) -> Tensor:
    shard = shard_of(param)
    if shard is not None:
        return _part(full_key, value, shard.shape, shard.start, shard.stop).view(param.shape)
    shape = tuple(value.size())
    return _part(full_key, value, shape, 0, math.prod(shape)).view(shape)


def _check_groups(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    groups = state.get(GROUPS)
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        count = f"{len(groups)} groups" if isinstance(groups, list) else "none"
        raise StateMismatch(
            f"{GROUPS}: {count} saved, the optimizer has {len(optimizer.param_groups)}: group its parameters as then"
        )
    for number, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        mine = [names[param] for param in group["params"]]
        if differing := sorted(set(saved["params"]) ^ set(mine)):
            raise StateMismatch(
                f"{GROUPS}: group {number} of the optimizer has other parameters than the saved one; first: "
                f"{differing[0]} (saved {len(saved['params'])}, expected {len(mine)})"
            )
        # One side alone may have more: a scheduler adds to a group, and so do newer versions of torch.
        lost, new = sorted(saved.keys() - group.keys()), sorted(group.keys() - saved.keys())
        if lost and new:
            raise StateMismatch(
                f"{GROUPS}: the saved state is that of another optimizer: its option {lost[0]} is unknown to "
                f"{type(optimizer).__name__}, whose option {new[0]} it does not have"
            )


def _fill_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            live = group.get(key)
            if isinstance(live, Tensor):
                live.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(live, tuple) else value
