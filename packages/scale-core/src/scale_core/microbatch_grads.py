"""Whose gradient is whose, where a backward pass is not one sample of it.

Mostly the gradient of a batch is computed by one backward pass, and averaged over the ranks when that ends: whoever
measures gradients may take each pass for a sample. A pipeline goes another way. The gradient of a micro-batch comes in
several passes, on several ranks, between those of other micro-batches, and is averaged after all of them. So whoever
runs such passes announces the step here, and says before each pass of which sample it is; whoever measures listens.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.comm.group import Group


class Terms(NamedTuple):
    """What ranks have to have alike that add something up when a step ends; otherwise they would wait for ever.

    Attributes:
        ranks: The global ranks that take part, this one among them.
        words: What has to be the same on all of these, for people.
    """

    ranks: tuple[int, ...]
    words: str


class Listener(NamedTuple):
    """Who listens to one step.

    Attributes:
        ended: Called when all gradients of the step are there, and averaged: for each of its samples with what it
            counts in their mean, 1 / n of n samples of the same size.
        failed: Called in its place when the step was given up; gradients are as before it.
        whole: Called with a parameter of `in_parts` and its gradient of one sample, which is borrowed.
        terms: What other ranks have to have alike; None where it asks them for nothing.
    """

    ended: Callable[[Sequence[float]], None]
    failed: Callable[[], None]
    whole: Callable[[Tensor, Tensor], None]
    terms: Terms | None = None


class Announcing(NamedTuple):
    """The ranks that announce the steps of a model of which each has a part.

    Attributes:
        ranks: All of them.
        with_parameters: Those whose part has any; the others have nothing that could be measured.
    """

    ranks: Group
    with_parameters: Group


SampledStepCallback = Callable[["SampledStep"], Listener | None]

_callbacks: OrderedDict[int, SampledStepCallback] = OrderedDict()  # a handle can't refer weakly to a dict
_announcing: weakref.WeakKeyDictionary[nn.Module, Announcing] = weakref.WeakKeyDictionary()


class SampledStep:
    """A step whose gradients come sample by sample, in passes of any number and order.

        step = SampledStep(pipe.parameters())
        step.begin()
        with step.of_sample(0):
            loss.backward()
        step.end([1.0])

    Args:
        params: What may get gradients on this rank, as `parameters()` yields it.
        in_parts: Of these, those whose gradient of a sample is a sum of several, of which some may come elsewhere: no
            hook sees it, and `tell` hands it over.
        counted_elsewhere: Of these, copies of what another rank has, which counts and is told of there.

    Attributes:
        params: As given.
        in_parts: As given; by identity.
        counted_elsewhere: As given; by identity.
        sample: The number of the sample whose gradients are computed now; None between them.
    """

    def __init__(
        self, params: Iterable[Tensor], in_parts: Iterable[Tensor] = (), counted_elsewhere: Iterable[Tensor] = ()
    ) -> None:
        self.params: Collection[Tensor] = list(params)
        self.in_parts: Collection[Tensor] = set(in_parts)  # tensors are equal by identity alone to sets
        self.counted_elsewhere: Collection[Tensor] = set(counted_elsewhere)
        self.sample: int | None = None
        self._listeners: list[Listener] = []

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens to it."""
        return bool(self._listeners)

    @property
    def terms(self) -> list[Terms]:
        """Those of all who listen to it."""
        return [listener.terms for listener in self._listeners if listener.terms is not None]

    def begin(self) -> None:
        """Announces it, before its first gradient.

        Raises:
            Exception: Somebody refuses it; then it was given up.
        """
        for callback in list(_callbacks.values()):
            try:
                listener = callback(self)
            except BaseException:
                self.fail()
                raise
            if listener is not None:
                self._listeners.append(listener)

    @contextmanager
    def of_sample(self, number: int) -> Iterator[None]:
        """Around each pass, which computes gradients of this sample alone."""
        self.sample = number
        try:
            yield
        finally:
            self.sample = None

    def tell(self, param: Tensor, grad: Tensor) -> None:
        """Hands over the gradient of one sample that came in parts, the sum of these.

        Args:
            param: Of `in_parts`, and not counted elsewhere.
            grad: In its full shape, without what other samples have added.
        """
        for listener in self._listeners:
            listener.whole(param, grad)

    def end(self, weights: Sequence[float]) -> None:
        """Says that it has gone well on all ranks, and that gradients are what the optimizer will see.

        Args:
            weights: What each sample counts in the mean; of all, also if none was of use to this rank, which has frozen
                parameters alone.
        """
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.ended(list(weights))

    def fail(self) -> None:
        """Says that it was given up; does nothing after `end`."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.failed()


def on_sampled_steps(callback: SampledStepCallback) -> RemovableHandle:
    """Calls `callback(step)` when a step begins whose samples are announced.

    Args:
        callback: Returns how it listens to this step, or None where that has nothing of what it measures. What it
            raises fails the step before it has begun.

    Returns:
        A handle; `handle.remove()` ends the calls.
    """
    handle = RemovableHandle(_callbacks)
    _callbacks[handle.id] = callback
    return handle


def sampled_steps_wanted() -> bool:
    """Whether anybody listens to such steps."""
    return bool(_callbacks)


def announces_samples(module: nn.Module, group: Group, with_parameters: Group | None = None) -> None:
    """Records that all steps of this module's parameters will be announced.

    Args:
        module: This rank's part of a model.
        group: The ranks that have its parts, and announce the same steps.
        with_parameters: Those of them whose part has parameters; None if all have.
    """
    _announcing[module] = Announcing(group, group if with_parameters is None else with_parameters)


def announcing(params: Iterable[Tensor]) -> Announcing | None:
    """Returns the ranks that announce steps of one of these parameters, as it stands in their module now, or None."""
    wanted = {id(param) for param in params}
    modules = (module for module in _announcing if any(id(param) in wanted for param in module.parameters()))
    return next((_announcing[module] for module in modules), None)
