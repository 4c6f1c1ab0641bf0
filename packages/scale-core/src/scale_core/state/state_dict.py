"""Sharded state dicts of a model and its optimizer, independent of the number of ranks and of the wrapping.

`sharded_state_dict` names every shard by the parameter's name in the plain model, never by its position, so that what
was saved under one wrapping loads under another; `load_sharded_state_dict` loads it, into a fresh optimizer too, and
compares everything before it writes anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.arguments import checked_arguments
from scale_core.flat.live_buffers import wait_sent
from scale_core.shard import on_local_tensors, shard_of
from scale_core.sharded_tensor.chunks import Chunk, chunks_of
from scale_core.state.local_shard import LocalShard
from scale_core.state.optim_state_dict import local_chunk, optimizer_entries, optimizer_targets, part_of, state_entries
from scale_core.state.param_groups import GROUPS, SavedGroup, fill_groups, is_group, saved_groups
from scale_core.state.param_ownership import ParamSlice, PartOfModel, named_param_slices, of_this_rank
from scale_core.state.torch_state_dict import install_hooks
from scale_core.state.validation import SavedTensor, StateDifferences, StateMismatch, compare_states

__all__ = [
    "GROUPS",
    "Chunk",
    "LocalShard",
    "SavedGroup",
    "SavedTensor",
    "StateMismatch",
    "chunks_of",
    "load_sharded_state_dict",
    "saved_groups",
    "sharded_state_dict",
    "target_state_dict",
]

Optimizers: TypeAlias = Optimizer | Iterable[Optimizer] | None


@checked_arguments
@on_local_tensors
def sharded_state_dict(model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Returns this rank's part of a model and its optimizer, without communication and without copies.

    - `model.<name>`: each parameter, a `LocalShard` or, where the ranks hold all of it, a tensor; each persistent
      buffer. A tied parameter is listed once, under its first name.
    - `optim.<name>.<key>`: the optimizer's state of that parameter. Tensors of the shard's shape are `LocalShard`s;
      0-dim tensors (`step`) and plain numbers are the same on every rank.
    - `optim.groups[<number>].<digest>`: the hyperparameters of each group and, as "params", the names of its
      parameters on this rank, ready for JSON; `saved_groups(state)` returns them in order.

    A flat parameter is listed as the parameters that it holds. Of a pipeline, these are the stages of this rank,
    under the names of the full model.

    Args:
        model: Plain, sharded, divided, or a pipeline.
        optimizer: Its optimizer, or several that step on different parameters, for example one for each stage.

    Raises:
        ValueError: The model lacks a parameter of the optimizer; a parameter is a partial sum on each rank, or is on
            the meta device; or an optimizer state is neither a shard nor a number, so we can't join it again.

    Examples:
        >>> import torch
        >>> from scale_core.state import sharded_state_dict
        >>> model = torch.nn.Linear(4, 3)
        >>> sorted(sharded_state_dict(model, torch.optim.AdamW(model.parameters())))[:2]  # nothing is sent or copied
        ['model.bias', 'model.weight']

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    wait_sent()  # They are the live shards, and may be written to.
    state: dict[str, Any] = {
        f"model.{name}": local_chunk(holding, holding.owner) for name, holding in _holdings_with_memory(model).items()
    }
    for name, buffer in persistent_buffers(model):
        state[f"model.{name}"] = buffer.detach()
    state.update(optimizer_entries(model, _listed(optimizer)))
    return state


@checked_arguments
@on_local_tensors
def target_state_dict(
    model: nn.Module, optimizer: Optimizers, saved: Mapping[str, Any], *, strict: bool = True
) -> dict[str, Any]:
    """Returns the state to read a saved one into: like `sharded_state_dict`, but with all that was saved.

    The parameters and buffers are the live ones; so are the optimizer's tensors where it has them. A fresh optimizer
    has none: they are allocated here, and handed to it by `load_sharded_state_dict(..., copy=False)`.

    Args:
        model: The built model.
        optimizer: Its optimizer, or several; with None the saved optimizer state is left out.
        saved: For each saved key a `SavedTensor`, or the saved value itself where that is not a tensor.
        strict: False leaves it to `load_snapshot` to compare, which lists the differences of any rank, or with its own
            `strict=False` loads matching values.

    Raises:
        StateMismatch: The saved state belongs to a different model or kind of optimizer, or the optimizer has different
            parameters. It lists all differences on this rank.

    Examples:
        >>> import torch
        >>> from scale_core.state import sharded_state_dict, target_state_dict
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> saved = sharded_state_dict(model, optimizer)
        >>> sorted(target_state_dict(model, optimizer, saved)) == sorted(saved)
        True

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    saved = of_this_rank(saved, model)
    target, names = sharded_state_dict(model), _names(model)
    key_of = _own_keys(saved, names)
    local_saved = {local_key: saved[key] for local_key, key in key_of.items()}
    if optimizer is not None:
        target.update(optimizer_targets(model, _listed(optimizer), local_saved, names.in_group))
    if strict and (differences := _compare(target, local_saved, optimizer)):
        raise StateMismatch(differences.refusal(), differences)
    return {key_of.get(local_key, local_key): value for local_key, value in target.items()}


def _compare(expected: Mapping[str, Any], given: Mapping[str, Any], optimizer: Optimizers) -> StateDifferences:
    """Compares this rank's objects with the entries of a state for a model, and for an optimizer if there is one."""
    kinds = ("model.",) if optimizer is None else ("model.", "optim.")
    return compare_states(expected, {key: value for key, value in given.items() if key.startswith(kinds)})


@on_local_tensors
def model_tensors(model: nn.Module) -> dict[str, SavedTensor]:
    """Describes the full tensors that this rank has elements of: `model.<name>` of `sharded_state_dict`, by name.

    The model may be on the meta device.
    """
    tensors = {
        name: SavedTensor(param_slice.shape, param_slice.owner.dtype)
        for name, param_slice in named_param_slices(model).items()
    }
    return tensors | {
        name: SavedTensor(tuple(buffer.shape), buffer.dtype) for name, buffer in persistent_buffers(model)
    }


def names_in_model(model: nn.Module) -> Mapping[str, str]:
    """Returns all names that the full model has for its tensors, each with the first one of the same tensor."""
    return _names(model).first


@checked_arguments
@on_local_tensors
def load_sharded_state_dict(
    state: Mapping[str, Any], model: nn.Module, optimizer: Optimizers = None, *, copy: bool = True, strict: bool = True
) -> None:
    """Puts a state into a model and an optimizer that are built already; the optimizer may be fresh.

    If this rank holds a shard, the value may be that shard or the full tensor. (A snapshot exchanges shards of other
    ranks.)

    Args:
        state: As `sharded_state_dict` returns it.
        model: The built model.
        optimizer: Its optimizer, or several; with None the optimizer state is left out.
        copy: Whether the optimizer gets copies; False hands it the tensors of `state`.
        strict: False loads matching values, leaves the rest unchanged, and warns with a list of mismatches.

    Raises:
        StateMismatch: Missing or unexpected keys, other shapes, dtypes or ranges, all of them listed; nothing has been
            written then.
        ValueError: A parameter is on the meta device.

    Examples:
        >>> import torch
        >>> from scale_core.state import load_sharded_state_dict, sharded_state_dict
        >>> model, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        >>> load_sharded_state_dict(sharded_state_dict(model), other)
        >>> torch.equal(other.weight, model.weight)
        True

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    differences = load_what_fits(state, model, optimizer, copy=copy, strict=strict)
    if differences:
        warnings.warn(f"the state is loaded in part, as strict=False says: {differences}", stacklevel=3)


@on_local_tensors
def load_what_fits(
    state: Mapping[str, Any], model: nn.Module, optimizer: Optimizers = None, *, copy: bool = True, strict: bool = False
) -> StateDifferences:
    """As `load_sharded_state_dict`; returns the mismatches in place of a warning."""
    names = _names(model)
    local_state = {local_key: state[key] for local_key, key in _own_keys(state, names).items()}
    holdings = {f"model.{name}": holding for name, holding in _holdings_with_memory(model).items()}
    targets: dict[str, Tensor] = {key: holding.view(holding.owner) for key, holding in holdings.items()}
    targets.update({f"model.{name}": buffer.detach() for name, buffer in persistent_buffers(model)})
    expected: dict[str, Any] = {
        key: SavedTensor(holdings[key].shape if key in holdings else tuple(tensor.shape), tensor.dtype)
        for key, tensor in targets.items()
    }
    saved = {
        key: SavedTensor(tuple(value.size()), value.dtype) if isinstance(value, Tensor) else value
        for key, value in local_state.items()
    }
    if optimizer is not None:
        expected.update(optimizer_targets(model, _listed(optimizer), saved, names.in_group, allocate=False))
    differences = _compare(expected, saved, optimizer)
    if differences and strict:
        raise StateMismatch(differences.refusal(), differences)
    local_state = without_misfits(local_state, differences.keys)
    sources = {
        key: part_of(key, local_state[key], holdings[key]) if key in holdings else local_state[key].detach()
        for key in targets
        if key in local_state
    }
    loaded = (
        []
        if optimizer is None
        else state_entries(local_state, model, _listed(optimizer), names.in_group, strict=strict)
    )
    wait_sent()
    for key, source in sources.items():
        if not targets[key].is_set_to(source):
            targets[key].copy_(source)
    for loaded_object in loaded:
        install_hooks(loaded_object.optimizer)
        fill_groups(loaded_object.optimizer, loaded_object.options)
        if strict:
            loaded_object.optimizer.state.clear()
        for param, values in loaded_object.slots.items():
            loaded_object.optimizer.state[param] = {
                key: value.clone() if copy and isinstance(value, Tensor) else value for key, value in values.items()
            }
    return differences


def without_misfits(state: Mapping[str, Any], misfits: Collection[str]) -> dict[str, Any]:
    """The entries of a state that fit: of an optimizer, all entries of a parameter if all of them fit."""

    def param_of(key: str) -> str:
        kind, _, remainder = key.partition(".")
        return remainder.rpartition(".")[0] if kind == "optim" else remainder

    misfit_params = {param_of(key) for key in misfits if not is_group(key)}
    return {
        key: value
        for key, value in state.items()
        if key not in misfits and (not key.startswith("optim.") or is_group(key) or param_of(key) not in misfit_params)
    }


def _listed(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


@dataclass(frozen=True)
class _Names:
    """The names of a model's tensors."""

    first: Mapping[str, str]  # All names of its state, each with the first one of the same tensor
    held: frozenset[str]  # The first names of those that this rank has

    def here(self, name: str) -> str | None:
        """The slice or tensor saved under this name; None if other ranks have it."""
        first = self.first.get(name, name)
        return first if first in self.held or name not in self.first else None

    def in_group(self, name: str) -> str | None:
        """As `here`, for a saved group; also None where others have it of a unit that each rank has for itself."""
        local_name, (stem, separator, _) = self.here(name), name.partition("@")
        is_of_others = (
            separator
            and local_name not in self.held
            and any(local_name_part.startswith(f"{stem}@") for local_name_part in self.held)
        )
        return None if is_of_others else local_name


def _names(model: nn.Module) -> _Names:
    holdings = named_param_slices(model)
    local_names = frozenset([*holdings, *(name for name, _ in persistent_buffers(model))])
    if isinstance(model, PartOfModel):
        return _Names(model.names_of_model(), local_names)
    outer, first = _outer_prefix(model), {name: name for name in local_names}
    by_owner = {holding.owner: name for name, holding in holdings.items() if not holding.shares_owner}
    for listed, param in model.named_parameters(remove_duplicate=False):
        if param in by_owner:
            first.setdefault(listed.removeprefix(outer), by_owner[param])
    return _Names(first, local_names)


def _own_keys(state: Mapping[str, Any], names: _Names) -> dict[str, str]:
    """The keys of a state's entries on this rank, each with that in the state."""
    # A tied parameter may have been saved by another of its names. Two entries of one parameter keep their names.
    own_keys: dict[str, str] = {}
    for key in state:
        kind, _, remainder = key.partition(".")
        if kind not in ("model", "optim") or is_group(key):
            own_keys[key] = key
            continue
        name, dot, entry = remainder.rpartition(".") if kind == "optim" else (remainder, "", "")
        local_name = names.here(name)
        if local_name is not None:
            local_key = f"{kind}.{local_name}{dot}{entry}"
            own_keys[key if local_key in own_keys or (local_key != key and local_key in state) else local_key] = key
    return own_keys


def _holdings_with_memory(model: nn.Module) -> dict[str, ParamSlice]:
    holdings = named_param_slices(model)
    for name, holding in holdings.items():
        if holding.owner.is_meta:
            raise ValueError(
                f"{name} is on the meta device, where there is nothing to save and no memory to load into: call "
                "model.to_empty(device=...) before"
            )
    return holdings


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers of this rank that are saved, by their names in the plain model."""
    outer = _outer_prefix(model)
    persistent = {
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    for listed, buffer in model.named_buffers():
        if buffer in persistent:
            name = listed.removeprefix(outer)
            yield model.names_of_model().get(name, name) if isinstance(model, PartOfModel) else name, buffer


def _outer_prefix(model: nn.Module) -> str:
    """The prefix that a wrapper around the model adds to every name, seen on a parameter that knows its plain name."""
    for listed, param in model.named_parameters():
        shard = shard_of(param)
        if shard is not None and listed.endswith(f".{shard.name}"):
            return listed.removesuffix(shard.name)
    return ""
