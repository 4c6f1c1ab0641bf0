"""The squared norms of this rank's own gradients before they are averaged, one backward pass after another.

A parameter that is whole here has a hook, which gets its gradient ahead of what reduces it. One that is sharded has
none; its owner reports its gradient (`scale_core.autograd_hooks.register_local_grad_hook`). At most short gradients are
copied, and nothing waits for the device.

A pass is a sample, and gradients are averaged when it ends; unless a pipeline runs the passes, which says what a sample
is (`scale_core.microbatch_grads`). One step of a pipeline then counts as one pass that brings several samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scale_adascale.squared_norms import NormAccumulator
from scale_core import compat
from scale_core.autograd_hooks import (
    is_nested,
    lacks_autograd_hooks,
    register_local_grad_hook,
    register_post_backward,
)
from scale_core.microbatch_grads import MicrobatchStep, StepObserver, StepSignature, on_microbatch_steps
from scale_core.shard import title_of

_OURS = ("scale_", "torch.")  # Hooks of these packages read gradients, and leave them as they are.


def has_later_hook(param: Tensor, handle: RemovableHandle) -> bool:
    """Whether a foreign hook is called after the one of this handle."""
    hooks = getattr(param, "_backward_hooks", None) or {}
    for key, hook in reversed(hooks.items()) if len(hooks) > 1 else ():
        if key == handle.id:
            return False
        if _is_foreign(hook):
            return True
    return False


def has_post_accumulate_hook(param: Tensor) -> bool:
    """Whether a foreign hook is called once a gradient was added to `param.grad`."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return hooks is not None and any(map(_is_foreign, hooks.values()))


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not str(getattr(hook, "__module__", None)).startswith(_OURS)


class GradHooks:
    """Calls back with each local gradient of indexed parameters, and with each step of a pipeline that begins.

    Both callbacks are methods, held weakly: autograd holds hooks where no garbage collector sees them.
    """

    def __init__(
        self, on_grad: Callable[[int, Tensor], None], on_step: Callable[[MicrobatchStep], StepObserver | None]
    ) -> None:
        self._on_grad, self._on_step = weakref.WeakMethod(on_grad), weakref.WeakMethod(on_step)
        self._indices: dict[int, int] = {}  # by id; the owner holds the parameters
        self._params: list[Tensor] = []
        self._handles: dict[int, RemovableHandle] = {}  # of hooks on parameters, by index
        self._global_handles: list[RemovableHandle] = []

    @property
    def is_active(self) -> bool:
        """Whether it is registered."""
        return bool(self._global_handles)

    @property
    def can_get_grads(self) -> bool:
        """Whether any parameter can have a gradient that it is called with."""
        return bool(self._handles) or any(lacks_autograd_hooks(p) for p in self._params if p.requires_grad)

    @property
    def num_params(self) -> int:
        """How many parameters there are."""
        return len(self._params)

    def grads_of(self, params: Iterable[Tensor]) -> list[Tensor | None]:
        """The gradients of these parameters; None of one that has no hook."""
        return [param.grad if self._indices.get(id(param)) in self._handles else None for param in params]

    def is_autograd_grad(self, index: int) -> bool:
        """Whether the pass that runs now is torch.autograd.grad, which adds to no gradient of this parameter."""
        return index in self._handles and compat.is_autograd_grad(self._params[index])

    def indices_of(self, params: Iterable[Tensor]) -> frozenset[int]:
        """The indices of those of these parameters that have one."""
        return frozenset(self._indices[id(param)] for param in params if id(param) in self._indices)

    def title_of(self, index: int) -> str:
        """What errors call a parameter."""
        return title_of(self._params[index])

    def register(self, params: Iterable[Tensor]) -> None:
        """Hooks those of these parameters that can have a gradient, by their indices in this order.

        A hook that is followed by a foreign one is put last again: what other hooks change is what is averaged.
        """
        before, self._params = self._params, list(params)
        if any(old is not new for old, new in zip(before, self._params, strict=False)):
            for handle in self._handles.values():  # A parameter was replaced.
                handle.remove()
            self._indices, self._handles = {}, {}
        for index, param in enumerate(self._params):
            self._indices[id(param)] = index
            if index in self._handles and has_later_hook(param, self._handles[index]):
                self._handles.pop(index).remove()
            if param.requires_grad and index not in self._handles and not lacks_autograd_hooks(param):
                self._handles[index] = param.register_hook(_grad_hook(self._on_grad, index))
        if not self._global_handles:
            self._global_handles = [
                register_local_grad_hook(_called_weakly(weakref.WeakMethod(self.on_reported_grads))),
                on_microbatch_steps(_called_weakly(self._on_step)),
            ]
            for handle in self._global_handles:
                weakref.finalize(self, handle.remove)

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in (*self._handles.values(), *self._global_handles):
            handle.remove()
        self._handles, self._global_handles = {}, []

    def check(self) -> None:
        """Raises RuntimeError if hooks of others change gradients later, or an unfrozen parameter has no hook yet."""
        for index, param in enumerate(self._params):
            handle = self._handles.get(index)
            if handle is not None and has_later_hook(param, handle):
                raise RuntimeError(
                    f"{title_of(param)} has a hook that was registered after AdaScale's, and may change the gradient "
                    "that was measured. Register it before AdaScale(...) is built, or call optimizer.zero_grad() "
                    "after registering it, so that AdaScale measures what it returns"
                )
            if handle is not None and has_post_accumulate_hook(param):
                raise RuntimeError(
                    f"{title_of(param)} has a hook of register_post_accumulate_grad_hook(), which may change gradients "
                    "after AdaScale has measured them. Change them by param.register_hook(hook) before AdaScale(...) "
                    "is built, or between the last backward pass and the step; or call optimizer.unhook()"
                )
            if handle is None and param.requires_grad and not lacks_autograd_hooks(param):
                raise RuntimeError(
                    f"{title_of(param)} was unfrozen after AdaScale had hooked the parameters. Call "
                    "optimizer.zero_grad(), not model.zero_grad(), before the next backward pass"
                )

    def check_reduced(self, holders: Sequence[Tensor], measured: Iterable[int]) -> None:
        """Raises RuntimeError if a sharded parameter whose gradient was measured has no averaged one in its holder."""
        for index in measured:
            holder = holders[index]
            if index not in self._handles and holder.numel() and holder.grad is None:
                raise RuntimeError(
                    f"{title_of(holder)} has no averaged gradient at the end of the backward pass that AdaScale has "
                    "measured. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), since a reentrant "
                    "checkpoint runs passes of its own; and optimizer.unhook() where backward consumes gradients"
                )

    def on_reported_grads(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Called with gradients of whatever sharded parameters."""
        on_grad = self._on_grad()
        for param, grad in zip(params, grads, strict=True):
            index = self._indices.get(id(param))
            if on_grad is not None and index is not None and index not in self._handles:
                on_grad(index, grad)


def _grad_hook(held: weakref.WeakMethod[Callable[[int, Tensor], None]], index: int) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        on_grad = held()
        if on_grad is not None:
            on_grad(index, grad.detach() if grad.requires_grad else grad)  # With `create_graph=True`.

    return hook


def _called_weakly(held: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        method = held()
        return None if method is None else method(*args)

    return call


class LocalGradNorms:
    """Adds up the squares of the gradients that this rank computes, per parameter.

    Its callbacks are methods, held weakly. `on_begin` is called with the first gradient of a pass, and may raise;
    `on_end` when a pass has ended and gradients have been averaged, with the weight of each of its samples in the mean:
    it calls `add_pass`, unless they are not to count. `terms` returns what ranks of a pipeline must have alike.
    """

    def __init__(
        self,
        on_begin: Callable[[], None],
        on_end: Callable[[Sequence[float]], None],
        terms: Callable[[], StepSignature],
    ) -> None:
        self._on_begin, self._on_end = weakref.WeakMethod(on_begin), weakref.WeakMethod(on_end)
        self._terms = weakref.WeakMethod(terms)
        self.squared_norms: dict[torch.device, Tensor] = {}  # of the step: [k], fp64, by device
        self.failed = False  # The last pass has raised, and what it had brought was dropped.
        self.left_partial_grads = False  # It had added to some gradients.
        self.grads_restored = False  # It was a pipeline's, which has put gradients back, in other tensors.
        self.counted_elsewhere: frozenset[int] = frozenset()  # indices of what other ranks of the pipeline count
        self.hooks = GradHooks(self._on_grad, self._begin_step)
        self._of_pass: dict[torch.device, NormAccumulator] = {}
        self._seen: set[tuple[int, int]] | None = None  # samples and indices, in the pass that runs now
        self.measured: set[int] = set()  # indices of parameters that had a gradient in the last pass
        self._step: MicrobatchStep | None = None  # the pipeline's step that runs now
        self._in_parts: frozenset[int] = frozenset()  # indices of parameters whose gradients the step reports

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has brought gradients, and not ended yet."""
        return self._seen is not None

    @property
    def in_microbatch_step(self) -> bool:
        """Whether the pass that runs now is a pipeline's step."""
        return self._step is not None

    def register_hooks(self, params: Iterable[Tensor]) -> None:
        """Hooks these parameters, by their indices in this order."""
        before = self.hooks.num_params
        self.hooks.register(params)
        if self.hooks.num_params != before:
            self.squared_norms, self._of_pass = {}, {}

    def remove_hooks(self) -> None:
        """Stops to measure."""
        self.hooks.remove()
        self.reset()

    def reset(self) -> None:
        """Drops what was measured so far."""
        self._seen = self._step = None
        self.failed = self.left_partial_grads = self.grads_restored = False
        self.squared_norms = {}

    def _on_grad(self, index: int, grad: Tensor) -> None:
        sample = 0
        if self._step is not None:
            if index in self._in_parts:
                return
            if self._step.sample is None:
                raise RuntimeError(
                    f"{self.hooks.title_of(index)} has got a gradient between the backward passes of a pipeline's "
                    "step, which is of no micro-batch, as by backward() in a forward. Leave it out, or call "
                    "optimizer.unhook()"
                )
            sample = self._step.sample
        elif self._seen is None:
            if self.hooks.is_autograd_grad(index):
                return
            if is_nested():
                raise RuntimeError(
                    f"the first gradient of a backward pass, of {self.hooks.title_of(index)}, comes from inside of a "
                    "reentrant checkpoint, whose backward pass of its own ends before gradients are averaged. Call "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                    "scale_checkpoint.checkpoint_wrapper(module)"
                )
            self._begin_pass()
            register_post_backward(self._end_pass, self._fail_pass)
        assert self._seen is not None
        if (sample, index) in self._seen:
            raise RuntimeError(
                f"{self.hooks.title_of(index)} has two gradients in one backward pass, as in a reentrant checkpoint "
                "that contains it twice. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "scale_checkpoint.checkpoint_wrapper(module)"
            )
        self._seen.add((sample, index))
        self._count(index, grad)

    def _count(self, index: int, grad: Tensor) -> None:
        """Adds the square of a gradient of the pass that runs now."""
        if grad.device not in self._of_pass:
            self._of_pass[grad.device] = NormAccumulator(self.hooks.num_params, grad.device)
        if self._step is None:
            self._of_pass[grad.device].set(index, grad)
        else:
            self._of_pass[grad.device].add(index, grad)

    def _begin_pass(self) -> None:
        try:
            self.hooks.check()
            on_begin = self._on_begin()
            if on_begin is not None:
                on_begin()
        except RuntimeError:
            self.failed = True  # So that gradients may be cleared, in the middle of a step.
            raise
        self.failed = self.left_partial_grads = self.grads_restored = False
        self._seen, self.counted_elsewhere = set(), frozenset()
        self.drop_pass()

    def _end_pass(self) -> None:
        # What averages gradients has queued its own end by now, but may have done so after this one.
        register_post_backward(self._finish_pass, self._fail_pass)

    def drop_pass(self) -> None:
        """Drops the squares of the pass."""
        for accumulator in self._of_pass.values():
            accumulator.clear()

    def add_pass(self) -> None:
        """Adds the squares of the pass that has ended to `squared_norms`."""
        for device, accumulator in self._of_pass.items():
            squares = accumulator.squares()
            known = self.squared_norms.get(device)
            self.squared_norms[device] = squares if known is None else known + squares

    def _finish_pass(self, weights: Sequence[float] = (1.0,)) -> None:
        self.measured = {index for _, index in self._seen or ()}
        self._seen = self._step = None
        on_end = self._on_end()
        if on_end is not None:
            on_end(weights)

    def _fail_pass(self) -> None:
        self._seen = self._step = None
        self.failed = self.left_partial_grads = True

    # The step of a pipeline.

    def _begin_step(self, step: MicrobatchStep) -> StepObserver | None:
        """Listens to a step that has any of the parameters, with a gradient or without."""
        if not self.hooks.indices_of(step.params):
            return None
        self._step = step
        try:
            self._begin_pass()
        except RuntimeError:
            self._step, self.grads_restored = None, True
            raise
        self._step, self._in_parts = step, self.hooks.indices_of(step.in_parts)
        self.counted_elsewhere = self.hooks.indices_of(step.counted_elsewhere)
        terms = self._terms()
        return StepObserver(self._finish_pass, self._fail_step, self._count_param, None if terms is None else terms())

    def _fail_step(self) -> None:
        self._seen = self._step = None
        self.failed = self.grads_restored = True

    def _count_param(self, param: Tensor, grad: Tensor) -> None:
        for index in self.hooks.indices_of([param]):
            self._count(index, grad)
