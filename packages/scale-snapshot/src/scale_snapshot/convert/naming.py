"""Scale's keys for the state of another library: `model.<name>` and `optim.<name>.<key>`, from nested dicts.

Libraries agree on no layout, but on a few words for its parts. Values without a name (an optimizer's state by number)
raise an error. A guess could exchange two parameters of the same shape without an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from scale_core.state.param_groups import as_json, group_entry, is_group
from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.format.state_codec import encode_extra

MODEL_WORDS = ("model", "state_dict", "model_state_dict", "model_state", "module", "weights")
OPTIMIZER_WORDS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state", "optim_state_dict")
SNAPSHOT_MARK = "scale_snapshot"
"""The key, in what `writers` wrote, of a JSON text with what a snapshot holds besides tensors."""


@dataclass
class StoredState:
    """The content of a checkpoint, under scale's keys.

    Attributes:
        tensors: Each tensor by its key.
        values: Values that are no tensors, ready for JSON.
        extra: The program's addition, as `encode_extra` returns it.
        step: The training step, 0 where it is not known.
        tied: Other names of a tensor, each with its first name.

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    tensors: dict[str, LazyTensor]
    values: dict[str, Any] = field(default_factory=dict)
    extra: Any = None
    step: int = 0
    tied: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Renaming:
    """Changes of names: a prefix, the first text of a pair, becomes the second; the longest one counts.

    Examples:
        >>> from scale_snapshot.convert.naming import Renaming
        >>> Renaming({"module.": ""})
        Renaming(pairs={'module.': ''}, skip=(), model=None)

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    pairs: Sequence[tuple[str, str]] = ()
    skip: Sequence[str] = ()
    model: str | None = None  # The key of the model's part, if it is none of `MODEL_WORDS`

    def name(self, name: str) -> str:
        """The new name."""
        fitting = [pair for pair in self.pairs if name.startswith(pair[0])]
        if not fitting:
            return name
        old, new = max(fitting, key=lambda pair: len(pair[0]))
        return new + name[len(old) :]

    def skips(self, path: str) -> bool:
        """Whether the value at this dotted path is left out."""
        return any(path == word or path.startswith((f"{word}.", f"{word}[")) for word in self.skip)


def stored_state(tree: Mapping[Any, Any], renaming: Renaming) -> StoredState:
    """Gives a saved state scale's keys.

    Args:
        tree: Nested dicts and lists, with `LazyTensor`s and plain values.
        renaming: Changes of parameters' names, and names to leave out.

    Raises:
        ValueError: Something would be lost: it has no name, or is neither a tensor nor a value that JSON knows; two
            tensors get one name.
    """
    if SNAPSHOT_MARK in tree:
        return _of_snapshot(tree, renaming)
    top = {str(key): value for key, value in tree.items() if not renaming.skips(str(key))}
    words = MODEL_WORDS if renaming.model is None else (renaming.model,)
    model_key = next((word for word in words if isinstance(top.get(word), Mapping)), None)
    if model_key is None and renaming.model is not None:
        raise ValueError(f"it has no dict {renaming.model!r}; it has {', '.join(top)}")
    optimizer_key = next((word for word in OPTIMIZER_WORDS if isinstance(top.get(word), Mapping)), None)
    if model_key is not None:
        model = top.pop(model_key)
    else:
        in_model = [key for key, value in top.items() if isinstance(value, LazyTensor) or key.endswith("_extra_state")]
        model = {key: top.pop(key) for key in in_model}
    state = StoredState({})
    _add_model(state, model, model_key or "", renaming)
    if optimizer_key is not None:
        _add_optimizer(state, top.pop(optimizer_key), optimizer_key, renaming)
    state.extra = _rest(top, renaming)
    state.step = _step_in(top)
    if not state.tensors:
        raise ValueError("it holds no tensors by name: expected a model's state_dict()")
    return state


def _of_snapshot(tree: Mapping[str, Any], renaming: Renaming) -> StoredState:
    try:
        mark = json.loads(tree[SNAPSHOT_MARK])
        values, extra, step = dict(mark["values"]), mark["extra"], int(mark["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its {SNAPSHOT_MARK} is damaged: {type(error).__name__}: {error}") from error
    keys = [key for key, value in tree.items() if isinstance(value, LazyTensor) and not renaming.skips(key)]
    tensors = _unique((_renamed_key(key, renaming), tree[key]) for key in keys)
    return StoredState(tensors, _renamed_values(values, renaming), extra, step)


def renamed(state: StoredState, renaming: Renaming) -> StoredState:
    """A state that has scale's keys already, with other names; the object `renaming.model` becomes the model."""
    prefix = "model." if renaming.model is None else f"{renaming.model}."
    if not any(key.startswith(prefix) for key in state.tensors) and renaming.model is not None:
        objects = sorted({key.partition(".")[0] for key in state.tensors})
        raise ValueError(f"it has no object {renaming.model!r}; it has {', '.join(objects)}")
    of_model = {key: f"model.{key.removeprefix(prefix)}" for key in state.tensors if key.startswith(prefix)}
    keys = [key for key in state.tensors if not renaming.skips(key)]
    tensors = _unique((_renamed_key(of_model.get(key, key), renaming), state.tensors[key]) for key in keys)
    return StoredState(tensors, _renamed_values(state.values, renaming), state.extra, state.step, state.tied)


def _renamed_key(key: str, renaming: Renaming) -> str:
    kind, dot, name = key.partition(".")
    return f"{kind}.{renaming.name(name)}" if dot and kind in ("model", "optim") else key


def _renamed_values(values: Mapping[str, Any], renaming: Renaming) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in values.items():
        if renaming.skips(key):
            continue
        if is_group(key) and isinstance(value, Mapping) and renaming.pairs:
            options = {name: option for name, option in value.items() if name != "params"}
            number = int(key.partition("[")[2].partition("]")[0])
            key, value = group_entry(number, [renaming.name(name) for name in value["params"]], options)
        renamed[_renamed_key(key, renaming) if not is_group(key) else key] = value
    return renamed


def _unique(pairs: Iterable[tuple[str, LazyTensor]]) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    for key, tensor in pairs:
        if key in tensors:
            raise ValueError(f"two tensors would be named {key}: rename one of them with --map")
        tensors[key] = tensor
    return tensors


def _add_model(state: StoredState, model: Mapping[Any, Any], at: str, renaming: Renaming) -> None:
    first_of: dict[object, str] = {}
    pairs: list[tuple[str, LazyTensor]] = []
    for name, value in model.items():
        path = f"{at}.{name}".lstrip(".")
        if renaming.skips(path) or (value is None and str(name).endswith("_extra_state")):
            continue
        if not isinstance(value, LazyTensor):
            raise ValueError(
                f"{path} is a {type(value).__name__} and not a tensor, so it would be lost: "
                f"leave it out with --skip {path}"
            )
        key = f"model.{renaming.name(str(name))}"
        if value.origin is not None and first_of.setdefault(value.origin, key) != key:
            state.tied[key] = first_of[value.origin]
        pairs.append((key, value))
    state.tensors.update(_unique(pairs))


def _add_optimizer(state: StoredState, optimizer: Mapping[Any, Any], at: str, renaming: Renaming) -> None:
    of_params, groups = optimizer.get("state"), optimizer.get("param_groups")
    if of_params is None and any(str(key).startswith(("state.", "param_groups.")) for key in optimizer):
        of_params, groups = _unflattened(optimizer)
    if not isinstance(of_params, Mapping) or not isinstance(groups, list):
        raise ValueError(
            f"{at} is not an optimizer's state_dict(), which has 'state' and 'param_groups': "
            f"leave it out with --skip {at}"
        )
    name_of = _names_of_numbers(groups)
    lacking = [
        number for number in [*of_params, *_listed(groups)] if not isinstance(number, str) and number not in name_of
    ]
    if lacking:
        raise ValueError(
            f"{at} has its parameters by number ({lacking[0]}) and not by name, and a guess could exchange two of one "
            f"shape: leave it out with --skip {at}, or save it by names, as "
            "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) gives it"
        )
    for number, slots in of_params.items():
        name = renaming.name(name_of.get(number, str(number)))
        for key, value in slots.items():
            if isinstance(value, LazyTensor):
                state.tensors[f"optim.{name}.{key}"] = value
            else:
                state.values[f"optim.{name}.{key}"] = as_json(f"{at}.{number}.{key}", value)
    for number, group in enumerate(groups):
        names = [renaming.name(name_of.get(index, str(index))) for index in group["params"]]
        options = {key: _option(key, value) for key, value in group.items() if key not in ("params", "param_names")}
        key, entry = group_entry(number, names, options)
        state.values[key] = entry


def _option(key: str, value: Any) -> Any:
    return as_json(f"option {key}", value.load() if isinstance(value, LazyTensor) else value)


def _listed(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [index for group in groups for index in group["params"]]


def _names_of_numbers(groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """The names that torch keeps with the numbers, if the optimizer was given named parameters."""
    return {
        number: str(name)
        for group in groups
        for number, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }


def _unflattened(optimizer: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The state that torch's `flatten_optimizer_state_dict` took apart: one group for each set of equal options."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for full_key, value in optimizer.items():
        kind, _, remainder = full_key.partition(".")
        name, _, key = remainder.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, values in options.items():
        plain = {key: _option(key, value) for key, value in values.items()}
        groups.setdefault(json.dumps(plain, sort_keys=True), {**plain, "params": []})["params"].append(name)
    return state, list(groups.values())


def _rest(top: Mapping[str, Any], renaming: Renaming) -> Any:
    """Values that are neither model nor optimizer, for `extra`."""
    return encode_extra({key: _plain(value, key, renaming) for key, value in top.items()} or None)


def _plain(value: Any, at: str, renaming: Renaming) -> Any:
    if isinstance(value, Mapping):
        left = {key: item for key, item in value.items() if not renaming.skips(f"{at}.{key}")}
        return {str(key): _plain(item, f"{at}.{key}", renaming) for key, item in left.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, f"{at}.{number}", renaming) for number, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = "a tensor outside of the model" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(f"{at} is {kind}, and would be lost: leave it out with --skip {at}")


def _step_in(top: Mapping[str, Any]) -> int:
    for word in ("step", "global_step", "iteration", "num_updates"):
        value = top.get(word)
        if type(value) is int and value >= 0:
            return value
    return 0
