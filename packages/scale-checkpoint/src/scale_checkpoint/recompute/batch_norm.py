"""`patch_batchnorm`: batch norms under other checkpointing update their statistics once, not again in the backward.

`checkpoint_wrapper` needs none of this, since it gives a recomputation copies of all buffers that the forward changes.
It is for modules that are recomputed by `torch.utils.checkpoint` itself, reentrant or not, or by a pipeline.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_checkpoint.state import is_recomputing
from scale_core.arguments import checked_arguments


@checked_arguments
def patch_batchnorm(module: nn.Module) -> list[RemovableHandle]:
    """Makes all batch norms in a module keep their statistics as they are while they are recomputed.

    That is every forward inside of a backward pass. They normalize as before. The statistics of a forward under
    `torch.no_grad()` does to them in training mode is not touched.

        >>> import torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> from scale_checkpoint.recompute.batch_norm import patch_batchnorm
        >>> norm = torch.nn.BatchNorm1d(3)
        >>> handles = patch_batchnorm(norm)
        >>> checkpoint(norm, torch.randn(4, 3), use_reentrant=False).sum().backward()
        >>> int(norm.num_batches_tracked)
        1

    Args:
        module: A batch norm, instance norm or `SyncBatchNorm`, or a module with some inside.

    Returns:
        Handles that undo it: `handle.remove()` of each.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    handles = []
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            guard = _StatisticsGuard()
            handles.append(part.register_forward_pre_hook(guard.before))
            handles.append(part.register_forward_hook(guard.after, always_call=True))
    return handles


class _StatisticsGuard:
    """Replaces a norm's statistics by copies while it is recomputed; hooks are copied and pickled with it."""

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[nn.Module], dict[str, Tensor | None]]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def before(self, norm: nn.Module, args: Any) -> None:
        if not (is_recomputing() or torch._C._current_graph_task_id() != -1):
            return
        self._held.append((weakref.ref(norm), dict(norm._buffers)))
        for name, buffer in norm._buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()

    def after(self, norm: nn.Module, args: Any, output: Any) -> None:
        if self._held and self._held[-1][0]() is norm:
            norm._buffers.update(self._held.pop()[1])
