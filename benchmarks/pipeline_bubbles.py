"""Bubbles of the solver's schedules beside the proved bounds, the classic schedules and torch's.

    python benchmarks/pipeline_bubbles.py                      # every row; about three minutes of one core
    python benchmarks/pipeline_bubbles.py --smoke              # 4 x 8 only
    python benchmarks/pipeline_bubbles.py --check              # fails where a goal is missed
    python benchmarks/pipeline_bubbles.py --date 2026-11-21    # also writes results/2026-11-21-pipeline_bubbles.*

F = 1 and I + W = 2 per stage, no transfer time; peaks and caps in live micro-batches (model equivalents). A bubble is
the share of the makespan in which the busiest rank is idle; each schedule is validated under its cap, and timed by the
simulator, which shares no code with the search. Evaluations are counted, so only CPU seconds depend on the machine.
"torch" is the best of torch 2.13's seven schedules: their orders were replayed under the same costs once and stand
here as numbers; they hold P to P + 1/2 micro-batches. A bound is proved for the placements that are tried.

Of uneven stages the first takes 20 % longer and the last 50 %. In a V one rank holds both and is the busiest; no
schedule of that placement is faster than one in which it is never idle.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from report import Table, save

from scale_pipe import Costs, solve
from scale_pipe.schedules.placement import StagePlacement


@dataclass(frozen=True)
class Row:
    """A pipeline, with its goal and torch's bubble where there are such."""

    ranks: int
    batches: int
    stages: int
    input_gradient: float
    cap: float
    goal: float | None = None
    torch: float | None = None

    def costs(self, scale: Sequence[float]) -> Costs:
        """The costs with all times of a stage multiplied by its scale."""
        return Costs.measured(
            scale,
            [self.input_gradient * time for time in scale],
            [(2 - self.input_gradient) * time for time in scale],
        )


ROWS = (
    Row(4, 8, 2, 1.0, 4, None, 0.059),
    Row(4, 8, 2, 1.4, 4, 0.081, 0.091),
    Row(4, 8, 2, 1.6, 4, 0.121, 0.121),
    Row(4, 8, 2, 1.4, 5, None, 0.091),
    Row(4, 8, 2, 1.6, 5, 0.081, 0.121),
    Row(4, 8, 2, 1.0, 3, 0.095),
    Row(4, 8, 2, 1.4, 3, 0.165),
    Row(4, 8, 2, 1.6, 3, 0.205),
    Row(4, 8, 4, 1.4, 4, 0.044, 0.053),
    Row(4, 8, 4, 1.6, 4, 0.048, 0.064),
    Row(8, 16, 2, 1.0, 8, None, 0.068),
    Row(8, 16, 2, 1.4, 8, None, 0.104),
    Row(8, 16, 2, 1.6, 12, 0.100, 0.138),
    Row(8, 16, 4, 1.4, 8, 0.057, 0.062),
    Row(8, 16, 4, 1.6, 8, 0.065, 0.074),
)
UNEVEN_ROWS = (
    Row(4, 8, 2, 1.0, 4, 0.0),
    Row(4, 8, 2, 1.4, 4, 0.0),
    Row(4, 8, 2, 1.6, 4, 0.0),
    Row(4, 8, 2, 1.4, 3),
    Row(8, 16, 2, 1.4, 8, 0.0),
)
ROUNDING = 1e-9


@dataclass(frozen=True)
class Result:
    """What was found for a row; all but the seconds are the same on every machine."""

    row: Row
    uneven: bool
    best_classic: str | None
    classic_bubble: float | None
    bubble: float
    bound: float
    peak: float
    placement: str
    visits: int
    cpu_seconds: float

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached, if there is one."""
        return self.row.goal is None or self.bubble <= self.row.goal + ROUNDING


def measure(row: Row, *, uneven: bool) -> Result:
    """Solves a row; uneven stages in a V."""
    num_stages = row.ranks * row.stages
    scale = [1.2, *[1.0] * (num_stages - 2), 1.5] if uneven else [1.0] * num_stages
    placement = StagePlacement.wave(row.ranks, row.stages) if uneven else None
    began = time.process_time()
    found = solve(row.costs(scale), row.ranks, row.batches, memory_cap=row.cap, placement=placement)
    seconds = time.process_time() - began
    work = max(found.simulation.busy)
    classic = found.best_classic
    return Result(
        row=row,
        uneven=uneven,
        best_classic=classic and classic[0],
        classic_bubble=classic and 1 - work / classic[1],
        bubble=found.bubble,
        bound=1 - work / found.best_bound,
        peak=max(found.simulation.peak_live),
        placement=found.schedule.placement.shape,
        visits=found.visits,
        cpu_seconds=round(seconds, 1),
    )


HEADS = ("P x M", "stages", "I:W", "cap", "torch", "best classic", "goal", "solved", "bound", "placement", "CPU s")


def cells(result: Result) -> list[str]:
    """A result as a line of the table."""
    row = result.row
    return [
        f"{row.ranks}x{row.batches}",
        str(row.stages),
        f"{row.input_gradient}:{2 - row.input_gradient:.1f}",
        f"{row.cap:g}",
        "-" if row.torch is None else f"{row.torch:.3f}",
        "-" if result.classic_bubble is None else f"{result.best_classic} {result.classic_bubble:.4f}",
        "-" if row.goal is None else f"{row.goal:.3f}",
        f"{abs(result.bubble):.4f}",
        f"{abs(result.bound):.4f}",
        result.placement,
        f"{result.cpu_seconds:.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="four ranks and eight micro-batches only")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("--date", help="writes results/DATE-pipeline_bubbles.json and .md")
    options = parser.parse_args(arguments)
    results = []
    for uneven, rows in ((False, ROWS), (True, UNEVEN_ROWS)):
        for row in rows:
            if row.ranks <= 4 or not options.smoke:
                results.append(measure(row, uneven=uneven))
                print(" | ".join(cells(results[-1])), file=sys.stderr, flush=True)
    tables = [
        Table(title, HEADS, [cells(result) for result in results if result.uneven == uneven])
        for title, uneven in (("Bubbles, equal stages", False), ("Bubbles in a V, uneven stages", True))
    ]
    print(*(table.markdown() for table in tables), sep="\n")
    if options.date:
        save("pipeline_bubbles", options.date, __doc__ or "", tables, [asdict(result) for result in results])
    missed = [result for result in results if options.check and not result.is_met]
    for result in missed:
        print(f"missed: {result.row}: {result.bubble:.4f}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
