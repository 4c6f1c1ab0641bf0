"""The squared norms of this rank's own gradients before they are averaged, one backward pass after another.

A full parameter has a hook, which gets its gradient before it is reduced. One that is sharded has
none; its owner reports its gradient (`scale_core.hooks.gradients.register_local_grad_hook`). Where either shows a
gradient of the samples of several ranks, as of experts that ranks divide, it tells that there is one, and what is
measured is reported by source rank (`scale_core.hooks.source_grads`).

A pass is a sample, and gradients are averaged when it ends; unless a pipeline runs the passes, which defines what a
sample is (`scale_core.hooks.microbatch_grads`). One step of a pipeline then counts as one pass that brings several
samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scale_adascale.squared_norms import NormAccumulator
from scale_core import compat
from scale_core.comm import context_parallel_group
from scale_core.hooks.autograd import is_nested, register_post_backward, weak_hook
from scale_core.hooks.gradients import lacks_autograd_hooks, register_local_grad_hook
from scale_core.hooks.microbatch_grads import MicrobatchStep, StepObserver, StepSignature, on_microbatch_steps
from scale_core.hooks.source_grads import register_source_grad_hook, source_group
from scale_core.optim.step_checks import sharded_param_of
from scale_core.shard import as_local, on_local_tensors, title_of

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


class LocalGradNorms:
    """Adds up the squares of the gradients that this rank computes, per indexed parameter.

    Its callbacks are methods, held weakly. `on_begin` is called with the first gradient of a pass, and may raise;
    `on_end` when a pass has ended and gradients have been averaged, with the weight of each of its samples in the mean:
    it calls `add_pass`, unless they are not to count. `terms` returns the values that must be equal on the ranks of a
    pipeline.
    """

    def __init__(
        self,
        on_begin: Callable[[], None],
        on_end: Callable[[Sequence[float]], None],
        terms: Callable[[], StepSignature],
    ) -> None:
        self._on_begin, self._on_end, self._terms = weak_hook(on_begin), weak_hook(on_end), weak_hook(terms)
        self.squared_norms: dict[torch.device, Tensor] = {}  # of the step: [k], fp64, by device
        self.in_backward = False  # A backward pass has brought gradients, and not ended yet.
        self.failed = False  # The last pass has raised, and its gradients were dropped.
        self.left_partial_grads = False  # It had added to some gradients.
        self.grads_restored = False  # It was a pipeline's, which has put gradients back, in other tensors.
        self.counted_elsewhere: frozenset[int] = frozenset()  # indices counted by other ranks of the pipeline
        self.step: MicrobatchStep | None = None  # the pipeline's step that runs now
        self._params: list[Tensor] = []
        self._indices: dict[int, int] = {}  # by id
        self._handles: dict[int, RemovableHandle] = {}  # of hooks on parameters, by index
        self._global_handles: list[RemovableHandle] = []
        self._source_handle: RemovableHandle | None = None
        self._of_pass: dict[torch.device, NormAccumulator] = {}
        self._seen: set[tuple[int, int]] = set()  # samples and indices of the gradients of the last pass
        self._by_source: set[int] = set()  # indices of gradients reported by source rank
        self._sources: set[tuple[int, int, int]] = set()  # samples, indices and source ranks that were in the last pass
        self._task = 0  # autograd's number of the pass that runs, as a rule; -1 of a pipeline's step
        self._last_before = context_parallel_group.last_backward  # when the pass began
        self._in_parts: frozenset[int] = frozenset()  # indices of parameters whose gradients the step reports

    # Hooks.

    @property
    def can_get_grads(self) -> bool:
        """Whether any parameter can have a gradient that is measured."""
        return bool(self._handles) or any(lacks_autograd_hooks(p) for p in self._params if p.requires_grad)

    def register_hooks(self, params: Iterable[Tensor]) -> None:
        """Hooks the parameters that can have a gradient, by their indices in this order.

        A hook that is followed by a foreign one is put last again: changes by other hooks are averaged.
        """
        before, self._params = self._params, list(params)
        if any(old is not new for old, new in zip(before, self._params, strict=False)):
            for handle in self._handles.values():  # A parameter was replaced.
                handle.remove()
            self._indices, self._handles, self._by_source = {}, {}, set()
        if len(before) != len(self._params):
            self.squared_norms, self._of_pass = {}, {}
        for index, param in enumerate(self._params):
            # A hook that averages and was registered after this one runs after it, and does not change its input.
            # So the source is read where the parameter is new, or its hook is put last.
            reads_source = id(param) not in self._indices
            self._indices[id(param)] = index
            if index in self._handles and has_later_hook(param, self._handles[index]):
                self._handles.pop(index).remove()
            if param.requires_grad and index not in self._handles and not lacks_autograd_hooks(param):
                self._handles[index] = param.register_hook(weak_hook(self._on_grad, index))
                reads_source = True
            if reads_source and source_group(param) is not None:
                self._by_source.add(index)
        if self._by_source and self._source_handle is None:
            self._source_handle = register_source_grad_hook(weak_hook(self._on_source_grad))
            weakref.finalize(self, self._source_handle.remove)
        if not self._global_handles:
            self._global_handles = [
                register_local_grad_hook(weak_hook(self._on_reported_grads)),
                on_microbatch_steps(weak_hook(self._begin_step)),
            ]
            for handle in self._global_handles:
                weakref.finalize(self, handle.remove)

    def remove_hooks(self) -> None:
        for handle in (*self._handles.values(), *self._global_handles):
            handle.remove()
        if self._source_handle is not None:
            self._source_handle.remove()
        self._handles, self._global_handles, self._source_handle = {}, [], None
        self.reset()

    def check_hooks(self) -> None:
        """Raises RuntimeError if hooks of others change gradients later, or an unfrozen parameter has no hook yet."""
        for index, param in enumerate(self._params):
            handle = self._handles.get(index)
            if index in self._by_source and any(map(_is_foreign, (param._backward_hooks or {}).values())):
                raise RuntimeError(
                    f"{title_of(param)} has a hook, and its gradient is measured before hooks are called, of each rank "
                    "by itself: what the hook changes would not be measured. Change gradients between the last "
                    "backward pass and the step, or call optimizer.unhook()"
                )
            if handle is not None and has_later_hook(param, handle):
                raise RuntimeError(
                    f"{title_of(param)} has a hook that was registered after AdaScale's, and may change the gradient "
                    "that was measured. Register it before AdaScale(...) is built, or call optimizer.zero_grad() "
                    "after registering it, so that AdaScale measures what it returns"
                )
            is_measured = handle is not None or (param.requires_grad and lacks_autograd_hooks(param))
            if is_measured and has_post_accumulate_hook(param):
                raise RuntimeError(
                    f"{title_of(param)} has a hook of register_post_accumulate_grad_hook(), which may change gradients "
                    "after AdaScale has measured them. Change them "
                    + ("by param.register_hook(hook) before AdaScale(...) is built, or " if handle is not None else "")
                    + "between the last backward pass and the step; or call optimizer.unhook()"
                )
            if handle is None and param.requires_grad and not lacks_autograd_hooks(param):
                raise RuntimeError(
                    f"{title_of(param)} was unfrozen after AdaScale had hooked the parameters. Call "
                    "optimizer.zero_grad(), not model.zero_grad(), before the next backward pass"
                )

    def check_reduced(self, holders: Sequence[Tensor]) -> None:
        """Raises RuntimeError if a sharded parameter whose gradient was measured has no averaged one in its holder."""
        for index in {index for _, index in self._seen} - self._handles.keys():
            holder = holders[index]
            if holder.numel() and holder.grad is None:
                raise RuntimeError(
                    f"{title_of(holder)} has no averaged gradient at the end of the backward pass that AdaScale has "
                    "measured. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), since a reentrant "
                    "checkpoint runs passes of its own; and optimizer.unhook() where backward consumes gradients"
                )

    def grads_of(self, params: Iterable[Tensor]) -> list[Tensor | None]:
        """The gradients of these parameters; None of one that has no hook."""
        return [param.grad if self._indices.get(id(param)) in self._handles else None for param in params]

    def indices_of(self, params: Iterable[Tensor]) -> frozenset[int]:
        """The indices of these parameters, where they have one."""
        return frozenset(self._indices[id(param)] for param in params if id(param) in self._indices)

    # A backward pass.

    def reset(self) -> None:
        """Drops the measurements so far."""
        self.in_backward, self.step = False, None
        self.failed = self.left_partial_grads = self.grads_restored = False
        self.squared_norms = {}

    @on_local_tensors
    def _on_reported_grads(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Called with gradients of whatever sharded parameters."""
        for param, grad in zip(params, grads, strict=True):
            index = self._indices.get(id(param))
            if index is not None and index not in self._handles:
                self._on_grad(index, grad)

    @on_local_tensors
    def _on_source_grad(self, param: Tensor, grad: Tensor, source: int) -> None:
        """Called with the gradient of one rank's samples, ahead of the gradient of all of them."""
        index = self._indices.get(id(sharded_param_of(param)))
        if index is None or index not in self._by_source:
            return
        sample = self._begin_gradient(index)
        if sample is None:
            return
        if (sample, index, source) in self._sources:
            raise RuntimeError(
                f"{title_of(self._params[index])} has two gradients of the samples of one rank in one backward pass, "
                "which come one by one, and AdaScale can't measure their sum. Call the model once for each "
                "backward(), with one batch, and each layer of experts once; or call optimizer.unhook()"
            )
        self._sources.add((sample, index, source))
        self._accumulator_on(grad.device).add(index, grad.detach())

    def _on_grad(self, index: int, grad: Tensor) -> None:
        sample = self._begin_gradient(index)
        if sample is None:
            return
        if (sample, index) in self._seen:
            raise RuntimeError(
                f"{title_of(self._params[index])} has two gradients in one backward pass, as in a reentrant checkpoint "
                "that contains it twice. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "scale_checkpoint.checkpoint_wrapper(module)"
            )
        self._seen.add((sample, index))
        if index not in self._by_source:
            with as_local():
                self._count(index, grad.detach() if grad.requires_grad else grad)  # With `create_graph=True` it does.

    def _begin_gradient(self, index: int) -> int | None:
        """Begins the pass with its first gradient; returns the number of its sample, None if it is not measured."""
        sample = 0
        if self.step is not None:
            if index in self._in_parts:
                return None
            if self.step.sample is None:
                raise RuntimeError(
                    f"{title_of(self._params[index])} has got a gradient between the backward passes of a pipeline's "
                    "step, and it belongs to no micro-batch. An example is backward() in a forward. Remove that call, "
                    "or call optimizer.unhook()"
                )
            sample = self.step.sample
        elif not self.in_backward:
            if index in self._handles and compat.is_autograd_grad(self._params[index]):
                return None  # torch.autograd.grad adds to no gradient.
            if is_nested():
                raise RuntimeError(
                    f"the first gradient of a backward pass, of {title_of(self._params[index])}, comes from inside of "
                    "a reentrant checkpoint, whose backward pass of its own ends before gradients are averaged. Call "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                    "scale_checkpoint.checkpoint_wrapper(module)"
                )
            self._begin_pass()
            register_post_backward(self._end_pass, self._on_backward_failed)
        return sample

    def _count(self, index: int, grad: Tensor) -> None:
        """Adds the square of a gradient of the pass that runs now."""
        if self.step is None:
            self._accumulator_on(grad.device).set(index, grad)
        else:
            self._check_samples()  # So the step fails on all ranks of the pipeline.
            self._accumulator_on(grad.device).add(index, grad)

    def _accumulator_on(self, device: torch.device) -> NormAccumulator:
        if device not in self._of_pass:
            self._of_pass[device] = NormAccumulator(len(self._params), device)
        return self._of_pass[device]

    def _begin_pass(self) -> None:
        try:
            if context_parallel_group.active_group is not None:
                _refuse_parts(context_parallel_group.active_group.ranks)
            with as_local():
                self.check_hooks()
                self._on_begin()
        except RuntimeError:
            self.failed = True  # So that gradients may be cleared, in the middle of a step.
            raise
        self.failed = self.left_partial_grads = self.grads_restored = False
        self.in_backward, self.counted_elsewhere = True, frozenset()
        self._seen, self._sources = set(), set()
        self._task = compat.graph_task_id()
        self._last_before = context_parallel_group.last_backward
        self.drop_pass()

    def _end_pass(self) -> None:
        # A reducer of gradients has queued its own end by now, but may have done so after this one.
        register_post_backward(self._finish_pass, self._on_backward_failed)

    def drop_pass(self) -> None:
        for accumulator in self._of_pass.values():
            accumulator.clear()

    def add_pass(self) -> None:
        """Adds the squares of the pass that has ended to `squared_norms`."""
        for device, accumulator in self._of_pass.items():
            squares = accumulator.squares()
            squared_norms = self.squared_norms.get(device)
            self.squared_norms[device] = squares if squared_norms is None else squared_norms + squares

    def _finish_pass(self, weights: Sequence[float] = (1.0,)) -> None:
        try:
            self._check_samples()
            self._check_sources()
        except RuntimeError:
            self._on_backward_failed()
            raise
        self.in_backward, self.step = False, None
        with as_local():
            self._on_end(weights)

    def _check_samples(self) -> None:
        """Refuses a pass through parts of samples if only their forward stood in the block."""
        last = context_parallel_group.last_backward
        # Each micro-batch of a pipeline has a backward of its own.
        if last.task == self._task if self.step is None else last is not self._last_before:
            _refuse_parts(last.ranks)

    def _check_sources(self) -> None:
        """Refuses a gradient of the samples of several ranks where the gradients of single ranks have not come."""
        reported = {index for _, index, _ in self._sources}
        for index in sorted({index for _, index in self._seen} & self._by_source - reported):
            raise RuntimeError(
                f"{title_of(self._params[index])} has got one gradient for the samples of several ranks, and AdaScale "
                "needs the gradient of each rank. The forward ran before AdaScale(...) or hook(), or experts were "
                "called without their layer. Build AdaScale(...) before the forward, call the layer, or call "
                "optimizer.unhook()"
            )

    def _on_backward_failed(self) -> None:
        self.in_backward, self.step = False, None
        self.failed = self.left_partial_grads = True

    # The step of a pipeline.

    def _begin_step(self, step: MicrobatchStep) -> StepObserver | None:
        """Listens to a step that has any of the parameters, with a gradient or without."""
        if not self.indices_of(step.params):
            return None
        self.step = step
        try:
            self._begin_pass()
        except RuntimeError:
            self.step, self.grads_restored = None, True
            raise
        self.step = step  # Again: where a step was left out before this one, `_begin_pass` has reset it.
        self._in_parts, self.counted_elsewhere = self.indices_of(step.in_parts), self.indices_of(step.counted_elsewhere)
        return StepObserver(self._finish_pass, self._fail_step, self._count_param, self._terms())

    def _fail_step(self) -> None:
        self.in_backward, self.step = False, None
        self.failed = self.grads_restored = True

    def _count_param(self, param: Tensor, grad: Tensor) -> None:
        for index in self.indices_of([param]):
            self._count(index, grad)


def _refuse_parts(ranks: Sequence[int]) -> NoReturn:
    """Refuses the gradients of parts of sequences: their squares belong to no sample."""
    raise RuntimeError(
        f"AdaScale measures gradients of whole samples, and in context_parallel() the ranks {list(ranks)} have parts "
        "of the same sequences. Train without AdaScale there, or with whole sequences on each rank; after "
        "optimizer.unhook() steps have the last gain"
    )
