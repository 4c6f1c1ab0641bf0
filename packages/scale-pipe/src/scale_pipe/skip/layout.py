"""The skips that cross from one partition to another, and a check that each has both of its ends."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isgeneratorfunction
from typing import NamedTuple

from torch import nn

from scale_core.arguments import checked_arguments
from scale_pipe.skip.namespace import SkipKey, declared_skips, popped_keys, stashed_keys


class Skip(NamedTuple):
    """A tensor that goes from one partition straight to a later one."""

    key: SkipKey
    stashed_in: int  # Number of a partition.
    popped_in: int


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> list[Skip]:
    """Returns the skips between partitions, in the order of the modules that stash, which is the same on all ranks."""
    popped_in = {key: number for number, partition in enumerate(partitions) for key in popped_keys(partition)}
    return [
        Skip(key, number, popped_in[key])
        for number, partition in enumerate(partitions)
        for key in stashed_keys(partition)
        if popped_in.get(key, number) > number
    ]


@checked_arguments
def verify_skippables(module: nn.Sequential | Sequence[nn.Module]) -> None:
    """Checks that each popped name was stashed before, by exactly one layer, and the other way round.

    It also finds a forward that yields although its class lacks the decorator.

    Args:
        module: A sequential module, or its layers; modules inside of a layer count as part of it.

    Raises:
        TypeError: One or more pairs do not match; the message lists all of them.

    Examples:
        >>> from torch import nn
        >>> from scale_pipe import pop, skippable, verify_skippables
        >>> @skippable(pop=["skip"])
        ... class Add(nn.Module):
        ...     def forward(self, input):
        ...         skip = yield pop("skip")
        ...         return input + skip
        >>> try:
        ...     verify_skippables(nn.Sequential(nn.Linear(2, 2), Add()))
        ... except TypeError as error:
        ...     print("nobody stashes it")
        nobody stashes it

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    problems: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: dict[SkipKey, str] = {}
    layers = module.named_children() if isinstance(module, nn.Module) else enumerate(module)
    for name, layer in layers:
        for part in layer.modules():
            kind = type(part)
            # A decorated forward is no generator any more. Inside of a layer, other modules may have generators.
            if isgeneratorfunction(kind.forward) and (part is layer or declared_skips(part)):
                problems.append(
                    f"layer '{name}' has a forward that yields: write @skippable above class {kind.__name__}"
                )
        declared = [names for part in layer.modules() if (names := declared_skips(part))]
        both = {word for names in declared for word in set(names.stash) & set(names.pop)}
        problems += [
            f"'{name}' declared {word!r} both as stashable and as poppable: a name goes from one layer to a later one"
            for word in sorted(both)
        ]
        keys = [key for key in stashed_keys(layer) if key[1] not in both]
        for key in keys:
            if key in stashed:
                problems.append(
                    f"'{name}' redeclared {key[1]!r} as stashable, after '{stashed[key]}': isolate one of them"
                )
            else:
                stashed[key] = str(name)
        for key in popped_keys(layer):
            if key[1] in both:
                continue
            if key in popped:
                problems.append(f"'{name}' redeclared {key[1]!r} as poppable, which '{popped[key]}' has popped by then")
            elif key not in stashed:
                problems.append(f"'{name}' declared {key[1]!r} as poppable but it was not stashed by a layer before it")
            else:
                popped[key] = str(name)
    problems += [
        f"no module declared {key[1]!r} as poppable but stashed by '{name}'"
        for key, name in stashed.items()
        if key not in popped
    ]
    if problems:
        lines = "".join(f"\n  * {problem}" for problem in problems)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n{lines}")
