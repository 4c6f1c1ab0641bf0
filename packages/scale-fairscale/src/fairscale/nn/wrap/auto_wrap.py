"""`enable_wrap`, `wrap` and `auto_wrap`: scale-fsdp's, with FairScale's wrapper and the types of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar, Self

from torch import nn

import scale_fsdp
from fairscale._warnings import warn_argument
from scale_fsdp import config_auto_wrap_policy, default_auto_wrap_policy


class AlreadyWrappedError(AssertionError, ValueError):
    """A module is wrapped already; an AssertionError as in FairScale."""


@contextmanager
def enable_wrap(auto_wrap_policy: Any = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap` and `auto_wrap` wrap, with these arguments.

    Args:
        auto_wrap_policy: For calls of `auto_wrap` that name none.
        wrapper_kwargs: `wrapper_cls`, and arguments for every wrapper.

    Raises:
        AssertionError: There is no `wrapper_cls`.
    """
    if wrapper_kwargs.pop("move_module_cuda_half", False):
        warn_argument("enable_wrap", "move_module_cuda_half", "has no effect: write module.cuda().half() before")
    assert "wrapper_cls" in wrapper_kwargs, (
        "enable_wrap: expected wrapper_cls=, as in enable_wrap(wrapper_cls=FullyShardedDataParallel)"
    )
    with scale_fsdp.enable_wrap(auto_wrap_policy, **wrapper_kwargs), ConfigAutoWrap._as(wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps one module inside of `enable_wrap`; outside of it, returns the module.

    Raises:
        AssertionError: It is wrapped already; a ValueError, too.
    """
    try:
        return scale_fsdp.wrap(module, **wrap_overrides)
    except ValueError as error:
        if "isn't wrapped" not in str(error):
            raise
        raise AlreadyWrappedError(str(error)) from error


def auto_wrap(module: nn.Module, auto_wrap_policy: Any = None, **kwargs: Any) -> nn.Module:
    """Wraps what a policy selects inside of `enable_wrap`; outside of it, returns the module."""
    return scale_fsdp.auto_wrap(module, auto_wrap_policy, **kwargs)


class ConfigAutoWrap(ContextDecorator):
    """`enable_wrap` as a class; its attributes say whether one is entered, and with what."""

    in_autowrap_context: ClassVar[bool] = False
    wrapper_cls: ClassVar[Any] = None
    kwargs: ClassVar[dict[str, Any]] = {}

    def __init__(self, auto_wrap_policy: Any = None, **kwargs: Any) -> None:
        self._given = auto_wrap_policy, kwargs
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        policy, kwargs = self._given
        self._stack.enter_context(enable_wrap(policy, **kwargs))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @classmethod
    @contextmanager
    def _as(cls, kwargs: dict[str, Any]) -> Iterator[None]:
        before = cls.in_autowrap_context, cls.wrapper_cls, cls.kwargs
        rest = {name: value for name, value in kwargs.items() if name != "wrapper_cls"}
        cls.in_autowrap_context, cls.wrapper_cls, cls.kwargs = True, kwargs["wrapper_cls"], rest
        try:
            yield
        finally:
            cls.in_autowrap_context, cls.wrapper_cls, cls.kwargs = before


__all__ = [
    "AlreadyWrappedError",
    "ConfigAutoWrap",
    "auto_wrap",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]
