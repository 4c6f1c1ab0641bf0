"""Measured times of a pass on all ranks: drawn next to the planned ones, and given to the solver."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

import torch

from scale_core.comm.collectives import exchange_text
from scale_core.comm.group import Group
from scale_pipe.distributed.message import WHOLE, Flow, Payload, Slot
from scale_pipe.distributed.p2p import P2PChannel
from scale_pipe.distributed.program import probe_slots
from scale_pipe.distributed.stage import pack
from scale_pipe.distributed.step import TimedPass
from scale_pipe.schedules.action import Action, Kind, TimedAction
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import Schedule

_SEARCH_SECONDS = 120.0  # the longest search, in addition to the limit of a transfer
_ROUNDS = 4  # of probes; the first one allocates memory for the others


def local_spans(timed: TimedPass, rank: int) -> tuple[TimedAction, ...]:
    """This rank's actions of a pass, in seconds from its start."""
    return tuple(TimedAction(rank, action, a - timed.start, b - timed.start) for action, a, b in timed.actions)


def gather_spans(timed: TimedPass, group: Group, limit_seconds: float | None) -> tuple[TimedAction, ...]:
    """The actions of all ranks, in seconds from the first of them; all ranks call it together.

    Ranks on several machines are aligned as well as the clocks of these.
    """
    local_rows = [[str(span.action), span.start, span.end] for span in local_spans(timed, group.rank)]
    texts = exchange_text(json.dumps([timed.wall_clock, local_rows]), group, limit_seconds=limit_seconds)
    rows = [json.loads(text) for text in texts]
    first = min((start + origin for origin, spans in rows for _, start, _ in spans), default=0.0)
    timed_actions = [
        TimedAction(rank, Action.parse(text), origin + start - first, origin + end - first)
        for rank, (origin, spans) in enumerate(rows)
        for text, start, end in spans
    ]
    return tuple(sorted(timed_actions, key=lambda span: (span.start, span.end, span.rank)))


def costs_from_spans(spans: Iterable[TimedAction], num_stages: int, link: float | Sequence[float] = 0.0) -> Costs:
    """Mean seconds of each stage's actions; a backward that computes both gradients counts half for each.

    `link` are the seconds of transfers, of all links or by link: spans do not tell them from waiting.
    """
    times: dict[tuple[Kind, int], list[float]] = {}
    for span in spans:
        times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
    means = {key: sum(samples) / len(samples) for key, samples in times.items()}
    halves = [means.get((Kind.BACKWARD, stage), 0.0) / 2 for stage in range(num_stages)]
    forward = [means.get((Kind.FORWARD, stage), 0.0) for stage in range(num_stages)]
    inputs = [means.get((Kind.INPUT_GRADIENT, stage), half) for stage, half in enumerate(halves)]
    weights = [means.get((Kind.WEIGHT_GRADIENT, stage), half) for stage, half in enumerate(halves)]
    return Costs.measured(forward, inputs, weights, link)


def measure_link_times(
    placement: StagePlacement, channel: P2PChannel, group: Group, limit_seconds: float | None
) -> list[float]:
    """Seconds of a transfer from each stage to the next, 0 within a rank; all ranks call it together.

    As many bytes as an activation of the last pass in `channel` are sent there and back, one link after the other; the
    shortest round trip counts. Raises P2PError or TransferError if a rank did not come.
    """
    link_times = {}
    for stage, (send_slot, back) in probe_slots(placement).items():
        rank, peer = placement.rank_of[stage], placement.rank_of[stage + 1]
        if group.rank == rank:
            num_bytes = channel.num_bytes(Slot(Flow.ACTIVATION, "", stage, stage + 1, 0))
            link_times[stage] = min(_round_trip(channel, send_slot, back, peer, num_bytes) for _ in range(_ROUNDS)) / 2
        elif group.rank == peer:
            for _ in range(_ROUNDS):
                _echo(channel, send_slot, back, rank)
    rows = [json.loads(text) for text in exchange_text(json.dumps(link_times), group, limit_seconds=limit_seconds)]
    times = {int(stage): seconds for row in rows for stage, seconds in row.items()}
    return [times.get(stage, 0.0) for stage in range(placement.num_stages - 1)]


def _round_trip(channel: P2PChannel, there: Slot, back: Slot, peer: int, num_bytes: int) -> float:
    data = torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=channel.device)
    channel.post_receive(back, peer)
    start = time.perf_counter()
    channel.send(there, peer, Payload(*pack(data), WHOLE))
    message = channel.receive(back, peer)
    assert isinstance(message, Payload)
    message.tensors[0][-1].item()  # A device may still be busy with it.
    end = time.perf_counter()
    channel.wait_sends()
    return end - start


def _echo(channel: P2PChannel, there: Slot, back: Slot, peer: int) -> None:
    channel.post_receive(there, peer)
    message = channel.receive(there, peer)
    assert isinstance(message, Payload)
    channel.send(back, peer, message)
    channel.wait_sends()


def solve_on_first_rank(
    schedule: Schedule,
    costs: Costs,
    group: Group,
    memory_cap: float | Sequence[float] | None,
    limit_seconds: float | None,
) -> Schedule:
    """The schedule that the first rank finds for measured costs and the same placement; all ranks call it together.

    Raises ValueError on all ranks if the solver refuses, as where the cap is too small.
    """
    from scale_pipe.schedules.solver.solver import solve  # Other steps need no solver.

    text, cause = "", None
    if group.rank == 0:
        ranks, batches = schedule.num_ranks, schedule.num_micro_batches
        try:
            solution = solve(costs, ranks, batches, memory_cap=memory_cap, placement=schedule.placement)
            text = json.dumps([solution.schedule.to_json(), ""])
        except ValueError as error:
            text, cause = json.dumps(["", str(error)]), error
    limit = None if limit_seconds is None else limit_seconds + _SEARCH_SECONDS
    answer, refused = json.loads(exchange_text(text, group, limit_seconds=limit)[0])
    if refused:
        raise ValueError(f"no schedule was found; {schedule.name} stays: {refused}") from cause
    return Schedule.from_json(answer)
