"""Hooks beside those that measure: whether somebody changes a gradient after it was seen, and which pass it is of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scale_core.shard import shard_of

_OURS = ("scale_", "torch.")  # Hooks of these packages look at gradients, and leave them as they are.


def is_followed(param: Tensor, handle: RemovableHandle) -> bool:
    """Whether a hook of somebody else is called after the one of this handle."""
    hooks = getattr(param, "_backward_hooks", None) or {}
    for key in reversed(hooks):
        if key == handle.id:
            return False
        if _is_foreign(hooks[key]):
            return True
    return False


def is_changed_later(param: Tensor) -> bool:
    """Whether a hook of somebody else is called once a gradient was added to `param.grad`."""
    return any(map(_is_foreign, (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()))


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not str(getattr(hook, "__module__", None)).startswith(_OURS)


def title(param: Tensor) -> str:
    """What errors call a parameter."""
    shard = shard_of(param)
    return f"a parameter of shape {tuple(param.shape)}" if shard is None else shard.title


def is_nested() -> bool:
    """Whether the backward pass that runs now was begun by the backward of an autograd function, in another pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.autograd.function" and frame.f_code.co_name == "apply":
            return True
        frame = frame.f_back
    return False


def is_only_asked_for(param: Tensor) -> bool:
    """Whether the pass that runs now is one of torch.autograd.grad for this leaf, which adds to no gradient."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError as error:  # Which nodes run is a question that torch does not answer there.
        return "autograd.grad" in str(error)
    return False
