"""What a pass has taken, on all ranks: for pictures beside the planned ones, and for the solver."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from scale_core.comm.control_plane import exchange_text
from scale_core.comm.group import Group
from scale_pipe.distributed.comm.messages import Content, Share, pack
from scale_pipe.distributed.comm.p2p import Links
from scale_pipe.distributed.program.plan import Flow, Slot, probe_slots
from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import Simulation, TimedAction
from scale_pipe.schedules.solver.solver import solve

_SEARCH_SECONDS = 120.0
"""The longest that the solver may take beside the limit of a transfer."""

_ROUNDS = 4  # Of which the first makes what the others find made.

_KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD)


def spans_of(times: Sequence[tuple[Action, float, float]], rank: int, begin: float) -> tuple[TimedAction, ...]:
    """Returns what was measured as what pictures are drawn of.

    Args:
        times: Of a run.
        rank: Whose.
        begin: What is 0.
    """
    return tuple(TimedAction(rank, action, start - begin, end - begin) for action, start, end in times)


def gathered_spans(
    spans: Iterable[TimedAction], group: Group, begin: float, limit_seconds: float | None
) -> tuple[TimedAction, ...]:
    """Returns the spans of all ranks, on one clock that begins with the first of them; all ranks call it together.

    Args:
        spans: Of this rank, from its own begin.
        group: The ranks.
        begin: When that was, in seconds since the epoch: machines are as near as their clocks are.
        limit_seconds: How long to wait for another rank.

    Raises:
        TransferError: A rank did not come.
    """
    mine = [[str(span.action), span.start, span.end] for span in spans]
    told = [json.loads(t) for t in exchange_text(json.dumps([begin, mine]), group, limit_seconds=limit_seconds)]
    first = min((start + origin for origin, rows in told for _, start, _ in rows), default=0.0)
    found = [
        TimedAction(rank, Action.parse(text), origin + start - first, origin + end - first)
        for rank, (origin, rows) in enumerate(told)
        for text, start, end in rows
    ]
    return tuple(sorted(found, key=lambda span: (span.start, span.end, span.rank)))


def costs_of(spans: Iterable[TimedAction], num_stages: int, link: float | Sequence[float] = 0.0) -> Costs:
    """Returns the mean times of each stage; where the gradients were computed together, each is taken for a half.

    Args:
        spans: Of all ranks.
        num_stages: How many stages there are.
        link: Times of transfers, of all links or by link; spans do not tell them from waiting.
    """
    times: dict[tuple[Kind, int], list[float]] = {}
    for span in spans:
        times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
    means = {key: sum(found) / len(found) for key, found in times.items()}

    def of(kind: Kind) -> list[float]:
        halves = [means.get((Kind.BACKWARD, stage), 0.0) / 2 for stage in range(num_stages)]
        return [
            means.get((kind, stage), half if kind is not Kind.FORWARD else 0.0) for stage, half in enumerate(halves)
        ]

    forward, there, weights = (of(kind) for kind in _KINDS[:3])
    return Costs.measured(forward, there, weights, link)


def link_times(
    placement: Placement, links: Links, probes: Links, group: Group, limit_seconds: float | None
) -> list[float]:
    """Returns the time of a transfer from each stage to the next, in seconds; all ranks call it together.

    As many bytes as an activation of the last pass had go there and back, one link after the other; the least half of
    such a time counts. Where both stages stand on one rank, nothing travels.

    Args:
        placement: Which rank holds which stage.
        links: Of the passes: they know the activations.
        probes: What is sent over.
        group: The ranks.
        limit_seconds: How long to wait for another rank.

    Raises:
        LinkError, TransferError: A rank did not come.
    """
    found = {}
    for stage, (there, back) in probe_slots(placement).items():
        here, peer = placement.rank_of[stage], placement.rank_of[stage + 1]
        if group.rank == here:
            num_bytes = links.num_bytes(Slot(Flow.ACTIVATION, "", stage, stage + 1, 0))
            found[stage] = min(_round_trip(probes, there, back, peer, num_bytes) for _ in range(_ROUNDS)) / 2
        elif group.rank == peer:
            for _ in range(_ROUNDS):
                _echo(probes, there, back, here)
    told = [json.loads(text) for text in exchange_text(json.dumps(found), group, limit_seconds=limit_seconds)]
    times = {int(stage): seconds for own in told for stage, seconds in own.items()}
    return [times.get(stage, 0.0) for stage in range(placement.num_stages - 1)]


def _round_trip(probes: Links, there: Slot, back: Slot, peer: int, num_bytes: int) -> float:
    content = torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=probes.device)
    probes.post(back, peer)
    start = time.perf_counter()
    probes.send(there, peer, Content(*pack(content), Share(1, 1, 1)))
    message = probes.take(back, peer)
    assert isinstance(message, Content)
    message.tensors[0][-1].item()  # A device may still be busy with it.
    end = time.perf_counter()
    probes.finish()
    return end - start


def _echo(probes: Links, there: Slot, back: Slot, peer: int) -> None:
    probes.post(there, peer)
    message = probes.take(there, peer)
    assert isinstance(message, Content)
    probes.send(back, peer, message)
    probes.finish()


def solved(
    schedule: Schedule,
    costs: Costs,
    group: Group,
    memory_cap: float | Sequence[float] | None,
    limit_seconds: float | None,
) -> Schedule:
    """Returns the schedule that the first rank finds for measured costs; all ranks call it together.

    Args:
        schedule: What has run; its placement stays, since stages stay where they are.
        costs: Measured.
        group: The ranks.
        memory_cap: As the solver takes it.
        limit_seconds: How long to wait for another rank, beside the search.

    Raises:
        ValueError: The solver refuses, as where the cap is too small; on all ranks alike.
        TransferError: A rank did not come.
    """
    found: dict[str, Any] = {}
    cause: ValueError | None = None
    if group.rank == 0:
        try:
            solution = solve(
                costs,
                schedule.num_ranks,
                schedule.num_micro_batches,
                memory_cap=memory_cap,
                placement=schedule.placement,
            )
            found["schedule"] = solution.schedule.to_json()
        except ValueError as error:
            cause = error
            found["refused"] = str(error)
    limit = None if limit_seconds is None else limit_seconds + _SEARCH_SECONDS
    told = json.loads(exchange_text(json.dumps(found), group, limit_seconds=limit)[0])
    if "refused" in told:
        raise ValueError(f"no schedule was found; {schedule.name} stays: {told['refused']}") from cause
    return Schedule.from_json(told["schedule"])


def measured(schedule: Schedule, spans: tuple[TimedAction, ...]) -> Simulation:
    """Returns measured spans as what pictures and traces are made of.

    Args:
        schedule: What has run.
        spans: Of all ranks.
    """
    return Simulation(schedule, costs_of(spans, schedule.num_stages), spans)
