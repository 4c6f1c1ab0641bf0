"""Each micro-batch as a sample of the gradient, for whoever measures gradients before they are averaged, as AdaScale.

A parameter belongs to one stage, so the square of a micro-batch's gradient is the sum of those of its parts, which each
rank knows. It comes in one pass or two, between the passes of other micro-batches and stages; so before each pass it is
said of which micro-batch it is (`scale_core.samples`), and the step ends when all ranks are through and gradients are
averaged.

A parameter that several stages hold gets a sum, whose square is not that of its parts. While somebody listens, what
each stage adds to a micro-batch is kept; at the end of the step the first rank that holds the parameter gets it from
the others, and tells of the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.backward import are_local_grads_reported, on_local_grads
from scale_core.samples import SampledStep, sampled_steps_wanted
from scale_pipe.distributed.links import Links
from scale_pipe.distributed.messages import Content, Share, pack, unpack
from scale_pipe.distributed.plan import Flow, SharedParameter, Slot, first_holders
from scale_pipe.schedules.placement import Placement

_WHOLE = Share(1, 1, 1)


@dataclass
class _Shared:
    """A parameter of several stages.

    Attributes:
        param: As this rank has it.
        holders: By rank that has it, by which stage it stands there; the first one adds up.
        num_parts: Stages of this rank that have it.
        parts: By micro-batch, what these have added to its gradient so far, in its full shape.
    """

    param: nn.Parameter
    holders: Mapping[int, int]
    num_parts: int
    parts: dict[int, list[Tensor]] = field(default_factory=dict)


class Samples:
    """What is told of one step of one rank; nothing where nobody listens. Entered around the step.

    Args:
        shared: The parameters of the model that stages on several ranks hold.
        placement: Which rank holds which stage.
        rank: This one.
    """

    def __init__(self, shared: Sequence[SharedParameter], placement: Placement, rank: int) -> None:
        self._rank = rank
        self._holders = {parameter.name: first_holders(parameter, placement) for parameter in shared}
        self._shared: dict[str, _Shared] = {}
        self._handles: list[RemovableHandle] = []
        self._step: SampledStep | None = None

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return self._step is not None and self._step.is_heard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget_hooks()
        self._shared = {}
        if self._step is not None:
            self._step.fail()

    def begin(self, stages: Mapping[int, nn.Module], copies: Mapping[str, nn.Parameter]) -> None:
        """Announces the step.

        Args:
            stages: Of this rank, as they are wrapped now.
            copies: Of their parameters, by name, those that other ranks have, too.

        Raises:
            Exception: Whoever listens refuses it.
        """
        if not sampled_steps_wanted():
            return
        counts = Counter(param for stage in stages.values() for param in stage.parameters())
        self._shared = {name: _Shared(param, self._holders[name], counts[param]) for name, param in copies.items()}
        elsewhere = set(copies.values())
        for param, number in counts.items():
            if number > 1 and param not in elsewhere:
                self._shared[f"{len(self._shared)} on rank {self._rank}"] = _Shared(param, {self._rank: -1}, number)
        self._step = SampledStep(
            counts,
            [shared.param for shared in self._shared.values()],
            [shared.param for shared in self._shared.values() if self._adds_up(shared) != self._rank],
        )
        self._step.begin()
        if self._step.is_heard and self._shared:
            self._listen()

    def of(self, micro_batch: int) -> AbstractContextManager[object]:
        """Around each pass that computes gradients.

        Args:
            micro_batch: Of which.
        """
        return nullcontext() if self._step is None else self._step.of_sample(micro_batch)

    def add_up(self, heard: Collection[int], num_micro_batches: int, links: Links) -> None:
        """Puts together what stages have added to the gradients of shared parameters; all ranks call it together.

        Args:
            heard: The ranks on which somebody listens.
            num_micro_batches: Of the step.
            links: To the others.

        Raises:
            LinkError: A rank did not come.
            RuntimeError: Somebody listens on one rank that holds such a parameter, and not on another; on all ranks.
        """
        self._forget_hooks()
        for name, holders in self._holders.items():
            deaf = [rank for rank in holders if rank not in heard]
            if deaf and len(deaf) < len(holders):
                raise RuntimeError(
                    f"gradients are measured by micro-batch (as by AdaScale) on the ranks {sorted(heard)} of the "
                    f"pipeline and not on {deaf}, which hold {name}, too: build AdaScale around the optimizer of each "
                    "of these ranks, or call unhook() on all of them"
                )
        for name, shared in self._shared.items() if self.is_heard else ():
            self._add_up(name, shared, num_micro_batches, links)
        links.finish()

    def end(self, num_micro_batches: int) -> None:
        """Says that the step has gone well, and that gradients are averaged.

        Args:
            num_micro_batches: Of the step.
        """
        if self._step is not None:
            self._step.end(num_micro_batches)

    # The gradients of shared parameters.

    def _adds_up(self, shared: _Shared) -> int:
        return next(iter(shared.holders))

    def _listen(self) -> None:
        reported: dict[int, _Shared] = {}
        for shared in self._shared.values():
            if are_local_grads_reported(shared.param):
                reported[id(shared.param)] = shared
            elif shared.param.requires_grad:
                self._handles.append(shared.param.register_hook(self._hook(shared)))

        def hear(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            for param, grad in zip(params, grads, strict=True):
                if id(param) in reported:
                    self._take(reported[id(param)], grad)

        if reported:
            self._handles.append(on_local_grads(hear))

    def _hook(self, shared: _Shared) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            self._take(shared, grad)

        return hook

    def _forget_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take(self, shared: _Shared, grad: Tensor) -> None:
        """One stage has brought its part; where no other rank has any, the sum is told of as soon as it is whole."""
        assert self._step is not None
        sample = self._step.sample
        if sample is None:
            return  # Of no backward of a micro-batch, and so in no gradient of the step.
        with torch.no_grad():
            dense = grad.detach()
            dense = dense.clone() if dense.layout is torch.strided else dense.to_dense()  # It may be added to later.
        parts = shared.parts.setdefault(sample, [])
        parts.append(dense)
        if len(shared.holders) == 1 and len(parts) == shared.num_parts:
            self._tell(shared, shared.parts.pop(sample))

    @torch.no_grad()
    def _add_up(self, name: str, shared: _Shared, num_micro_batches: int, links: Links) -> None:
        (first, target), *others = shared.holders.items()
        for sample in range(num_micro_batches):
            parts = shared.parts.pop(sample, [])
            if self._rank != first:
                message = Content(*pack(_sum(parts)), _WHOLE) if parts else _WHOLE
                links.send(sample_slot(name, shared.holders[self._rank], target, sample), first, message)
                continue
            for peer, stage in others:
                slot = sample_slot(name, stage, target, sample)
                links.post(slot, peer)
                arrived = links.take(slot, peer)
                if isinstance(arrived, Content):
                    parts.append(unpack(arrived.structure, list(arrived.tensors)))
            self._tell(shared, parts)

    def _tell(self, shared: _Shared, parts: Sequence[Tensor]) -> None:
        assert self._step is not None
        if parts:
            self._step.tell(shared.param, _sum(parts))


def sample_slot(name: str, source: int, target: int, micro_batch: int) -> Slot:
    """Returns where one micro-batch's gradient of a shared parameter travels, while gradients are measured.

    Args:
        name: Of the parameter.
        source: By which stage the rank stands among the holders that has computed it.
        target: By which the first of them does.
        micro_batch: Which.
    """
    return Slot(Flow.SAMPLE, name, source, target, micro_batch)


def sample_slots(placement: Placement, parameters: Sequence[SharedParameter], num_micro_batches: int) -> list[Slot]:
    """Returns all of these: from each rank that holds a shared parameter to the first one that does.

    Args:
        placement: Which rank holds which stage.
        parameters: Those that are shared.
        num_micro_batches: At most.
    """
    slots = []
    for parameter in parameters:
        target, *others = first_holders(parameter, placement).values()
        slots += [
            sample_slot(parameter.name, one, target, batch) for one in others for batch in range(num_micro_batches)
        ]
    return slots


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
