"""`enable_wrap`, `wrap` and `auto_wrap`: scale-fsdp's, with FairScale's wrapper and the types of its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

from torch import nn

from fairscale._warnings import warn_argument
from scale_fsdp.wrapping import auto_wrap as scale_auto_wrap
from scale_fsdp.wrapping.auto_wrap import DEFAULT_MIN_NUM_PARAMS
from scale_fsdp.wrapping.policy import FORCE_LEAF_MODULES, Candidate, Policy


class _DefaultPolicy:
    """The type of `default_auto_wrap_policy`, whose two sets of classes may be changed in place.

    Attributes:
        EXCLUDE_WRAP_MODULES: Classes that are entered, but never wrapped.
        FORCE_LEAF_MODULES: Classes that are never entered: their children are used without being called.
    """

    EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}  # noqa: RUF012  FairScale's surface
    FORCE_LEAF_MODULES: set[type[nn.Module]] = {*FORCE_LEAF_MODULES}  # noqa: RUF012

    def __call__(
        self,
        module: nn.Module,
        recurse: bool,
        unwrapped_params: int,
        module_is_root: bool,
        min_num_params: float = DEFAULT_MIN_NUM_PARAMS,
        force_leaf_modules: Iterable[type[nn.Module]] | None = None,
        exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
        skip_params_check_for_root: bool = False,
    ) -> bool:
        leaves = self.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        excluded = self.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
        large = unwrapped_params >= min_num_params or (module_is_root and skip_params_check_for_root)
        return large and not isinstance(module, tuple(leaves if recurse else excluded))


default_auto_wrap_policy = _DefaultPolicy()
"""Modules of at least `min_num_params` elements that no wrapper inside them holds."""


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Modules that have a `wrapper_config`, whose entries are the wrapper's arguments."""
    return recurse or hasattr(module, "wrapper_config")


@dataclass(frozen=True)
class _KeywordPolicy(Policy):
    """A policy in FairScale's form as one of scale-fsdp's; what it doesn't enter, it doesn't wrap."""

    policy: Callable[..., bool]
    wraps_leaves = False

    def selects(self, candidate: Candidate) -> bool:
        return self._ask(candidate, recurse=False)

    def enters(self, candidate: Candidate) -> bool:
        return self._ask(candidate, recurse=True)

    def _ask(self, candidate: Candidate, recurse: bool) -> bool:
        return self.policy(
            module=candidate.module,
            recurse=recurse,
            unwrapped_params=candidate.num_params,
            module_is_root=candidate.is_root,
        )


def _as_policy(policy: Any) -> Any:
    return _KeywordPolicy(policy) if callable(policy) and not isinstance(policy, Policy) else policy


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
    policy = _as_policy(auto_wrap_policy or default_auto_wrap_policy)
    with scale_auto_wrap.enable_wrap(policy, **wrapper_kwargs), ConfigAutoWrap._as(wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps one module inside of `enable_wrap`; outside of it, returns the module.

    Raises:
        AssertionError: It is wrapped already; a ValueError, too.
    """
    try:
        return scale_auto_wrap.wrap(module, **wrap_overrides)
    except ValueError as error:
        if "isn't wrapped" not in str(error):
            raise
        raise AlreadyWrappedError(str(error)) from error


def auto_wrap(module: nn.Module, auto_wrap_policy: Any = None, **kwargs: Any) -> nn.Module:
    """Wraps what a policy selects inside of `enable_wrap`; outside of it, returns the module."""
    return scale_auto_wrap.auto_wrap(module, _as_policy(auto_wrap_policy), **kwargs)


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
        options = {name: value for name, value in kwargs.items() if name != "wrapper_cls"}
        cls.in_autowrap_context, cls.wrapper_cls, cls.kwargs = True, kwargs["wrapper_cls"], options
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
