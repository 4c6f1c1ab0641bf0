"""`with_wrapped_modules`: checkpoints and shards modules by their names, in one call for a configuration file.

The name and the arguments are those by which users of Tango know it. Patterns come as a set, which has no order, and
may match modules inside of each other: here children always come before their parents, so that the units are the same
whatever the order of the set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

from torch import nn

from scale_checkpoint import checkpoint_wrapper, is_checkpointed
from scale_checkpoint.wrapper import modules_by_name
from scale_core.arguments import checked_arguments
from scale_fsdp import FSDPConfig
from scale_fsdp.runtime.unit import unit_of

M = TypeVar("M", bound=nn.Module)


@checked_arguments
def with_wrapped_modules(
    model: M,
    modules_to_wrap: Collection[str],
    fsdp_config: FSDPConfig | None = None,
    activation_checkpointing: bool = False,
) -> M:
    r"""Checkpoints and shards those modules in a model whose qualified names match; names and classes stay.

    The model itself has no name and is not matched: shard it at last, around the rest, with the same configuration.

        >>> from torch import nn
        >>> from scale_fsdp import FSDPConfig
        >>> blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        >>> model = with_wrapped_modules(nn.Sequential(*blocks), {r"\d+"}, FSDPConfig(), activation_checkpointing=True)
        >>> model = FSDPConfig().shard(model)

    Args:
        model: Changed in place.
        modules_to_wrap: Regular expressions for whole names, as `named_modules` gives them: `r"layers\.\d+"`.
        fsdp_config: How each of them is sharded, as a unit; None shards none.
        activation_checkpointing: Recompute their activations in the backward pass, inside of the unit: with the
            parameters that the backward has gathered.

    Returns:
        `model` itself.

    Raises:
        TypeError: `modules_to_wrap` is one string.
        ValueError: A pattern is no regular expression, or matches nothing (the error lists near names) or nothing but a
            list of modules, which is never called; a module is sharded or checkpointed already; neither is asked for.
    """
    if fsdp_config is None and not activation_checkpointing:
        raise ValueError(
            "with_wrapped_modules: neither fsdp_config nor activation_checkpointing is given, so nothing would be "
            "done: write fsdp_config=FSDPConfig(), activation_checkpointing=True, or both"
        )
    matched = set(modules_by_name(model, sorted(modules_to_wrap), "modules_to_wrap"))
    chosen = [module for module in _children_first(model, set()) if module in matched]
    for module in chosen:
        _check_is_plain(module, fsdp_config is not None, activation_checkpointing)
    for module in chosen:
        if activation_checkpointing:
            checkpoint_wrapper(module)
        if fsdp_config is not None:
            fsdp_config.shard(module)
    return model


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _check_is_plain(module: nn.Module, shards: bool, checkpoints: bool) -> None:
    title = type(module).__name__
    if shards and unit_of(module) is not None:
        raise ValueError(f"with_wrapped_modules: a {title} that matches is sharded already: name each module once")
    if checkpoints and is_checkpointed(module):
        raise ValueError(f"with_wrapped_modules: a {title} that matches is checkpointed already: name each module once")
