"""Reports gradients per micro-batch where one step runs several backward passes (pipelines).

Usually one backward pass computes the gradient of a batch, which is averaged over the ranks at its end: an observer may
take each pass for a sample. In a pipeline the gradient of a micro-batch comes in several passes, on several ranks,
between other micro-batches' gradients, and is averaged after all of them. So the pipeline announces the step here and
says before each pass which micro-batch it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.comm.group import Group
from scale_core.hooks.gradients import gradient_hooks
from scale_core.live_objects import live_objects, register_live
from scale_core.records import Record


class StepSignature(NamedTuple):
    """The common facts of ranks that sum something at the end of a step; otherwise they would hang."""

    ranks: tuple[int, ...]  # The global ranks that take part, this one among them
    words: str  # The facts that have to be equal on these, for people


class StepObserver(NamedTuple):
    """The callbacks of one observer of a step."""

    # Called when all gradients of the step are there, and averaged: for each of its samples with its weight in
    # their mean, 1 / n of n samples of the same size.
    ended: Callable[[Sequence[float]], None]
    failed: Callable[[], None]  # Called in its place when the step was aborted; gradients are as before it
    # Called with a parameter of `in_parts` and its gradient of one sample, which is borrowed.
    whole: Callable[[Tensor, Tensor], None]
    terms: StepSignature | None = None  # To be equal on other ranks; None if it asks them for nothing


class PipelineRanks(NamedTuple):
    """The ranks of a pipeline, which announce the same steps."""

    ranks: Group  # All of them
    with_parameters: Group  # Those whose part has any; the others have nothing that could be measured


class _PipelineRecord(Record):
    """Of a pipeline, the ranks that announce its steps."""

    attribute = "_scale_pipeline"
    ranks: PipelineRanks


MicrobatchStepCallback = Callable[["MicrobatchStep"], StepObserver | None]


class MicrobatchStep:
    """A step whose gradients come sample by sample, in passes of any number and order.

        step = MicrobatchStep(pipe.parameters())
        step.begin()
        with step.micro_batch(0):
            loss.backward()
        step.end([1.0])

    Args:
        params: The parameters that may get gradients on this rank, as `parameters()` yields it.
        in_parts: Of these, the parameters whose gradient of a sample is a sum of several, of which some may come
            elsewhere. No hook sees it, and `report_grad` reports it.
        counted_elsewhere: Of these, copies of another rank's, which counts and reports them.

    Attributes:
        sample: The number of the sample whose gradients are computed now; None between them.
    """

    def __init__(
        self, params: Iterable[Tensor], in_parts: Iterable[Tensor] = (), counted_elsewhere: Iterable[Tensor] = ()
    ) -> None:
        self.params: Collection[Tensor] = list(params)
        self.in_parts: Collection[Tensor] = set(in_parts)  # tensors are equal by identity alone to sets
        self.counted_elsewhere: Collection[Tensor] = set(counted_elsewhere)
        self.sample: int | None = None
        self._listeners: list[StepObserver] = []

    @property
    def has_observers(self) -> bool:
        """Whether the step has observers."""
        return bool(self._listeners)

    @property
    def terms(self) -> list[StepSignature]:
        """The signatures of all observers."""
        return [listener.terms for listener in self._listeners if listener.terms is not None]

    def begin(self) -> None:
        """Announces the step, before its first gradient."""
        for callback in list(gradient_hooks.microbatch_steps.values()):
            try:
                listener = callback(self)
            except BaseException:
                self.fail()
                raise
            if listener is not None:
                self._listeners.append(listener)

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """A context around each backward pass; it computes gradients of this micro-batch alone."""
        self.sample = number
        try:
            yield
        finally:
            self.sample = None

    def report_grad(self, param: Tensor, grad: Tensor) -> None:
        """Reports the gradient of one micro-batch for a parameter of `in_parts`, summed by the caller."""
        for listener in self._listeners:
            listener.whole(param, grad)

    def end(self, weights: Sequence[float]) -> None:
        """Reports that the step has succeeded on all ranks, with the gradients that the optimizer will see."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.ended(list(weights))

    def fail(self) -> None:
        """Reports that the step was aborted; does nothing after `end`."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.failed()


def on_microbatch_steps(callback: MicrobatchStepCallback) -> RemovableHandle:
    """Calls `callback(step)` when a step begins that reports its micro-batches."""
    return gradient_hooks.microbatch_steps.register(callback)


def register_pipeline(module: nn.Module, group: Group, with_parameters: Group | None = None) -> None:
    """Records that all steps of this module's parameters will be announced."""
    ranks = PipelineRanks(group, group if with_parameters is None else with_parameters)
    _PipelineRecord.get_or_create(module).ranks = ranks
    register_live(_PipelineRecord, module)


def pipeline_ranks(params: Iterable[Tensor]) -> PipelineRanks | None:
    """Returns the ranks that announce the steps of one of these parameters, or None."""
    wanted = {id(param) for param in params}
    for pipeline in live_objects(_PipelineRecord):
        if any(id(param) in wanted for param in pipeline.parameters()):
            return _PipelineRecord.get_or_create(pipeline).ranks
    return None
