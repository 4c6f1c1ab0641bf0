"""Module hooks that are registered on each part when a module is cut, as into the stages of a pipeline.

Most hooks of a module are about its inputs or outputs, which no part has. Hooks of this kind are about the layers in
it, and do the same for a part, so cutting the module must not drop them.
"""

from __future__ import annotations

from torch import nn


class ForEachShardHook:
    """Base class of forward hooks and pre-hooks, or of their owners, that work on each part of a module."""

    # The same object hooks all parts of a process, one after the other.


def is_for_each_part(hook: object) -> bool:
    """Whether each part of a module takes this hook."""
    return isinstance(getattr(hook, "__self__", hook), ForEachShardHook)


def take_hooks(part: nn.Module, whole: nn.Module) -> bool:
    """Registers on `part` the hooks of the full module, `whole`, for each part; returns whether there are any."""
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
