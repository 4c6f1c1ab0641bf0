"""Gradients of each micro-batch, for observers that measure them before they are averaged, as AdaScale does.

A parameter belongs to one stage, so the squared norm of a micro-batch's gradient is the sum of the squared norms of its
parts, and each rank knows its own. A part is computed in one pass or two, between the passes of other micro-batches and
stages; so each pass announces its micro-batch (`scale_core.hooks.microbatch_grads`), and the step ends when all ranks
have finished and gradients are averaged.

A parameter that several stages hold gets a sum of gradients, whose squared norm is not the sum of their squared norms.
While it is measured, what stages add to a micro-batch is kept; at the end of the step the first rank that holds the
parameter receives it from the others, and reports the sum. Where no other rank holds it, that is when all stages have
finished the micro-batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.comm.collectives import exchange_text
from scale_core.comm.group import Group
from scale_core.comm.subgroups import subgroup_of
from scale_core.hooks.gradients import lacks_autograd_hooks, register_local_grad_hook
from scale_core.hooks.microbatch_grads import MicrobatchStep, StepSignature
from scale_core.shard import on_local_tensors
from scale_pipe.distributed.message import WHOLE, Flow, Payload, Slot
from scale_pipe.distributed.p2p import P2PChannel
from scale_pipe.distributed.program import SharedParameter, first_stage_by_rank
from scale_pipe.distributed.stage import pack, unpack
from scale_pipe.schedules.placement import StagePlacement


@dataclass
class _SharedParam:
    """A parameter of several stages, as this rank has it."""

    param: nn.Parameter
    holders: Mapping[int, int] | None = None  # by rank its first stage; the first sums up. None if no other rank has it
    sums: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch, in the full shape


class MicrobatchGrads:
    """Reports the gradients of one rank's steps by micro-batch; does nothing while nobody measures them."""

    def __init__(self, shared: Sequence[SharedParameter], placement: StagePlacement, rank: int) -> None:
        self._rank = rank
        self._holders = {parameter.name: first_stage_by_rank(parameter, placement) for parameter in shared}
        self.is_measured = False  # in the step that runs
        self.step: MicrobatchStep | None = None  # None while nobody observes steps
        self._num_stages = 0
        self._shared: list[_SharedParam] = []
        self._by_name: dict[str, _SharedParam] = {}  # those that other ranks have, too
        self._stages_done: Counter[int] = Counter()  # by micro-batch
        self._handles: list[RemovableHandle] = []

    @property
    def signatures(self) -> Sequence[StepSignature]:
        """The values that observers need to be equal on other ranks."""
        return () if self.step is None else self.step.terms

    @on_local_tensors
    def begin(self, stages: Mapping[int, nn.Module], copies: Mapping[str, nn.Parameter]) -> None:
        """Announces a step to observers, which may refuse it; `copies` are parameters that other ranks have, too."""
        counts = Counter(param for stage in stages.values() for param in stage.parameters())
        self._num_stages = len(stages)
        self._by_name = {name: _SharedParam(param, self._holders[name]) for name, param in copies.items()}
        elsewhere = set(copies.values())
        alone = [param for param, number in counts.items() if number > 1 and param not in elsewhere]
        self._shared = [*self._by_name.values(), *map(_SharedParam, alone)]
        self.step = MicrobatchStep(
            counts,
            [shared.param for shared in self._shared],
            [one.param for one in self._shared if one.holders is not None and next(iter(one.holders)) != self._rank],
        )
        self.step.begin()
        self.is_measured = self.step.has_observers
        if self.is_measured and self._shared:
            self._register_hooks()

    def end(self, weights: Sequence[float]) -> None:
        """Ends a step that went well, once gradients are averaged; `weights` weigh the micro-batches in the mean."""
        if self.step is not None:
            self.step.end(weights)

    def close(self) -> None:
        """Drops the step, and reports to observers that it failed unless it has ended."""
        self._remove_hooks()
        step, self.step, self.is_measured = self.step, None, False
        self._shared, self._by_name = [], {}
        self._stages_done.clear()
        if step is not None:
            step.fail()

    @contextmanager
    def micro_batch(self, micro_batch: int, *, ends_stage: bool) -> Iterator[None]:
        """Around each pass that computes gradients; `ends_stage` if it is its stage's last one for the micro-batch."""
        assert self.step is not None
        with self.step.micro_batch(micro_batch):
            yield
            self._stages_done[micro_batch] += ends_stage
            if self._stages_done[micro_batch] == self._num_stages:
                for shared in self._shared:
                    if shared.holders is None:
                        self._report(shared, shared.sums.pop(micro_batch, None))

    # At the end of a step that some rank measures; all ranks call these together.

    def check_signatures(self, group: Group, limit_seconds: float | None) -> None:
        """Raises RuntimeError on all ranks if one would wait for another that measures otherwise."""
        texts = exchange_text(json.dumps(self.signatures), group, limit_seconds=limit_seconds)
        rows = [[StepSignature(tuple(ranks), text) for ranks, text in json.loads(row)] for row in texts]
        check_signatures(dict(zip(group.ranks, rows, strict=True)))

    def check_holders(self, measured: Collection[int]) -> None:
        """Raises RuntimeError if a shared parameter is measured on some of the ranks that hold it, but not on all."""
        for name, holders in self._holders.items():
            missing = [rank for rank in holders if rank not in measured]
            if missing and len(missing) < len(holders):
                raise RuntimeError(
                    f"gradients are measured by micro-batch (as by AdaScale) on the ranks {sorted(measured)} of the "
                    f"pipeline and not on {missing}, which hold {name}, too. Build AdaScale around the optimizer of "
                    "each of these ranks, or call unhook() on all of them"
                )

    @on_local_tensors
    def sum_shared(self, num_micro_batches: int, channel: P2PChannel) -> None:
        """Sums the gradients of shared parameters over stages, micro-batch by micro-batch. Raises P2PError."""
        self._remove_hooks()
        for name, shared in self._by_name.items() if self.is_measured else ():
            self._sum_shared(name, shared, num_micro_batches, channel)
        channel.wait_sends()

    @torch.no_grad()
    def _sum_shared(self, name: str, shared: _SharedParam, num_micro_batches: int, channel: P2PChannel) -> None:
        assert shared.holders is not None, "no other rank has it"
        (first, target), *others = shared.holders.items()
        for batch in range(num_micro_batches):
            total = shared.sums.pop(batch, None)
            if self._rank != first:
                message = WHOLE if total is None else Payload(*pack(total), WHOLE)
                channel.send(Slot(Flow.SAMPLE, name, shared.holders[self._rank], target, batch), first, message)
                continue
            for peer, stage in others:
                slot = Slot(Flow.SAMPLE, name, stage, target, batch)
                channel.post_receive(slot, peer)
                arrived = channel.receive(slot, peer)
                if isinstance(arrived, Payload):
                    part = unpack(arrived.structure, arrived.tensors)
                    total = part if total is None else total + part
            self._report(shared, total)

    # Hooks on shared parameters.

    def _register_hooks(self) -> None:
        reported: dict[int, _SharedParam] = {}
        for shared in self._shared:
            if lacks_autograd_hooks(shared.param):
                reported[id(shared.param)] = shared
            elif shared.param.requires_grad:
                self._handles.append(shared.param.register_hook(partial(self._accumulate, shared)))

        def on_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            for param, grad in zip(params, grads, strict=True):
                if id(param) in reported:
                    self._accumulate(reported[id(param)], grad)

        if reported:
            self._handles.append(register_local_grad_hook(on_grads))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @on_local_tensors
    def _accumulate(self, shared: _SharedParam, grad: Tensor) -> None:
        """Adds gradients of a stage, or of a part of it, as a reentrant checkpoint inside of it does."""
        batch = None if self.step is None else self.step.sample
        if batch is None:
            return  # A backward outside of the schedule, whose gradient is not in the step.
        with torch.no_grad():
            part = grad.detach()
            before = shared.sums.get(batch)
            if before is not None:
                shared.sums[batch] = before + part
            else:  # The gradient itself may be added to later.
                shared.sums[batch] = part.clone() if part.layout is torch.strided else part.to_dense()

    def _report(self, shared: _SharedParam, total: Tensor | None) -> None:
        assert self.step is not None
        if total is not None:
            self.step.report_grad(shared.param, total)


def ranks_with_parameters(stages: Sequence[nn.Module], placement: StagePlacement, group: Group) -> Group:
    """The ranks whose stages have any parameters; this rank alone if it is the only one, or has none.

    All ranks call it together.
    """
    owned = (placement.stages_of[rank] for rank in range(group.size))
    have = [
        any(next(stages[index].parameters(), None) is not None for index in stage_indices) for stage_indices in owned
    ]
    if all(have) or not any(have) or group.backend == "fake":
        return group
    if sum(have) == 1:
        return Group()
    return subgroup_of(group, [rank for rank, has_any in zip(group.ranks, have, strict=True) if has_any])


def check_signatures(signatures: Mapping[int, Sequence[StepSignature]]) -> None:
    """Raises RuntimeError if a rank would wait for one that measures otherwise; keys are global ranks."""
    for rank, peer in ((a, b) for a, terms in signatures.items() for b in signatures if b != a and terms):
        local_words = [signature.words for signature in signatures[rank] if peer in signature.ranks]
        peer_words = [signature.words for signature in signatures[peer] if rank in signature.ranks]
        if local_words != peer_words:
            raise RuntimeError(
                "gradients are measured by micro-batch (as by AdaScale), but differently on the ranks of the pipeline "
                f"that sum them: rank {rank} has {' and '.join(local_words) or 'nothing'}, and rank {peer} "
                f"{' and '.join(peer_words) or 'nothing'}. Build AdaScale around the optimizer of each of these ranks, "
                "with as many parameter groups and the same num_gradients_to_accumulate, pass "
                "model_parallel_group=a group of those that do, or call unhook() on all of them"
            )
