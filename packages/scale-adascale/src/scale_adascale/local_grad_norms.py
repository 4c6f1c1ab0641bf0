"""What a rank measures of its own gradients before they are averaged away, one backward pass after another.

It hears of each gradient (`grad_hooks`), of which at most short ones are copied, and nothing waits for the device.

A pass is a sample, and gradients are averaged when it ends; unless whoever runs the passes says otherwise, as a
pipeline does (`scale_core.microbatch_grads`). Its step is then to the owner one pass that brings several samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from scale_adascale.grad_hooks import Hearing, is_nested
from scale_adascale.squared_norms import Tally
from scale_core.autograd_hooks import at_end_of_backward
from scale_core.microbatch_grads import Listener, SampledStep, Terms


class LocalGrads:
    """Adds up the squares of the gradients that this rank computes, per parameter.

    Args:
        begins: Called when a backward pass brings its first gradient, before that is counted; may refuse it.
        ended: Called when a pass has ended and its gradients have been averaged, where that was asked of it: for each
            of its samples with what it counts in their mean. It calls `add_pass`, unless these are not to count.
        terms: Called when a step that is announced begins: what other ranks have to have alike.

    Attributes:
        sums: By device the sums of the squares of each parameter's gradients, by number, [k], fp64.
        fails: The last pass was refused or has failed, and what it had brought was dropped.
        has_left_parts: It has failed on its way, and some gradients may have a part of what it would have added.
        is_restored: It was one that puts gradients back, as they were before it, in other tensors.
        elsewhere: Numbers of parameters whose gradients other ranks count, of the last step that was announced.
        hearing: How it hears of gradients.
    """

    def __init__(
        self, begins: Callable[[], None], ended: Callable[[Sequence[float]], None], terms: Callable[[], Terms]
    ) -> None:
        self._begins, self._ended = weakref.WeakMethod(begins), weakref.WeakMethod(ended)
        self._terms = weakref.WeakMethod(terms)
        self.sums: dict[torch.device, Tensor] = {}
        self.fails = self.has_left_parts = self.is_restored = False
        self.elsewhere: frozenset[int] = frozenset()
        self._of_pass: dict[torch.device, Tally] = {}
        self._seen: set[tuple[int, int]] | None = None  # samples and numbers, in the pass that runs now
        self._step: SampledStep | None = None  # the announced step that is the pass that runs now
        self._parts: frozenset[int] = frozenset()  # whose gradients it hands over by itself
        self.hearing = Hearing(self._take, self._begin_step)

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass has brought gradients, and not ended yet."""
        return self._seen is not None

    @property
    def is_announced(self) -> bool:
        """Whether the pass that runs now is a step that was announced."""
        return self._step is not None

    def listen(self, params: Iterable[Tensor]) -> None:
        """Listens to these parameters, by their numbers in this order; to those that can have a gradient."""
        before = self.hearing.num_params
        self.hearing.listen(params)
        if self.hearing.num_params != before:
            self.sums, self._of_pass = {}, {}

    def unhook(self) -> None:
        """Stops to listen."""
        self.hearing.stop()
        self.forget()

    def forget(self) -> None:
        """Drops what was measured so far."""
        self._seen = self._step = None
        self.fails = self.has_left_parts = self.is_restored = False
        self.sums = {}

    def _take(self, number: int, grad: Tensor) -> None:
        sample = 0
        if self._step is not None:
            if number in self._parts:
                return
            if self._step.sample is None:
                raise RuntimeError(
                    f"{self.hearing.title_of(number)} has got a gradient between the backward passes of a pipeline's "
                    "step, which is of no micro-batch, as by backward() in a forward: leave it out, or call "
                    "optimizer.unhook()"
                )
            sample = self._step.sample
        elif self._seen is None:
            if self.hearing.is_only_asked_for(number):
                return
            self._begin_pass()
        assert self._seen is not None
        if (sample, number) in self._seen:
            raise RuntimeError(
                f"{self.hearing.title_of(number)} has two gradients in one backward pass, as in a reentrant checkpoint "
                "that contains it twice: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "scale_checkpoint.checkpoint_wrapper(module)"
            )
        self._seen.add((sample, number))
        self._count(number, grad)

    def _count(self, number: int, grad: Tensor) -> None:
        """Adds the square of a gradient of the pass that runs now."""
        if grad.device not in self._of_pass:
            self._of_pass[grad.device] = Tally(self.hearing.num_params, grad.device)
        if self._step is None:
            self._of_pass[grad.device].take(number, grad)
        else:
            self._of_pass[grad.device].add(number, grad)

    def _begin_pass(self) -> None:
        if is_nested():
            raise RuntimeError(
                "AdaScale can't tell one backward pass from another inside of a reentrant checkpoint, which runs "
                "backward passes of its own: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "scale_checkpoint.checkpoint_wrapper(module)"
            )
        self._begin_measuring()
        at_end_of_backward(self._end_pass, self._pass_has_failed)

    def _begin_measuring(self) -> None:
        try:
            self.hearing.check()
            begins = self._begins()
            if begins is not None:
                begins()
        except RuntimeError:
            self.fails = True  # So that gradients may be cleared, in the middle of a step.
            raise
        self.fails = self.has_left_parts = self.is_restored = False
        self._seen, self.elsewhere = set(), frozenset()
        self.drop_pass()

    def _end_pass(self) -> None:
        # What averages gradients has queued its own end by now, but may have done so after this one.
        at_end_of_backward(self._all_is_done, self._pass_has_failed)

    def drop_pass(self) -> None:
        """Makes what `add_pass` adds next nothing."""
        for tally in self._of_pass.values():
            tally.clear()

    def add_pass(self) -> None:
        """Adds what the pass that has ended brought to `sums`."""
        for device, tally in self._of_pass.items():
            squares = tally.squares()
            self.sums[device] = self.sums[device] + squares if device in self.sums else squares

    def _all_is_done(self, weights: Sequence[float] = (1.0,)) -> None:
        self._seen = self._step = None
        ended = self._ended()
        if ended is not None:
            ended(weights)

    def _pass_has_failed(self) -> None:
        self._seen = self._step = None
        self.fails = self.has_left_parts = True

    # A step that is announced.

    def _begin_step(self, step: SampledStep) -> Listener | None:
        """Listens to a step that is announced, if any of its parameters is measured, with a gradient or without."""
        if not self.hearing.numbers_of(step.params):
            return None
        self._step = step
        try:
            self._begin_measuring()
        except RuntimeError:
            self._step, self.is_restored = None, True
            raise
        self._step, self._parts = step, self.hearing.numbers_of(step.in_parts)
        self.elsewhere = self.hearing.numbers_of(step.counted_elsewhere)
        terms = self._terms()
        return Listener(self._all_is_done, self._step_has_failed, self._take_whole, None if terms is None else terms())

    def _step_has_failed(self) -> None:
        self._seen = self._step = None
        self.fails = self.is_restored = True

    def _take_whole(self, param: Tensor, grad: Tensor) -> None:
        for number in self.hearing.numbers_of([param]):
            self._count(number, grad)
