"""The simulator: how long a schedule takes under measured costs, and the memory of each rank meanwhile.

The model: a rank does one computation at a time, in its list's order, each as soon as its tensor has arrived. Transfers
start when their list reaches them, overlap with computations, and pass one after another over each directed link
between two ranks. Activations of a stage and a micro-batch are held from the start of the forward to the end of the
weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from scale_pipe.integers import checked_arguments
from scale_pipe.schedules.action import COMPUTES, SENDS, Action, TimedAction, live_change, matching_transfer
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.validate import needed_send, validate


@dataclass(frozen=True)
class ScheduleSimulation:
    """A schedule in time; `print` shows a table.

    Attributes:
        schedule: The schedule.
        costs: The times of its stages and links.
        spans: All computations and sends, by start.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import gpipe
        >>> simulation = simulate(gpipe(2, 4))
        >>> simulation.makespan, round(simulation.bubble, 2)
        (15.0, 0.2)

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[TimedAction, ...]

    @cached_property
    def makespan(self) -> float:
        """When the last computation is over."""
        return max(span.end for span in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By rank, the time of its computations."""
        busy = [0.0] * self.schedule.num_ranks
        for span in self.spans:
            if span.action.kind in COMPUTES:
                busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the busiest rank is idle: 1 - work / makespan.

        With equal stages it is the same on every rank. Other ranks are idle for longer where they have less work, which
        is a matter of the balance and not of the schedule; see `idle`.
        """
        return 1 - max(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """By rank, the share of the makespan in which it does not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @cached_property
    def peak_live(self) -> tuple[float, ...]:
        """By rank, the most live micro-batches, in model equivalents: one is a micro-batch on all its stages."""
        return peak_live(self.schedule)

    def live_over_time(self, rank: int) -> list[tuple[float, float]]:
        """Returns a rank's live micro-batches over time: (time, number from then on), in model equivalents."""
        share, live, steps = 1 / len(self.schedule.placement.stages_of[rank]), 0, [(0.0, 0.0)]
        for span in self.spans:
            if span.rank == rank and (change := live_change(span.action)):
                live += change
                steps.append((span.start if change > 0 else span.end, live * share))
        return steps

    def __str__(self) -> str:
        head = (
            f"{self.schedule.name}: makespan {self.makespan:g}, bubble {self.bubble:.2%}, "
            f"peak {max(self.peak_live):g} live micro-batches"
        )
        rows = [
            f"{rank:4}  {self.busy[rank]:8.4g}  {self.idle[rank]:7.2%}  {self.peak_live[rank]:5g}"
            for rank in range(self.schedule.num_ranks)
        ]
        return "\n".join([head, "rank      busy     idle   peak", *rows])


def peak_live(schedule: Schedule) -> tuple[float, ...]:
    """Returns by rank the most live micro-batches, in model equivalents, whatever the times are."""
    return tuple(
        max(accumulate(map(live_change, actions), initial=0)) / len(stages)
        for actions, stages in zip(schedule.actions, schedule.placement.stages_of, strict=True)
    )


@checked_arguments
def simulate(schedule: Schedule, costs: Costs | None = None) -> ScheduleSimulation:
    """Simulates a schedule.

    Args:
        schedule: Any that can run.
        costs: The times of its stages and links; None takes 1 for a forward and for each gradient, and 0 for a link.

    Raises:
        ScheduleError: It cannot run; see `validate`.
        ValueError: The costs are for a different number of stages.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import gpipe
        >>> simulation = simulate(gpipe(2, 4))
        >>> round(simulation.bubble, 2)
        0.2

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    validate(schedule, transport="posted")
    costs = costs or Costs.uniform(schedule.num_stages)
    costs.check_for(schedule.placement)
    rank_of = schedule.placement.rank_of
    positions, clocks = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    links_free: dict[tuple[int, int], float] = {}
    arrivals: dict[Action, float] = {}  # Of sends that have run.
    spans: list[TimedAction] = []
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                start = clocks[rank]
                if action.kind in COMPUTES:
                    if (source := needed_send(action, rank_of)) is not None:
                        if source not in arrivals:
                            break
                        start = max(start, arrivals[source])
                    clocks[rank] = start + costs.duration(action)
                    spans.append(TimedAction(rank, action, start, clocks[rank]))
                elif action.kind in SENDS:
                    target = matching_transfer(action).stage
                    link = rank, rank_of[target]
                    start = max(start, links_free.get(link, 0.0))
                    end = start + costs.link[min(action.stage, target)]
                    links_free[link] = arrivals[action] = end
                    spans.append(TimedAction(rank, action, start, end))
                positions[rank] += 1
                moving = True
    assert all(position == len(actions) for position, actions in zip(positions, schedule.actions, strict=True))
    return ScheduleSimulation(schedule, costs, tuple(sorted(spans, key=lambda span: (span.start, span.end, span.rank))))
