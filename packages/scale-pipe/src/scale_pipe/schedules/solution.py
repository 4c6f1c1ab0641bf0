"""What the solver has found, and how good it is."""

from __future__ import annotations

from dataclasses import dataclass

from scale_pipe.schedules.bounds import Bound
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import Simulation


@dataclass(frozen=True)
class Solution:
    """What the solver has found; `print` says how good it is.

    Attributes:
        simulation: The schedule in time, under the costs.
        bound: What no schedule of this placement can beat under the memory cap.
        best_bound: The makespan that no schedule of any tried placement can beat.
        best_classic: The name and makespan of the best classic schedule that keeps the cap; None where none does.
        visits: How many actions were evaluated, in all.
    """

    simulation: Simulation
    bound: Bound
    best_bound: float
    best_classic: tuple[str, float] | None
    visits: int

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def makespan(self) -> float:
        """Its time."""
        return self.simulation.makespan

    @property
    def bubble(self) -> float:
        """The share of it in which the busiest rank is idle."""
        return self.simulation.bubble

    @property
    def gap(self) -> float:
        """By how much a better schedule could be faster at most, as a share of the bound; 0 is proved the best."""
        return max(0.0, self.makespan / self.best_bound - 1) if self.best_bound else 0.0

    def __str__(self) -> str:
        if self.best_classic is None:
            classic = "no classic schedule keeps the memory cap"
        else:
            name, makespan = self.best_classic
            classic = f"{name} takes {makespan:g} ({makespan / self.makespan - 1:+.2%})" if self.makespan else name
        proof = "proved to be the fastest" if self.gap < 1e-9 else f"at most {self.gap:.2%} above the fastest"
        return (
            f"{self.schedule.placement.shape} placement: makespan {self.makespan:g}, bubble {self.bubble:.2%}, "
            f"peak {max(self.simulation.peak_live):g} live micro-batches; {proof}\n"
            f"bound {self.bound.makespan:g}: {self.bound.reason}\n"
            f"best classic: {classic}"
        )
