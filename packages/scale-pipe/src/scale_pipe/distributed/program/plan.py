"""What one rank does in a step, with everything that travels: a schedule's list made whole for a model.

A schedule knows of transfers between neighbours alone. A model may have skip connections, whose tensors go straight
from the stage that stashes them to the one that pops them, and parameters that several stages share, whose gradients
have to be added up. Both are woven in here, in numbers and names alone:

- what a computation gives leaves behind it: first for the neighbour, then for skips;
- gradients of shared parameters, and those of replicas, are exchanged after all that a rank owes to others and before
  its first step.

All computations of all ranks stand in one global order, and a transfer is one event of two ranks in it. Each rank's
list is its part of that order. So any two ranks have the transfers between them in the same order, and whoever follows
the lists can always do the first event that is not done: nobody waits in a circle, even where all transfers of a rank
pass one after the other, and each returns only when the other side is there (NCCL's do).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from scale_pipe.schedules.action import EVERY_MICRO_BATCH, GIVES_INPUT_GRADIENT, Action, Kind
from scale_pipe.schedules.lowering import Transfer, with_transfers
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule


class Flow(StrEnum):
    """What travels."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SHARED = "gradient of a shared parameter"
    SAMPLE = "one micro-batch's gradient of a shared parameter"
    STATE = "state"
    PROBE = "probe of the link"


class Slot(NamedTuple):
    """One thing that travels once in a step; where both stages stand on one rank it is handed over there.

    Attributes:
        flow: What it is.
        name: "" for what one stage hands to the next; otherwise the name of the skip or of the shared parameter.
        source: The stage that it comes from.
        target: The stage that it goes to.
        micro_batch: Which; `EVERY_MICRO_BATCH` of shared parameters.
    """

    flow: Flow
    name: str
    source: int
    target: int
    micro_batch: int

    def back(self) -> Slot:
        """Returns where the gradient of an activation travels."""
        assert self.flow is Flow.ACTIVATION
        return Slot(Flow.GRADIENT, self.name, self.target, self.source, self.micro_batch)

    def __str__(self) -> str:
        what = f"{self.flow.value} {self.name!r}" if self.name else self.flow.value
        batch = "" if self.micro_batch == EVERY_MICRO_BATCH else f", micro-batch {self.micro_batch}"
        return f"{what} of stage {self.source} for stage {self.target}{batch}"


class Send(NamedTuple):
    """A slot leaves for another rank; does not wait for it."""

    slot: Slot
    peer: int


class Receive(NamedTuple):
    """A slot may arrive from another rank; whoever needs it waits."""

    slot: Slot
    peer: int


class Average(NamedTuple):
    """The gradients of all stages are averaged over their replicas, where wrappers leave that to the pipeline."""


class AddShared(NamedTuple):
    """The gradients of shared parameters are added up, once all of them are there."""


Task = Action | Send | Receive | Average | AddShared


class Skip(NamedTuple):
    """A tensor that goes past stages.

    Attributes:
        name: Unique among the skips of a model.
        source: The stage that stashes it.
        target: The stage that pops it, behind the other.
    """

    name: str
    source: int
    target: int


class SharedParameter(NamedTuple):
    """A parameter that several stages hold.

    Attributes:
        name: Its name in the plain model, the first one.
        stages: Who holds it.
    """

    name: str
    stages: tuple[int, ...]


class Wiring(NamedTuple):
    """What a model adds to a schedule.

    Attributes:
        skips: Its skip connections.
        shared: The parameters that stand in several stages.
    """

    skips: tuple[Skip, ...] = ()
    shared: tuple[SharedParameter, ...] = ()


def plan(schedule: Schedule, wiring: Wiring) -> tuple[tuple[Task, ...], ...]:
    """Returns by rank what it does in a step, in order.

    Args:
        schedule: Any that is valid; its computations and steps are read.
        wiring: What the model adds.
    """
    rank_of, num_stages = schedule.placement.rank_of, schedule.num_stages

    def given(action: Action) -> Iterator[Transfer[Task]]:
        for slot in leaving(action, num_stages, wiring):
            yield Transfer(slot.target, Send(slot, rank_of[slot.target]), Receive(slot, rank_of[slot.source]))

    tasks = with_transfers(schedule.placement, schedule.computes(), given)
    shares = shared_slots(schedule.placement, wiring.shared)
    for rank, own in enumerate(tasks):
        own.append(Average())
        for slot in shares:
            source, target = rank_of[slot.source], rank_of[slot.target]
            own += [Send(slot, target)] * (rank == source) + [Receive(slot, source)] * (rank == target)
        own += [AddShared()] * any(rank in (rank_of[slot.source], rank_of[slot.target]) for slot in shares)
        own += [action for action in schedule.actions[rank] if action.kind is Kind.STEP]
    return tuple(map(tuple, tasks))


def forward_plan(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Returns what is left of a plan where no gradients are wanted.

    Args:
        tasks: Of `plan`.
    """
    return tuple(
        task
        for task in tasks
        if (isinstance(task, Action) and task.kind is Kind.FORWARD)
        or (isinstance(task, Send | Receive) and task.slot.flow is Flow.ACTIVATION)
    )


def arriving(action: Action, num_stages: int, wiring: Wiring) -> tuple[Slot, ...]:
    """Returns what a computation takes, from this rank or another: first what neighbours hand over, then skips.

    Args:
        action: A forward, or what gives the gradient of the input.
        num_stages: How many stages there are.
        wiring: What the model adds.
    """
    kind, stage, micro_batch = action
    slots = []
    if kind is Kind.FORWARD and stage > 0:
        slots.append(Slot(Flow.ACTIVATION, "", stage - 1, stage, micro_batch))
    if kind in GIVES_INPUT_GRADIENT and stage + 1 < num_stages:
        slots.append(Slot(Flow.GRADIENT, "", stage + 1, stage, micro_batch))
    return (*slots, *_skips_of(action, wiring, arriving=True))


def leaving(action: Action, num_stages: int, wiring: Wiring) -> tuple[Slot, ...]:
    """Returns what a computation gives, in the order of `arriving`.

    Args:
        action: A forward, or what gives the gradient of the input.
        num_stages: How many stages there are.
        wiring: What the model adds.
    """
    kind, stage, micro_batch = action
    slots = []
    if kind is Kind.FORWARD and stage + 1 < num_stages:
        slots.append(Slot(Flow.ACTIVATION, "", stage, stage + 1, micro_batch))
    if kind in GIVES_INPUT_GRADIENT and stage > 0:
        slots.append(Slot(Flow.GRADIENT, "", stage, stage - 1, micro_batch))
    return (*slots, *_skips_of(action, wiring, arriving=False))


def shared_slots(placement: Placement, parameters: Sequence[SharedParameter]) -> list[Slot]:
    """Returns the gradients of shared parameters that travel: from each rank that holds one to each other such rank.

    A rank stands there by the first of its stages that holds the parameter.

    Args:
        placement: Which rank holds which stage.
        parameters: Those that are shared.
    """
    slots = []
    for parameter in parameters:
        holders = first_holders(parameter, placement)
        slots += [
            Slot(Flow.SHARED, parameter.name, source, target, EVERY_MICRO_BATCH)
            for source in holders.values()
            for target in holders.values()
            if source != target
        ]
    return slots


def probe_slots(placement: Placement) -> dict[int, tuple[Slot, Slot]]:
    """Returns what travels to measure a link, there and back, by the first of its two stages.

    Args:
        placement: Which rank holds which stage; between stages of one rank there is no link.
    """
    pairs = ((stage, stage + 1) for stage in range(placement.num_stages - 1))
    return {
        first: (
            Slot(Flow.PROBE, "", first, second, EVERY_MICRO_BATCH),
            Slot(Flow.PROBE, "", second, first, EVERY_MICRO_BATCH),
        )
        for first, second in pairs
        if placement.rank_of[first] != placement.rank_of[second]
    }


def first_holders(parameter: SharedParameter, placement: Placement) -> Mapping[int, int]:
    """Returns by rank the first of its stages that holds a parameter; ranks in the order of these stages.

    Args:
        parameter: A shared one.
        placement: Which rank holds which stage.
    """
    holders: dict[int, int] = {}
    for stage in sorted(parameter.stages):
        holders.setdefault(placement.rank_of[stage], stage)
    return holders


def _skips_of(action: Action, wiring: Wiring, *, arriving: bool) -> list[Slot]:
    """The skips that a computation takes or gives."""
    kind, stage, micro_batch = action
    forward = kind is Kind.FORWARD
    if not forward and kind not in GIVES_INPUT_GRADIENT:
        return []
    slots = []
    for name, source, target in wiring.skips:
        if stage == (target if forward == arriving else source):
            slot = Slot(Flow.ACTIVATION, name, source, target, micro_batch)
            slots.append(slot if forward else slot.back())
    return slots
