"""`nn.TransformerEncoder` reads the weights of its first layer before it calls it, to decide on its fast path.

A class of tensors with functions of its own turns the path off. Then positions that a mask leaves out are computed,
where the path has zeros. So the forward of an encoder runs where shards are plain tensors.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from scale_core.shard import as_local


class _PlainWeights:
    """Forward hooks of an encoder, before and after it."""

    def __init__(self) -> None:
        self._contexts: list[Any] = []  # one for each forward that runs

    def enter(self, *_: Any) -> None:
        """Before the forward."""
        context = as_local()
        context.__enter__()
        self._contexts.append(context)

    def leave(self, *_: Any) -> None:
        """After the forward, or its failure."""
        if self._contexts:
            self._contexts.pop().__exit__(None, None, None)


def keep_fast_path(module: nn.Module) -> None:
    """Lets the encoders in a module, which is sharded, decide as in the plain model."""
    for encoder in module.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        if any(isinstance(getattr(hook, "__self__", None), _PlainWeights) for hook in encoder._forward_hooks.values()):
            continue
        hooks = _PlainWeights()
        encoder.register_forward_pre_hook(hooks.enter)
        encoder.register_forward_hook(hooks.leave, always_call=True)
