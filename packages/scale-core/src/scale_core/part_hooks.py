"""Hooks of a module that each of its parts takes along where it is cut, as into the stages of a pipeline.

A hook around a whole module is most often about its inputs or outputs, which no part has. Those of this kind are about
what stands in it, and do the same for a part: whoever cuts a module registers them on every part, so that what was
divided or watched before stays so.
"""

from __future__ import annotations

from torch import nn


class ForEachPart:
    """What is a forward hook or pre-hook, or whose methods are, and does for a part of its module what it does for all.

    The same object hooks all parts of a process, one after the other.
    """


def is_for_each_part(hook: object) -> bool:
    """Whether each part of a module takes a hook along.

    Args:
        hook: Of any module.
    """
    return isinstance(getattr(hook, "__self__", hook), ForEachPart)


def take_hooks(part: nn.Module, whole: nn.Module) -> bool:
    """Registers on a part the hooks that each part of its module takes along; returns whether there are any.

    Args:
        part: A module without such hooks.
        whole: The module that is cut.
    """
    found = False
    for key, before in whole._forward_pre_hooks.items():
        if is_for_each_part(before):
            found = True
            part.register_forward_pre_hook(before, with_kwargs=key in whole._forward_pre_hooks_with_kwargs)
    for key, after in whole._forward_hooks.items():
        if is_for_each_part(after):
            found = True
            part.register_forward_hook(
                after,
                with_kwargs=key in whole._forward_hooks_with_kwargs,
                always_call=key in whole._forward_hooks_always_called,
            )
    return found
