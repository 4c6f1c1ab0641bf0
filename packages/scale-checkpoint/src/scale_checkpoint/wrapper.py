"""A module's activations computed again, or kept elsewhere: `checkpoint_wrapper` and `apply_checkpointing`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from scale_checkpoint.offload.offload import MIN_BYTES, check_target
from scale_checkpoint.offload.storage import Target
from scale_checkpoint.recompute.forward import TreatedForward, treat, treat_no_more, treated
from scale_checkpoint.recompute.policy import SELECTIVE, OperatorPolicy, policy_of
from scale_checkpoint.recompute.recompute import Treatment

M = TypeVar("M", bound=nn.Module)

Operators: TypeAlias = Iterable[str | OpOverload | OpOverloadPacket]
"""Operators by name, as regular expressions, or `torch.ops` themselves."""

How: TypeAlias = Literal["keep", "recompute", "offload", "selective"] | OperatorPolicy | Operators
"""What is done with a module's activations: kept, computed again, or moved away; or computed again but for what is dear
("selective"), or for what these operators, or those that a policy names, have computed."""


def checkpoint_wrapper(
    module: M,
    offload_to_cpu: bool = False,
    *,
    keep: Literal["selective"] | OperatorPolicy | Operators | None = None,
    offload_to: Target | None = None,
    min_bytes: int = MIN_BYTES,
    preserve_random_state: bool = True,
) -> M:
    """Makes a module keep its inputs alone, and compute the rest again in the backward pass.

    The module stays the same object, with its class, its parameters' names and its hooks. Loss, gradients, buffers and
    random numbers are those of the plain module, to the bit.

        >>> import torch
        >>> from scale_checkpoint import checkpoint_wrapper
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> for block in model:
        ...     block = checkpoint_wrapper(block)
        >>> list(model.state_dict())[:2]
        ['0.weight', '0.bias']

    Wrapped twice in the same way it is as if wrapped once.

    Args:
        module: Changed in place.
        offload_to_cpu: Keep the inputs in the memory of the host; the same as `offload_to="host"`.
        keep: Operators whose results are kept, so that they are not computed again: names, as "addmm" or
            "_scaled_dot_product.*"; a policy function as torch's selective checkpointing has it; or "selective", which
            keeps what takes long for its size: linear layers, convolutions, attention, and those batched products that
            are smaller than what they were computed from.
        offload_to: "host" or the path of a folder: where the inputs are kept.
        min_bytes: Of what is offloaded, smaller storages stay.
        preserve_random_state: False for a module that draws no random numbers, or need not draw them again.

    Returns:
        `module` itself.

    Raises:
        TypeError: `module` is no module, or is a list of modules, which is never called.
        ValueError: It is checkpointed in another way already; an operator has no such name; `offload_to` is no target;
            `min_bytes` is negative.
        NotADirectoryError: There is no such folder.
    """
    target: Target | None = "host" if offload_to_cpu and offload_to is None else offload_to
    check_target("host" if target is None else target, min_bytes)
    policy = None if keep is None else policy_of(keep)
    _treat(module, Treatment(True, policy, target, min_bytes, preserve_random_state))
    return module


def apply_checkpointing(
    module: M,
    how: How,
    *,
    offload_to: Target = "host",
    offload_inputs: bool = False,
    min_bytes: int = MIN_BYTES,
) -> M:
    """Says what a module does with its activations, whatever it did before.

    Args:
        module: Changed in place.
        how: "keep" makes it plain again; "recompute" keeps its inputs alone; "offload" keeps all, elsewhere;
            "selective", operators, or a policy of operators, recompute all but what they name: see `keep` of
            `checkpoint_wrapper`.
        offload_to: "host" or the path of a folder, for "offload" and `offload_inputs`.
        offload_inputs: Of a module that is recomputed: keep its inputs there, too.
        min_bytes: Of what is offloaded, smaller storages stay.

    Returns:
        `module` itself.

    Raises:
        TypeError: `module` is no module, or is a list of modules, which is never called.
        ValueError: `how` is another word; an operator has no such name; `offload_to` is no target; `min_bytes` is
            negative.
        NotADirectoryError: There is no such folder.
    """
    give(module, treatment_for(how, offload_to=offload_to, offload_inputs=offload_inputs, min_bytes=min_bytes))
    return module


def give(module: nn.Module, treatment: Treatment | None) -> None:
    """Gives a module a treatment in the place of the one that it has; None makes it plain.

    Args:
        module: Changed in place.
        treatment: Of `treatment_for`.

    Raises:
        TypeError: `module` is no module, or is a list of modules.
    """
    _check_is_called(module)
    treat_no_more(module)
    if treatment is not None:
        _treat(module, treatment)


def treatment_for(
    how: How, *, offload_to: Target = "host", offload_inputs: bool = False, min_bytes: int = MIN_BYTES
) -> Treatment | None:
    """Returns what `apply_checkpointing` does with a module; None leaves it plain. Changes nothing.

    Args:
        how: See `apply_checkpointing`; so the others.
        offload_to: Where to.
        offload_inputs: Of a module that is recomputed.
        min_bytes: Smaller storages stay.

    Raises:
        ValueError: `how` is another word; an operator has no such name; `offload_to` is no target; `min_bytes` is
            negative.
        TypeError: `how` holds what is no operator.
        NotADirectoryError: There is no such folder.
    """
    check_target(offload_to, min_bytes)
    inputs_to = offload_to if offload_inputs else None
    if isinstance(how, str) and how != SELECTIVE:
        if how == "keep":
            return None
        if how == "recompute":
            return Treatment(offload_to=inputs_to, min_bytes=min_bytes)
        if how == "offload":
            return Treatment(recompute=False, offload_to=offload_to, min_bytes=min_bytes)
        raise ValueError(f'how: expected "keep", "recompute", "offload", "selective" or operators, got {how!r}')
    return Treatment(keep=policy_of(how), offload_to=inputs_to, min_bytes=min_bytes)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module's own activations are recomputed or offloaded; what it holds, or what holds it, does not count.

    >>> from torch import nn
    >>> from scale_checkpoint import checkpoint_wrapper, is_checkpointed
    >>> is_checkpointed(nn.Tanh()), is_checkpointed(checkpoint_wrapper(nn.Tanh()))
    (False, True)

    Args:
        module: Any module.
    """
    return treated(module) is not None


def _treat(module: nn.Module, treatment: Treatment) -> None:
    _check_is_called(module)
    present = treated(module)
    if present is None:
        treat_no_more(module)
        treat(module, TreatedForward(module, treatment))
    elif present.treatment != treatment:
        raise ValueError(
            f"a {type(module).__name__} is checkpointed already, as {present.treatment}, and was to be as {treatment}: "
            'wrap it once, or call apply_checkpointing(module, "keep") first'
        )


def _check_is_called(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got a {type(module).__name__}: wrap the module, not its output")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise TypeError(
            f"a {type(module).__name__} is never called, so nothing of it can be checkpointed: wrap what it holds, "
            "for part in modules: checkpoint_wrapper(part)"
        )


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
