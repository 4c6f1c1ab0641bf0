"""Each micro-batch as a sample of the gradient, for whoever measures gradients before they are averaged, as AdaScale.

A parameter belongs to one stage, so the square of a micro-batch's gradient is the sum of those of its parts, which each
rank knows. It comes in one pass or two, between the passes of other micro-batches and stages; so before each pass it is
said of which micro-batch it is (`scale_core.microbatch_grads`), and the step ends when all ranks are through and
gradients are averaged.

A parameter that several stages hold gets a sum, whose square is not that of its parts. While somebody listens, what
stages add to a micro-batch is kept; at the end of the step the first rank that holds the parameter gets it from the
others, and tells of the sum. Where no other rank holds it, that is when all stages are through with the micro-batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.autograd_hooks import are_local_grads_reported, on_local_grads
from scale_core.comm.control_plane import exchange_text
from scale_core.comm.group import Group
from scale_core.comm.subgroup import subgroup_of
from scale_core.microbatch_grads import SampledStep, Terms, sampled_steps_wanted
from scale_pipe.distributed.comm.messages import Content, Share, pack, unpack
from scale_pipe.distributed.comm.p2p import Links
from scale_pipe.distributed.program.plan import Flow, SharedParameter, Slot, first_holders
from scale_pipe.schedules.placement import Placement

_WHOLE = Share(1, 1, 1)


@dataclass
class _Shared:
    """A parameter of several stages.

    Attributes:
        param: As this rank has it.
        holders: By rank that has it, by which stage it stands there; the first one adds up. None if no other rank has.
        sums: By micro-batch, what stages of this rank have added to its gradient so far, in its full shape.
    """

    param: nn.Parameter
    holders: Mapping[int, int] | None = None
    sums: dict[int, Tensor] = field(default_factory=dict)


class Samples:
    """What is told of one step of one rank; nothing where nobody listens. Entered around the step.

    Args:
        shared: The parameters of the model that stages on several ranks hold.
        placement: Which rank holds which stage.
        rank: This one.
    """

    def __init__(self, shared: Sequence[SharedParameter], placement: Placement, rank: int) -> None:
        self._parameters, self._placement, self._rank = shared, placement, rank
        self._shared: list[_Shared] = []
        self._names: dict[str, _Shared] = {}  # of those that other ranks have, too
        self._num_stages = 0
        self._stages_through: Counter[int] = Counter()  # by micro-batch
        self._handles: list[RemovableHandle] = []
        self._step: SampledStep | None = None

    @cached_property
    def _holders(self) -> dict[str, Mapping[int, int]]:
        """By name of a shared parameter what `first_holders` returns; asked for where somebody listens, on any rank."""
        return {parameter.name: first_holders(parameter, self._placement) for parameter in self._parameters}

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return self._step is not None and self._step.is_heard

    @property
    def terms(self) -> Sequence[Terms]:
        """What whoever listens needs other ranks to have alike."""
        return () if self._step is None else self._step.terms

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget_hooks()
        self._shared, self._names = [], {}
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
        self._num_stages = len(stages)
        self._names = {name: _Shared(param, self._holders[name]) for name, param in copies.items()}
        elsewhere = set(copies.values())
        alone = [param for param, number in counts.items() if number > 1 and param not in elsewhere]
        self._shared = [*self._names.values(), *map(_Shared, alone)]
        self._step = SampledStep(
            counts,
            [shared.param for shared in self._shared],
            [shared.param for shared in self._shared if self._adds_up(shared) != self._rank],
        )
        self._step.begin()
        if self._step.is_heard and self._shared:
            self._listen()

    @contextmanager
    def of(self, micro_batch: int, *, ends_stage: bool) -> Iterator[None]:
        """Around each pass that computes gradients.

        Args:
            micro_batch: Of which.
            ends_stage: It is the last pass of its stage for that micro-batch.
        """
        if self._step is None:
            yield
            return
        with self._step.of_sample(micro_batch):
            yield
            self._stages_through[micro_batch] += ends_stage
            if self._stages_through[micro_batch] == self._num_stages:
                for shared in self._shared:
                    if shared.holders is None:
                        self._tell(shared, shared.sums.pop(micro_batch, None))

    def check_terms(self, group: Group, limit_seconds: float | None) -> None:
        """Checks that all ranks that somebody would wait for measure on the same terms; all ranks call it together.

        Args:
            group: All ranks of the pipeline.
            limit_seconds: How long to wait for one.

        Raises:
            RuntimeError: They don't; on all ranks.
            TransferError: A rank did not come.
        """
        texts = exchange_text(json.dumps(self.terms), group, limit_seconds=limit_seconds)
        told = [[Terms(tuple(ranks), words) for ranks, words in json.loads(text)] for text in texts]
        check_terms(dict(zip(group.ranks, told, strict=True)))

    def check_holders(self, heard: Collection[int]) -> None:
        """Checks that each shared parameter is measured on all ranks that hold it, or on none.

        Args:
            heard: The ranks on which somebody listens.

        Raises:
            RuntimeError: One is not; on all ranks.
        """
        for name, holders in self._holders.items():
            deaf = [rank for rank in holders if rank not in heard]
            if deaf and len(deaf) < len(holders):
                raise RuntimeError(
                    f"gradients are measured by micro-batch (as by AdaScale) on the ranks {sorted(heard)} of the "
                    f"pipeline and not on {deaf}, which hold {name}, too: build AdaScale around the optimizer of each "
                    "of these ranks, or call unhook() on all of them"
                )

    def add_up(self, num_micro_batches: int, links: Links) -> None:
        """Puts together what stages have added to the gradients of shared parameters; all ranks call it together.

        Args:
            num_micro_batches: Of the step.
            links: To the others.

        Raises:
            LinkError: A rank did not come.
        """
        self._forget_hooks()
        for name, shared in self._names.items() if self.is_heard else ():
            self._add_up(name, shared, num_micro_batches, links)
        links.finish()

    def end(self, weights: Sequence[float]) -> None:
        """Says that the step has gone well, and that gradients are averaged.

        Args:
            weights: What each micro-batch counts in their mean.
        """
        if self._step is not None:
            self._step.end(weights)

    # The gradients of shared parameters.

    def _adds_up(self, shared: _Shared) -> int:
        return self._rank if shared.holders is None else next(iter(shared.holders))

    def _listen(self) -> None:
        reported: dict[int, _Shared] = {}
        for shared in self._shared:
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
        """A stage has brought what it adds, or a part of that, as a reentrant checkpoint inside of it does."""
        assert self._step is not None
        sample = self._step.sample
        if sample is None:
            return  # Of no backward of a micro-batch, and so in no gradient of the step.
        with torch.no_grad():
            part = grad.detach()
            before = shared.sums.get(sample)
            if before is not None:
                shared.sums[sample] = before + part
            else:  # The gradient itself may be added to later.
                shared.sums[sample] = part.clone() if part.layout is torch.strided else part.to_dense()

    @torch.no_grad()
    def _add_up(self, name: str, shared: _Shared, num_micro_batches: int, links: Links) -> None:
        assert shared.holders is not None, "no other rank has it"
        (first, target), *others = shared.holders.items()
        for sample in range(num_micro_batches):
            total = shared.sums.pop(sample, None)
            if self._rank != first:
                message = _WHOLE if total is None else Content(*pack(total), _WHOLE)
                links.send(sample_slot(name, shared.holders[self._rank], target, sample), first, message)
                continue
            for peer, stage in others:
                slot = sample_slot(name, stage, target, sample)
                links.post(slot, peer)
                arrived = links.take(slot, peer)
                if isinstance(arrived, Content):
                    part = unpack(arrived.structure, list(arrived.tensors))
                    total = part if total is None else total + part
            self._tell(shared, total)

    def _tell(self, shared: _Shared, total: Tensor | None) -> None:
        assert self._step is not None
        if total is not None:
            self._step.tell(shared.param, total)


def ranks_with_parameters(stages: Sequence[nn.Module], placement: Placement, group: Group) -> Group:
    """Returns the ranks whose stages have any parameters; all ranks call it together.

    Args:
        stages: All stages.
        placement: Which rank holds which.
        group: All ranks.

    Returns:
        Them, or this rank alone if it is the only one, or has none.
    """
    owned = (placement.stages_of[rank] for rank in range(group.size))
    have = [any(next(stages[index].parameters(), None) is not None for index in each) for each in owned]
    if all(have) or not any(have) or group.backend == "fake":
        return group
    if sum(have) == 1:
        return Group()
    return subgroup_of(group, [rank for rank, has_any in zip(group.ranks, have, strict=True) if has_any])


def check_terms(told: Mapping[int, Sequence[Terms]]) -> None:
    """Checks that no rank would wait for one that measures on other terms, or not at all.

    Args:
        told: By global rank of a pipeline, the terms of those who listen there, in their order.

    Raises:
        RuntimeError: One would.
    """
    for rank, peer in ((rank, peer) for rank, terms in told.items() for peer in told if peer != rank and terms):
        mine, its = (
            [each.words for each in told[one] if other in each.ranks] for one, other in ((rank, peer), (peer, rank))
        )
        if mine != its:
            raise RuntimeError(
                "expected gradients to be measured by micro-batch (as by AdaScale) on the same terms on all ranks of "
                f"the pipeline that add up what they have, but rank {rank} has {' and '.join(mine) or 'nothing'}, and "
                f"rank {peer} {' and '.join(its) or 'nothing'}: build AdaScale around the optimizer of each of these "
                "ranks, with as many parameter groups and the same num_gradients_to_accumulate, pass "
                "model_parallel_group=a group of those that do, or call unhook() on all of them"
            )


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
