"""Many modules of a model at once, chosen by their names, by their class or by a function."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from typing import TypeAlias

from torch import nn

from scale_checkpoint.places import Target
from scale_checkpoint.treatment import Treatment
from scale_checkpoint.wrapper import How, give, treatment_for

ModulePolicy: TypeAlias = Callable[[str, nn.Module], How | None]
"""Called with a module's qualified name and the module; returns what is done with it, or None for nothing."""


def checkpoint_modules(
    model: nn.Module,
    select: Collection[str] | type[nn.Module] | ModulePolicy,
    how: How = "recompute",
    *,
    offload_to: Target = "host",
    offload_inputs: bool = False,
) -> list[str]:
    r"""Checkpoints those modules of a model that are chosen by their qualified names, by their class or by a function.

        >>> from torch import nn
        >>> from scale_checkpoint import checkpoint_modules
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        >>> checkpoint_modules(model, [r"[01]"])
        ['0', '1']
        >>> checkpoint_modules(model, lambda name, module: "offload" if name == "2" else None)
        ['2']

    Args:
        model: Changed in place. It has no name itself, and is not chosen.
        select: Regular expressions for whole names, as `named_modules` gives them: `r"layers\.\d+"`; or a class,
            whose modules are all chosen; or a function of name and module that returns one of the words and policies
            that `how` takes, or None for nothing.
        how: What is done with those whose names or class match, as `apply_checkpointing` takes it.
        offload_to: "host" or the path of a folder.
        offload_inputs: Of modules that are recomputed: keep their inputs there, too.

    Returns:
        The names of the modules that were chosen, in the order of the model.

    Raises:
        TypeError: `select` is one string, or a class of other things than modules.
        ValueError: A pattern is no regular expression, or matches nothing (the error lists near names) or nothing but a
            list of modules, which is never called; or no module is of the class; or `how` is none: see
            `apply_checkpointing`. Nothing was changed.
    """
    if isinstance(select, str):
        raise TypeError(f"select holds several patterns, but got one string, {select!r}: write [{select!r}]")
    # A module that stands in two places is chosen by either of its names, once.
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(module, []).append(name)
    if isinstance(select, type):
        chosen = _by_class(names, select, how)
    else:
        chosen = _by_function(names, select) if callable(select) else _by_pattern(names, select, how)
    # Nothing is changed before all is known to be right; what is said of several modules is read once.
    told: dict[int, Treatment | None] = {}
    for said in chosen.values():
        if id(said) not in told:
            told[id(said)] = treatment_for(said, offload_to=offload_to, offload_inputs=offload_inputs)
    for module, said in chosen.items():
        give(module, told[id(said)])
    return [names[module][0] for module in chosen]


def _by_class(names: dict[nn.Module, list[str]], of: type[nn.Module], how: How) -> dict[nn.Module, How]:
    if not issubclass(of, nn.Module):
        raise TypeError(f"select: expected a class derived from torch.nn.Module, got {of!r}")
    chosen = {module: how for module in names if isinstance(module, of) and _is_called(module)}
    if not chosen:
        there = sorted({type(module).__name__ for module in names if _is_called(module)})
        raise ValueError(f"select: the model has no {of.__name__} that is called; it has {', '.join(there)}")
    return chosen


def _by_function(names: dict[nn.Module, list[str]], select: ModulePolicy) -> dict[nn.Module, How]:
    decided = {module: select(called[0], module) for module, called in names.items() if _is_called(module)}
    return {module: how for module, how in decided.items() if how is not None}


def _by_pattern(names: dict[nn.Module, list[str]], patterns: Collection[str], how: How) -> dict[nn.Module, How]:
    chosen: set[nn.Module] = set()
    for pattern in patterns:
        try:
            whole = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"select: {pattern!r} is no regular expression: {error}") from error
        matched = [module for module, called in names.items() if any(map(whole.fullmatch, called))]
        runs = {module for module in matched if _is_called(module)}
        if not runs:
            raise ValueError(f"select: {pattern!r} {_why_nothing(pattern, matched, names)}")
        chosen |= runs
    return {module: how for module in names if module in chosen}


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _why_nothing(pattern: str, matched: list[nn.Module], names: dict[nn.Module, list[str]]) -> str:
    if matched:
        name, title = names[matched[0]][0], type(matched[0]).__name__
        inside = re.escape(name) + r"\.[^.]+"
        return f"matches only '{name}', a {title}, which is never called: match what it holds, r'{inside}'"
    every = [name for called in names.values() for name in called]
    plain = re.sub(r"\\d[+*]?|\[[^]]*\][+*]?", "0", pattern).replace("\\", "")
    near = difflib.get_close_matches(plain, every, n=5)
    listed = ", ".join(map(repr, near or every[:8]))
    return f"matches the name of no module; {'near names in the model' if near else 'the model has'}: {listed}"
