"""The options of an optimizer's parameter groups, saved so that any part of a group finds its own again.

A rank of a pipeline has the parameters of its stages alone, so group 0 of the plain model is cut into as many pieces as
there are ranks. Each rank saves every group under a key made of the group's number and the names that it has there, and
loading looks options up by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from scale_core.state.validation import StateMismatch, some_keys

GROUPS = "optim.groups"
"""What the keys of saved groups begin with: `optim.groups[<number>].<digest of the names>`."""

REGROUP = "build the optimizer with the parameter groups that it was saved with"
"""What mends groups that differ, in errors."""

NAMES = frozenset({"params", "param_names"})
"""The keys of a group that are no options of it: the names of the plain model are saved anyway."""


@dataclass(frozen=True)
class SavedGroup:
    """A group of one rank's optimizer, or the part of it on that rank.

        >>> from scale_core.state.state_dict import SavedGroup
        >>> SavedGroup(0, ("weight", "bias"), {"lr": 0.1}).names
        ('weight', 'bias')

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    number: int  # Its place in that optimizer
    names: tuple[str, ...]  # Of its parameters in the plain model; empty where a rank had nothing of the group
    options: Mapping[str, Any]  # Its hyperparameters, ready for JSON


def group_entries(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns the groups of an optimizer as entries of a state."""
    entries = {}
    for number, (group, its_names) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        options = {key: as_json(f"option {key}", value) for key, value in group.items() if key not in NAMES}
        key, entry = group_entry(number, its_names, options)
        entries[key] = entry
    return entries


def group_entry(number: int, names: Sequence[str], options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the key of a group in a state, and its entry."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"{GROUPS}[{number}].{digest}", {**options, "params": list(names)}


def is_group(key: str) -> bool:
    """Whether this is the key of a saved group, or of all groups in one, as in older snapshots."""
    return key == GROUPS or key.startswith(f"{GROUPS}[")


def saved_groups(state: Mapping[str, Any]) -> list[SavedGroup]:
    """Returns the groups of a state, by number; the groups of several ranks come one after the other."""
    groups = []
    for key, value in state.items():
        if key == GROUPS:
            groups += [_saved(number, group) for number, group in enumerate(value)]
        elif is_group(key):
            groups.append(_saved(int(key.removeprefix(f"{GROUPS}[").partition("]")[0]), value))
    return sorted(groups, key=lambda group: group.number)


def _saved(number: int, group: Mapping[str, Any]) -> SavedGroup:
    options = {key: value for key, value in group.items() if key != "params"}
    return SavedGroup(number, tuple(group["params"]), options)


def matching_options(
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    saved: Sequence[SavedGroup],
    name_here: Callable[[str], str | None],
    *,
    strict: bool = True,
) -> list[Mapping[str, Any]]:
    """Returns the saved options of each group of an optimizer; unless strict, it may have parameters of none."""
    # A group without parameters gets the options of the saved groups of its number, if all of these have the same.
    if not saved:
        raise StateMismatch(
            f"{GROUPS}: none saved: save the optimizer too, by sharded_state_dict(model, optimizer), or load the model "
            "alone, with optimizer=None"
        )
    number_of = {name: number for number, its_names in enumerate(names) for name in its_names}
    group_of: dict[str, SavedGroup] = {}
    parts: list[list[SavedGroup]] = [[] for _ in names]
    for group in saved:
        local_names = [name for name in map(name_here, group.names) if name in number_of]
        numbers = sorted({number_of[name] for name in local_names})
        if len(numbers) > 1:
            first, second = (next(name for name in local_names if number_of[name] == number) for number in numbers[:2])
            raise StateMismatch(
                f"{GROUPS}: {first} and {second} were saved in one group, and stand in the groups {numbers[0]} and "
                f"{numbers[1]} of the optimizer: {REGROUP}"
            )
        group_of.update(dict.fromkeys(local_names, group))
        for number in numbers:
            parts[number].append(group)
    lacking = [name for name in number_of if name not in group_of]
    if lacking and strict:
        first, *others = lacking
        raise StateMismatch(
            f"{GROUPS}: group {number_of[first]} of the optimizer has {first}, which was saved in none: {REGROUP}"
            + (f" (the same holds for {some_keys(others)})" if others else "")
        )
    options = []
    for number, (live, its_parts) in enumerate(zip(optimizer.param_groups, parts, strict=True)):
        if its_parts:
            common_options = _common_options(number, its_parts)
            check_options(common_options, live, optimizer.defaults)
        else:
            same = [group.options for group in saved if group.number == number]
            common_options = same[0] if same and all(options_of_group == same[0] for options_of_group in same) else {}
        options.append(common_options)
    return options


def _common_options(number: int, parts: Sequence[SavedGroup]) -> Mapping[str, Any]:
    first, *others = parts
    for other in others:
        differing = sorted(
            key
            for key in first.options.keys() | other.options.keys()
            if first.options.get(key) != other.options.get(key)
        )
        if differing:
            key = differing[0]
            raise StateMismatch(
                f"{GROUPS}: group {number} of the optimizer has parameters of saved groups with other options: {key} "
                f"is {first.options.get(key)} for {first.names[0]} and {other.options.get(key)} for {other.names[0]}: "
                f"{REGROUP}"
            )
    return first.options


def check_options(
    saved: Mapping[str, Any], group: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Refuses a group with options of a different optimizer, or with values of a different type than its defaults."""
    # One side alone may have more: a scheduler adds to a group, and so do newer versions of torch.
    lost, new = (sorted(a.keys() - b.keys() - NAMES) for a, b in ((saved, group), (group, saved)))
    if lost and new:
        raise StateMismatch(
            f"the state belongs to another optimizer: it has the option '{lost[0]}', which this one does not know, and "
            f"no '{new[0]}'"
        )
    for name in defaults.keys() & saved.keys() & group.keys() - NAMES:
        if expected := _expected_kind(saved[name], group[name]):
            raise StateMismatch(
                f"{GROUPS}: '{name}' was saved as {saved[name]!r:.40}, expected {expected}: the snapshot was changed, "
                "or belongs to another optimizer"
            )


def _expected_kind(saved: Any, live: Any) -> str:
    """The expected value of a saved option, by the optimizer's own; "" if it is that. None may stand for any."""
    if saved is None:
        return ""
    if isinstance(live, bool):
        return "" if saved in (False, True) else "true or false"
    if isinstance(live, float):
        return "" if _is_number(saved) else "a number"
    if isinstance(live, tuple | list) and live and all(item is None or _is_number(item) for item in live):
        is_list = isinstance(saved, tuple | list) and len(saved) == len(live)
        are_numbers = is_list and all(item is None or _is_number(item) for item in saved)
        return "" if are_numbers else f"{len(live)} numbers"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def fill_groups(optimizer: Optimizer, options: Iterable[Mapping[str, Any]]) -> None:
    """Sets the saved options of the optimizer's groups, in the types that they have."""
    for saved, group in zip(options, optimizer.param_groups, strict=True):
        for key, value in saved.items():
            if key in NAMES:
                continue
            live = group.get(key)
            if isinstance(live, Tensor):
                live.fill_(value)
            elif isinstance(value, list):
                group[key] = tuple(value) if isinstance(live, tuple) else list(value)
            else:
                group[key] = value


def as_json(name: str, value: Any) -> Any:
    """Returns a value of an optimizer as JSON."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(name, part) for part in value]
    if isinstance(value, dict):
        return {str(key): as_json(name, part) for key, part in value.items()}
    raise ValueError(f"{name} of the optimizer is a {type(value).__name__}, expected numbers, texts or lists of them")
