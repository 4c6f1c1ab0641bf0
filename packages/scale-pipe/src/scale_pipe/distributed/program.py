"""A model's stages, their connections, and each rank's program for a step: the actions with all transfers between.

A schedule knows transfers between neighbors alone. A model may have skip connections, whose tensors go straight from
the stage that stashes them to the one that pops them, and parameters that several stages share, whose gradients are
summed. Both are inserted here, as numbers and names alone:

- the outputs of a computation are sent behind it: first to the neighbor, then along skips;
- gradients of shared parameters and of data-parallel replicas are exchanged after everything that a rank owes to others
  and before its first optimizer step.

All computations of all ranks are put in one global order, and a transfer is one event of two ranks in it. Each rank's
program is its part of that order. So any two ranks have the transfers between them in the same order, and some rank can
always do the first event that is not done: there is no deadlock, even where all transfers of a rank run one after the
other, and each returns only when the other side is there (NCCL's do).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import nn

from scale_core.comm.collectives import HOST, UNIT_TAGS
from scale_core.comm.group import Group
from scale_core.consistency.execution_order import Event, message_tag
from scale_pipe.distributed.message import Flow, Slot
from scale_pipe.distributed.p2p import P2PChannel
from scale_pipe.module_split.split import shared_parameters
from scale_pipe.partition.partition import check_balance, check_sequential, partition
from scale_pipe.schedules.action import COMPUTES, EVERY_MICRO_BATCH, GIVES_INPUT_GRADIENT, Action, Kind
from scale_pipe.schedules.lowering import Transfer, insert_transfers
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.skip.layout import inspect_skip_layout
from scale_pipe.skip.namespace import SkipKey


class StepKind(IntEnum):
    """The call that all ranks run together; every message carries it."""

    STEP = 1
    EVALUATION = 2

    def __str__(self) -> str:
        return "a step" if self is StepKind.STEP else "an evaluation"


class Send(NamedTuple):
    """Sends a slot to another rank; does not wait."""

    slot: Slot
    peer: int


class Receive(NamedTuple):
    """Receives a slot from another rank; the computation that needs it waits."""

    slot: Slot
    peer: int


class AverageGrads(NamedTuple):
    """Averages the gradients of all stages over their replicas, where wrappers leave that to the pipeline."""


class SumSharedGrads(NamedTuple):
    """Sums the gradients of shared parameters, once all of them have arrived."""


Task = Action | Send | Receive | AverageGrads | SumSharedGrads


class SkipTransfer(NamedTuple):
    """A skip connection, from the stage that stashes to a later one that pops."""

    name: str  # unique in the model
    source: int
    target: int
    key: SkipKey = (None, "")  # that layers use


class SharedParameter(NamedTuple):
    """A parameter that several stages hold."""

    name: str  # its first FQN in the original model
    stages: tuple[int, ...]


class CrossStageTensors(NamedTuple):
    """The messages of a model other than activations and gradients between neighbors."""

    skips: tuple[SkipTransfer, ...] = ()
    shared: tuple[SharedParameter, ...] = ()


# The stages of a model, and their connections.


def split_into_stages(
    module: nn.Module | Sequence[nn.Module], num_stages: int, balance: Sequence[int] | None
) -> list[nn.Module]:
    """Returns the stages of a sequence with its balance, or those that `split` made; no tensor moves.

    Raises TypeError if it is neither, and ValueError if numbers do not fit.
    """
    if isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList):
        check_sequential(module)
        assert isinstance(module, nn.Sequential)
        if balance is None and len(module) == num_stages:
            balance = [1] * num_stages
        numbers = check_balance(balance, len(module), num_stages)
        if len(numbers) != num_stages:
            raise ValueError(
                f"the schedule has {num_stages} stages, but balance {numbers} makes {len(numbers)}: give {num_stages} "
                f"numbers whose sum is {len(module)}"
            )
        return list(partition(module, numbers, ["cpu"] * num_stages, move=False).modules)
    stages = list(module)
    if balance is not None:
        raise ValueError("a balance is for an nn.Sequential that is not cut yet; leave it out where stages are given")
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise TypeError(
                f"expected a list of stages, as split(...) returns it, but stage {index} is {type(stage).__name__}"
            )
    if len(stages) != num_stages:
        raise ValueError(
            f"the schedule has {num_stages} stages, but {len(stages)} were given: split the model at {num_stages - 1} "
            "names, or take other stages_per_rank"
        )
    return stages


def infer_stages_per_rank(
    module: nn.Module | Sequence[nn.Module], num_ranks: int, balance: Sequence[int] | None
) -> int | None:
    """The stages of each rank by balance or list of stages; None if these do not tell, or are uneven."""
    if balance is not None:
        number = len(list(balance))
    elif isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList):
        return None
    else:
        number = len(list(module))
    return number // num_ranks if number and number % num_ranks == 0 else None


def find_connections(
    stages: Sequence[nn.Module], placement: StagePlacement
) -> tuple[CrossStageTensors, dict[str, dict[int, str]]]:
    """Finds the skips between all stages of a model, and the parameters that stages on several ranks share.

    Also returns, by name of a shared parameter and by stage, its name there.
    """
    skips: list[SkipTransfer] = []
    for number, (key, stashed_in, popped_in) in enumerate(inspect_skip_layout(stages)):
        is_taken = any(key[1] == skip.name for skip in skips)
        skips.append(SkipTransfer(f"{key[1]} ({number})" if is_taken else key[1], stashed_in, popped_in, key))
    shared, names = [], {}
    for places in shared_parameters(stages):
        name = places[0][1]
        if len({placement.rank_of[stage] for stage, _ in places}) > 1:
            shared.append(SharedParameter(name, tuple(sorted({stage for stage, _ in places}))))
            names[name] = dict(reversed(places))
    return CrossStageTensors(tuple(skips), tuple(shared)), names


def fingerprint_lines(schedule: Schedule, stages: Sequence[nn.Module], cross_stage: CrossStageTensors) -> Iterator[str]:
    """Yields the lines that all ranks must have in common; an error shows the first that differs."""
    ranks = schedule.placement.rank_of
    yield f"schedule {schedule.name}, {schedule.num_micro_batches} micro-batches, stages on ranks {ranks}"
    for rank, actions in enumerate(schedule.actions):
        digest = hashlib.sha256(" ".join(map(str, actions)).encode()).hexdigest()[:12]
        yield f"the list of rank {rank}: {len(actions)} actions, {digest}"
    for index, stage in enumerate(stages):
        names = [name for name, _ in stage.named_children()]
        yield f"stage {index}: {type(stage).__name__} of {', '.join(names)}"
        for name, param in stage.named_parameters():
            yield f"stage {index}: {name} {list(param.shape)} {param.dtype}{'' if param.requires_grad else ', frozen'}"
    yield from (f"skip {name!r} of stage {source} for stage {target}" for name, source, target, _ in cross_stage.skips)
    yield from map(str, cross_stage.shared)


# Programs.


def build_programs(schedule: Schedule, cross_stage: CrossStageTensors) -> tuple[tuple[Task, ...], ...]:
    """Returns the program of each rank for a step."""
    rank_of, num_stages = schedule.placement.rank_of, schedule.num_stages

    def transfers(action: Action) -> Iterator[Transfer[Task]]:
        for slot in slots_of(action, num_stages, cross_stage, inputs=False):
            yield Transfer(slot.target, Send(slot, rank_of[slot.target]), Receive(slot, rank_of[slot.source]))

    programs = insert_transfers(schedule.placement, schedule.compute_actions(), transfers)
    shared = shared_grad_slots(schedule.placement, cross_stage.shared)
    for rank, program in enumerate(programs):
        program.append(AverageGrads())
        for slot in shared:
            source, target = rank_of[slot.source], rank_of[slot.target]
            program += [Send(slot, target)] * (rank == source) + [Receive(slot, source)] * (rank == target)
        program += [SumSharedGrads()] * any(rank in (rank_of[slot.source], rank_of[slot.target]) for slot in shared)
        program += [action for action in schedule.actions[rank] if action.kind is Kind.STEP]
    return tuple(map(tuple, programs))


def forward_only(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Returns the tasks of a program that an evaluation needs."""
    return tuple(
        task
        for task in tasks
        if (isinstance(task, Action) and task.kind is Kind.FORWARD)
        or (isinstance(task, Send | Receive) and task.slot.flow is Flow.ACTIVATION)
    )


def slots_of(action: Action, num_stages: int, cross_stage: CrossStageTensors, *, inputs: bool) -> tuple[Slot, ...]:
    """The slots that a computation needs, from this rank or another, or fills: the neighbor's, and then skips."""
    kind, stage, micro_batch = action
    is_forward = kind is Kind.FORWARD
    if not is_forward and kind not in GIVES_INPUT_GRADIENT:
        return ()
    slots = []
    before = stage - 1 if is_forward == inputs else stage  # The boundary that is crossed is behind this stage.
    if 0 <= before < num_stages - 1:
        slots.append(Slot(Flow.ACTIVATION, "", before, before + 1, micro_batch))
    for name, source, target, _ in cross_stage.skips:
        if stage == (target if is_forward == inputs else source):
            slots.append(Slot(Flow.ACTIVATION, name, source, target, micro_batch))
    return tuple(slots) if is_forward else tuple(slot.gradient_slot() for slot in slots)


# Slots outside of computations.


def first_stage_by_rank(parameter: SharedParameter, placement: StagePlacement) -> Mapping[int, int]:
    """Returns by rank the first of its stages that holds a parameter; ranks in the order of these stages."""
    holders: dict[int, int] = {}
    for stage in sorted(parameter.stages):
        holders.setdefault(placement.rank_of[stage], stage)
    return holders


def shared_grad_slots(placement: StagePlacement, parameters: Sequence[SharedParameter]) -> list[Slot]:
    """The gradients of shared parameters, from each rank that holds one to each other such rank."""
    slots = []
    for parameter in parameters:
        holders = first_stage_by_rank(parameter, placement).values()
        slots += [
            Slot(Flow.SHARED, parameter.name, source, target, EVERY_MICRO_BATCH)
            for source in holders
            for target in holders
            if source != target
        ]
    return slots


def microbatch_grad_slots(
    placement: StagePlacement, parameters: Sequence[SharedParameter], num_micro_batches: int
) -> list[Slot]:
    """The gradient of each micro-batch, from each rank that holds a shared parameter to the first one that does."""
    slots = []
    for parameter in parameters:
        target, *others = first_stage_by_rank(parameter, placement).values()
        batches = range(num_micro_batches)
        slots += [Slot(Flow.SAMPLE, parameter.name, source, target, batch) for source in others for batch in batches]
    return slots


def state_slots(placement: StagePlacement) -> list[Slot]:
    """The state dict of each rank but the first, to that one."""
    first, *others = (stages[0] for stages in placement.stages_of)
    return [Slot(Flow.STATE, "", stage, first, EVERY_MICRO_BATCH) for stage in others]


def probe_slots(placement: StagePlacement) -> dict[int, tuple[Slot, Slot]]:
    """The probes of a link, there and back, by the first of its two stages; none between stages of one rank."""

    def probe(source: int, target: int) -> Slot:
        return Slot(Flow.PROBE, "", source, target, EVERY_MICRO_BATCH)

    ranks = placement.rank_of
    links = [stage for stage in range(placement.num_stages - 1) if ranks[stage] != ranks[stage + 1]]
    return {stage: (probe(stage, stage + 1), probe(stage + 1, stage)) for stage in links}


# One rank's program, with the facts known before it runs.


def completed_sends(
    programs: Sequence[Sequence[Task]], rank: int, num_stages: int, cross_stage: CrossStageTensors
) -> dict[int, list[Slot]]:
    """Returns by the index of a computation which sends of this rank have been received before it starts.

    A peer sends in the order of its program: by the time a message arrives here, the messages that its sender needed
    for it have arrived there.
    """
    sent_at: dict[tuple[int, Slot], int] = {}
    received_at: dict[tuple[int, Slot], int] = {}
    for peer, tasks in enumerate(programs):
        for index, task in enumerate(tasks):
            if isinstance(task, Send):
                sent_at[peer, task.slot] = index
            elif isinstance(task, Action) and task.kind in COMPUTES:
                received_at.update(
                    {(peer, slot): index for slot in slots_of(task, num_stages, cross_stage, inputs=True)}
                )
    pending: dict[int, list[tuple[int, Slot]]] = {}
    for task in programs[rank]:
        if isinstance(task, Send) and task.slot.flow is not Flow.SHARED:
            pending.setdefault(task.peer, []).append((received_at[task.peer, task.slot], task.slot))
    for sends in pending.values():
        sends.sort(reverse=True)
    peer_of = {task.slot: task.peer for task in programs[rank] if isinstance(task, Receive)}
    completed: dict[int, list[Slot]] = {}
    for index, task in enumerate(programs[rank]):
        if not (isinstance(task, Action) and task.kind in COMPUTES):
            continue
        for slot in slots_of(task, num_stages, cross_stage, inputs=True):
            if slot in peer_of:
                sends = pending.get(peer_of[slot], [])
                while sends and sends[-1][0] < sent_at[peer_of[slot], slot]:
                    completed.setdefault(index, []).append(sends.pop()[1])
    return completed


class RankProgram:
    """The tasks of one rank in order, with lookups."""

    def __init__(
        self, programs: Sequence[Sequence[Task]], rank: int, num_stages: int, cross_stage: CrossStageTensors
    ) -> None:
        self.num_stages = num_stages
        self.tasks = tuple(programs[rank])
        self.receives = [task for task in self.tasks if isinstance(task, Receive)]
        computes = [task for task in self.tasks if isinstance(task, Action) and task.kind in COMPUTES]
        self.splits_backward = any(action.kind is Kind.INPUT_GRADIENT for action in computes)
        self.completed_sends = completed_sends(programs, rank, num_stages, cross_stage)
        self.backward_order: dict[int, list[int]] = {}  # by stage, micro-batches in the order of their backwards
        for action in computes:
            if action.kind in GIVES_INPUT_GRADIENT:
                self.backward_order.setdefault(action.stage, []).append(action.micro_batch)
        self.inputs = {action: slots_of(action, num_stages, cross_stage, inputs=True) for action in computes}
        self.outputs = {action: slots_of(action, num_stages, cross_stage, inputs=False) for action in computes}
        self.source_ranks: dict[Slot, int] = {task.slot: task.peer for task in self.receives}
        self.sent_slots = frozenset(task.slot for task in self.tasks if isinstance(task, Send))
        first = self.inputs[computes[0]] if computes else ()
        # This rank does nothing before it has arrived; None on the rank that begins.
        self.first_receive = self.receives[0].slot if any(slot in self.source_ranks for slot in first) else None


class RankChannels(NamedTuple):
    """One rank's part of a schedule: its programs and the channels that they use."""

    # Activations are in both programs with the same tags, so a rank that was called for one kind of pass understands
    # a rank that was called for the other.
    programs: Mapping[StepKind, RankProgram]
    p2p: P2PChannel  # on the device: of passes, and between them of measurements
    host: P2PChannel  # of state and of values of shared parameters


def build_channels(
    schedule: Schedule,
    cross_stage: CrossStageTensors,
    group: Group,
    pipeline_id: int,
    device: torch.device,
    limit_seconds: float | None,
) -> RankChannels:
    """Builds this rank's programs and channels without any communication; `pipeline_id` makes tags its own."""
    programs = build_programs(schedule, cross_stage)
    by_kind = {StepKind.STEP: programs, StepKind.EVALUATION: [forward_only(tasks) for tasks in programs]}
    rank_programs = {
        kind: RankProgram(kind_schedule, group.rank, schedule.num_stages, cross_stage)
        for kind, kind_schedule in by_kind.items()
    }
    slots = [task.slot for tasks in programs for task in tasks if isinstance(task, Send)]
    slots += [slot for pair in probe_slots(schedule.placement).values() for slot in pair]
    slots += microbatch_grad_slots(schedule.placement, cross_stage.shared, schedule.num_micro_batches)
    on_host = [*shared_grad_slots(schedule.placement, cross_stage.shared), *state_slots(schedule.placement)]
    first = message_tag(Event(f"pipeline {pipeline_id}", schedule.name)) - UNIT_TAGS.start
    tags = [UNIT_TAGS[(first + index) % len(UNIT_TAGS)] for index in range(len(slots) + len(on_host))]
    p2p = P2PChannel(group, dict(zip(slots, tags, strict=False)), device, limit_seconds)
    host = P2PChannel(group, dict(zip(on_host, tags[len(slots) :], strict=True)), HOST, limit_seconds)
    return RankChannels(rank_programs, p2p, host)
