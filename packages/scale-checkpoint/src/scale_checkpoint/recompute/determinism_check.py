"""Determinism check: compares a recomputation with the first forward, operator by operator.

Autograd compares at most shapes, at the end, by the number of the saved tensor. Here each operator's result is compared
as soon as it is there, with the name of the module in which it ran. It costs time, so it is done on demand.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scale_checkpoint.recompute.policy import UNINITIALIZED_RESULTS, operator_name, results_of
from scale_checkpoint.state import STATE
from scale_core.arguments import checked_arguments
from scale_core.errors import ScaleError

_aten = torch.ops.aten
# Autograd's own, and casts that autocast caches, so that they run at one time and not at another.
_IGNORED = frozenset((_aten.detach.default, _aten._to_copy.default, _aten.alias.default, _aten.lift_fresh.default))
_FIX = (
    "what a checkpointed module computes may depend on inputs, parameters, buffers and random numbers alone, not on "
    "time, counters or caches; leave the module out of the checkpointed ones if it must"
)


class RecomputationError(ScaleError):
    """A recomputation differs from the first forward.

    See also: [what to do about a RecomputationError](../guides/troubleshooting.md#recomputationerror).
    """


@checked_arguments
@contextmanager
def check_recomputation(model: nn.Module, values: bool = False) -> Iterator[None]:
    """Inside, each recomputation of a module of `model` is compared with its first forward, operator by operator.

        >>> import torch
        >>> from scale_checkpoint import check_recomputation, checkpoint_wrapper
        >>> model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(4, 4)), torch.nn.Tanh())
        >>> with check_recomputation(model, values=True):
        ...     model(torch.randn(2, 4)).sum().backward()

    Both passes have to be inside. It sees the modules that this package recomputes. Recomputations run to
    their end, where they otherwise stop at the last tensor that the backward needs.

    Args:
        model: Gives the modules their names.
        values: Also compare values, by a checksum of each result, not only shapes and dtypes.

    Raises:
        RecomputationError: From the backward pass: names the module, the operator and the tensor that differ first.
        RuntimeError: It is nested in a `check_recomputation`.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    global active
    if active is not None:
        raise RuntimeError("check_recomputation is active already: enter it once, around forward and backward")
    check = active = DeterminismCheck(model, values)
    try:
        with check.modules_followed():
            yield
    finally:
        active = None


class _Step(NamedTuple):
    """One operator that has run."""

    module: str  # the qualified name of the module in which it ran
    operator: str  # its name
    # Of each tensor that it returned: shape, dtype, device, and a checksum where values are compared.
    results: tuple[tuple[tuple[int, ...], torch.dtype, torch.device, int | None], ...]


class DeterminismCheck:
    """The results to compare, and the module of the model that runs."""

    def __init__(self, model: nn.Module, values: bool) -> None:
        self.values, self._model = values, model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[str] = []

    @contextmanager
    def modules_followed(self) -> Iterator[None]:
        """Hooks the modules while it lasts."""
        with ExitStack() as stack:
            for module in self._model.modules():
                enter = module.register_forward_pre_hook(self._enter, prepend=True)
                leave = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def name_of(self, module: nn.Module) -> str:
        """Returns a module's qualified name, or its class where it is none of the model's."""
        return self._names.get(id(module)) or str(module._get_name())

    def step(self, operator: Any, result: Any, module: nn.Module) -> _Step:
        """Describes the results of an operator of a checkpointed module."""
        tensors = [value for value in results_of(result) if isinstance(value, Tensor)]
        results = tuple(
            (tuple(t.shape), t.dtype, t.device, _checksum(t) if self.values and _has_values(t, index) else None)
            for index, t in enumerate(tensors)
        )
        return _Step(self._inside[-1] if self._inside else self.name_of(module), str(operator), results)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self.name_of(module))

    def _leave(self, *_: Any) -> None:
        if self._inside:
            self._inside.pop()


active: DeterminismCheck | None = None
"""Read by each checkpointed forward, without a call."""


class CompareOperators(TorchDispatchMode):
    """Records the operators of a forward; around the recomputation, given `first`, compares them."""

    def __init__(self, check: DeterminismCheck, module: nn.Module, first: list[_Step] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check, self._module, self._first = check, module, first
        self._depth = STATE.recompute_depth
        self.steps: list[_Step] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **({} if kwargs is None else kwargs))
        if self._check.values and operator_name(func) in UNINITIALIZED_RESULTS:
            _clear(result)
        # A backward inside of a forward computes parts of that again, which is no part of either.
        if func not in _IGNORED and not STATE.internal and STATE.recompute_depth == self._depth:
            step = self._check.step(func, result, self._module)
            if self._first is not None:
                self._compare(step, self._first)
            self.steps.append(step)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A recomputation that has come to its end has run all that the forward has."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        number = len(self.steps)
        if kind is None and self._first is not None and number < len(self._first):
            then = self._first[number]
            raise self._error(f"operator {number}, {then.operator} in '{then.module}', ran in the forward, and not now")

    def _error(self, difference: str) -> RecomputationError:
        return RecomputationError(f"recomputing '{self._check.name_of(self._module)}': {difference}; {_FIX}")

    def _compare(self, step: _Step, first: list[_Step]) -> None:
        number = len(self.steps)
        if number >= len(first):
            raise self._error(f"operator {number}, {step.operator} in '{step.module}', did not run in the forward")
        then = first[number]
        if then.operator != step.operator:
            raise self._error(
                f"operator {number} was {then.operator} in '{then.module}' in the forward, and is {step.operator} in "
                f"'{step.module}' now"
            )
        for index, (old, new) in enumerate(zip(then.results, step.results, strict=True)):
            if old != new:
                description = _describe(old) if old[:3] != new[:3] else f"{_describe(old)} of other values"
                raise self._error(
                    f"tensor {index} of operator {number}, {step.operator} in '{step.module}', was {description} in "
                    f"the forward, and is {_describe(new)} now"
                )


def _describe(result: tuple[Any, ...]) -> str:
    shape, dtype, device, _ = result
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _has_values(tensor: Tensor, place: int) -> bool:
    """Whether a result is computed; of several, integers may be scratch that a kernel keeps for its backward."""
    return place == 0 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool


def _clear(result: Any) -> None:
    """Zeroes uninitialized memory, so that reads before a write are the same."""
    with torch.no_grad(), _disable_current_modes():
        for tensor in results_of(result):
            if _is_plain(tensor):
                tensor.zero_()


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_meta and value.layout is torch.strided


def _checksum(tensor: Tensor) -> int | None:
    if not _is_plain(tensor):
        return None
    with torch.no_grad(), _disable_current_modes():
        host = tensor.detach().resolve_conj().contiguous().cpu()
        num_bytes = host.numel() * host.itemsize
        return zlib.crc32((ctypes.c_ubyte * num_bytes).from_address(host.data_ptr())) if num_bytes else 0
