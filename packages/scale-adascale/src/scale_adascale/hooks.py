"""Hooks beside those that measure: whether somebody changes a gradient after it was seen, and which pass it is of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

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


def is_nested() -> bool:
    """Whether the backward pass that runs now was begun by the backward of an autograd function, in another pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.autograd.function" and frame.f_code.co_name == "apply":
            return True
        frame = frame.f_back
    return False
