"""Bubbles of the solver's schedules beside the proved bounds, the classic schedules and torch's.

    python benchmarks/pipeline_bubbles.py            # every row; about five minutes of one core
    python benchmarks/pipeline_bubbles.py --small    # 4 x 8 only

F = 1 and I + W = 2, no transfer time; peaks in live micro-batches (model equivalents). Evaluations are counted, so
only CPU seconds depend on the machine. "torch" is the best of torch 2.13's seven schedules: their orders
were replayed under the same costs once and stand here as numbers; they hold P to P + 1/2 micro-batches.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

from scale_pipe import Costs, solve


class Row(NamedTuple):
    """A pipeline, with its goal and torch's bubble where there are such."""

    ranks: int
    batches: int
    stages: int
    input_gradient: float
    cap: float
    goal: float | None
    torch: float | None


ROWS = (
    Row(4, 8, 2, 1.0, 4, None, 0.059),
    Row(4, 8, 2, 1.4, 4, 0.081, 0.091),
    Row(4, 8, 2, 1.6, 4, None, 0.121),
    Row(4, 8, 2, 1.4, 5, None, 0.091),
    Row(4, 8, 2, 1.6, 5, 0.081, 0.121),
    Row(4, 8, 2, 1.0, 3, 0.095, None),
    Row(4, 8, 2, 1.4, 3, 0.165, None),
    Row(4, 8, 2, 1.6, 3, 0.205, None),
    Row(4, 8, 4, 1.4, 4, 0.044, 0.053),
    Row(4, 8, 4, 1.6, 4, 0.048, 0.064),
    Row(8, 16, 2, 1.0, 8, None, 0.068),
    Row(8, 16, 2, 1.4, 8, None, 0.104),
    Row(8, 16, 2, 1.6, 12, 0.100, 0.138),
    Row(8, 16, 4, 1.4, 8, 0.057, 0.062),
    Row(8, 16, 4, 1.6, 8, 0.065, 0.074),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="four ranks and eight micro-batches only")
    small = parser.parse_args().small
    print("| P x M | stages | I:W | cap | torch | best classic | goal | solved | bound | placement | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        if small and row.ranks > 4:
            continue
        times = {"input_gradient": row.input_gradient, "weight_gradient": 2 - row.input_gradient}
        began = time.process_time()
        found = solve(Costs.uniform(row.ranks * row.stages, **times), row.ranks, row.batches, memory_cap=row.cap)
        seconds = time.process_time() - began
        work = 3 * row.batches * row.stages
        classic = (
            "-" if found.best_classic is None else f"{found.best_classic[0]} {1 - work / found.best_classic[1]:.4f}"
        )
        cells = [
            f"{row.ranks}x{row.batches}",
            row.stages,
            f"{row.input_gradient}:{2 - row.input_gradient:.1f}",
            f"{row.cap:g}",
            row.torch or "-",
            classic,
            row.goal or "-",
            f"{found.bubble:.4f}",
            f"{1 - work / found.best_bound:.4f}",
            found.schedule.placement.shape,
            f"{seconds:.1f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
