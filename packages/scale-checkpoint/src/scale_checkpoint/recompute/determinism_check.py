"""A recomputation that differs from the first forward: which module, which operator, which tensor.

Autograd compares at most shapes, at the end, by the number of the saved tensor. Here each operator's result is compared
as soon as it is there, with the name of the module in which it ran. It costs time, so it is done on demand.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scale_checkpoint.recompute.policy import WITHOUT_VALUES
from scale_checkpoint.state import is_aside, recomputations

_aten = torch.ops.aten
# Not of the module's own: autograd's, and casts that autocast caches and so makes at one time and not at another.
_LEFT_OUT = frozenset((_aten.detach.default, _aten._to_copy.default, _aten.alias.default, _aten.lift_fresh.default))
_MEND = (
    "what a checkpointed module computes may depend on inputs, parameters, buffers and random numbers alone, not on "
    "time, counters or caches; leave the module out of the checkpointed ones if it must"
)


class RecomputationError(RuntimeError):
    """A recomputation has computed something else than the first forward."""


@contextmanager
def check_recomputation(model: nn.Module, values: bool = False) -> Iterator[None]:
    """Inside, each recomputation of a module of `model` is compared with its first forward, operator by operator.

        >>> import torch
        >>> from scale_checkpoint import check_recomputation, checkpoint_wrapper
        >>> model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(4, 4)), torch.nn.Tanh())
        >>> with check_recomputation(model, values=True):
        ...     model(torch.randn(2, 4)).sum().backward()

    Both passes have to be inside. It finds what modules that are recomputed by this package do. Recomputations run to
    their end, where they otherwise stop at the last tensor that the backward needs.

    Args:
        model: Gives the modules their names.
        values: Compare values as well, by a checksum of each result, and not shapes and dtypes alone.

    Raises:
        RecomputationError: From the backward pass: names the module, the operator and the tensor that differ first.
        RuntimeError: Inside of another `check_recomputation`.
    """
    global _active
    if _active is not None:
        raise RuntimeError("check_recomputation is active already: enter it once, around forward and backward")
    check = _active = Check(model, values)
    try:
        with check.following():
            yield
    finally:
        _active = None


class _Step(NamedTuple):
    """One operator that has run.

    Attributes:
        module: The qualified name of the module in which it ran.
        operator: Its name.
        results: Of each tensor that it returned: shape, dtype, device, and a checksum where values are compared.
    """

    module: str
    operator: str
    results: tuple[tuple[tuple[int, ...], torch.dtype, torch.device, int | None], ...]


class Check:
    """What is compared, and in which module the model is.

    Args:
        model: Gives the names.
        values: Compare values.
    """

    def __init__(self, model: nn.Module, values: bool) -> None:
        self.values = values
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[str] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, it knows which module runs."""
        before = nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: self._inside.append(self.name_of(module))
        )
        after = nn.modules.module.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def name_of(self, module: nn.Module) -> str:
        """Returns a module's qualified name; what it calls itself, as a rule its class, if the model has no name."""
        return self._names.get(id(module)) or str(module._get_name())

    def step(self, operator: Any, result: Any, module: nn.Module) -> _Step:
        """Describes what an operator of a checkpointed module has returned."""
        found = [each for each in _parts(result) if isinstance(each, Tensor)]
        results = tuple(
            (tuple(t.shape), t.dtype, t.device, _checksum(t) if self.values and _has_values(t, place) else None)
            for place, t in enumerate(found)
        )
        return _Step(self._inside[-1] if self._inside else self.name_of(module), str(operator), results)

    def _leave(self) -> None:
        if self._inside:
            self._inside.pop()


_active: Check | None = None


def active_check() -> Check | None:
    """Returns the check that is wanted now, if one is."""
    return _active


class Comparing(TorchDispatchMode):
    """Around a forward it records the operators, around the recomputation it compares them.

    Args:
        check: What is compared.
        module: The module that is checkpointed.
        first: What the forward has recorded; None is the forward itself.
    """

    def __init__(self, check: Check, module: nn.Module, first: list[_Step] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check, self._module, self._first = check, module, first
        self._recomputations = recomputations()
        self.steps: list[_Step] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`, and compares its result."""
        result = func(*args, **({} if kwargs is None else kwargs))
        if self._check.values and _name(func) in WITHOUT_VALUES:
            _clear(result)
        # A backward inside of a forward computes what it needs of that again, which is no part of either.
        if func not in _LEFT_OUT and not is_aside() and recomputations() == self._recomputations:
            step = self._check.step(func, result, self._module)
            if self._first is not None:
                self._compare(step, self._first)
            self.steps.append(step)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends; a recomputation that has come to its end has run all that the forward has."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        number = len(self.steps)
        if kind is None and self._first is not None and number < len(self._first):
            then = self._first[number]
            raise RecomputationError(
                f"{self._where()}: operator {number}, {then.operator} in '{then.module}', ran in the forward, and does "
                f"not now; {_MEND}"
            )

    def _where(self) -> str:
        return f"recomputing '{self._check.name_of(self._module)}'"

    def _compare(self, step: _Step, first: list[_Step]) -> None:
        number = len(self.steps)
        if number >= len(first):
            raise RecomputationError(
                f"{self._where()}: operator {number}, {step.operator} in '{step.module}', did not run in the forward; "
                f"{_MEND}"
            )
        then = first[number]
        if then.operator != step.operator:
            raise RecomputationError(
                f"{self._where()}: operator {number} was {then.operator} in '{then.module}' in the forward, and is "
                f"{step.operator} in '{step.module}' now; {_MEND}"
            )
        for place, (old, new) in enumerate(zip(then.results, step.results, strict=True)):
            if old != new:
                what = _describe(old) if old[:3] != new[:3] else f"{_describe(old)} of other values"
                raise RecomputationError(
                    f"{self._where()}: tensor {place} of operator {number}, {step.operator} in '{step.module}', was "
                    f"{what} in the forward, and is {_describe(new)} now; {_MEND}"
                )


def _describe(result: tuple[Any, ...]) -> str:
    shape, dtype, device, _ = result
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _name(operator: Any) -> str:
    return str(operator).split(".")[1]


def _parts(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


def _has_values(tensor: Tensor, place: int) -> bool:
    """Whether a result is computed; of several, integers may be scratch that a kernel keeps for its backward."""
    return place == 0 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool


def _clear(result: Any) -> None:
    """Fills memory that an operator has left as it was, so that what is read of it before it is written is the same."""
    with torch.no_grad(), _disable_current_modes():
        for tensor in _parts(result):
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
