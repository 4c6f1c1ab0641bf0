"""What the contracts cost: the share of a training step that goes into comparing what the ranks do.

Two ranks train the GPT of `data_parallel.py` under scale-fsdp. Every call into a `Contract` is timed by the CPU time of
the thread that makes it; what the step takes is the CPU time of all threads. Steps in which each event is compared
before its collective (the first two) are left out of "later steps", which is what training pays; the goal there is
below 1 %. Waiting for the other rank takes no CPU time and is not counted: a step has to wait for it somewhere.

    python benchmarks/contracts.py --date 2026-11-21
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES, ROWS
from report import Table, save

from scale_core.consistency.contract import Contract
from scale_core.testing import run_ranks

GOAL = 0.01
CHECKED_STEPS = 2


class Clock:
    """Adds up the CPU time of this thread inside of the outermost call into a contract."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, begun = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.thread_time() - begun

        return call


def train(row: str, steps: int) -> list[tuple[float, float]]:
    """Trains on this rank; returns each step's CPU seconds in contracts and in all."""
    clock = Clock()
    for name in ("begin", "announce", "close", "leave", "agree"):
        setattr(Contract, name, clock.timed(getattr(Contract, name)))
    torch.manual_seed(0)
    model, optimizer = ENGINES["scale"].start(ROWS[row].build())
    generator = torch.Generator().manual_seed(dist.get_rank())
    spent = []
    for _ in range(steps):
        clock.seconds, begun = 0.0, time.process_time()
        optimizer.zero_grad()
        model(*ROWS[row].batch(generator)).backward()
        optimizer.step()
        spent.append((clock.seconds, time.process_time() - begun))
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(description="The share of the contracts in a step.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, to see that it runs")
    parser.add_argument("--date", help="write the figures to results/ under this date")
    options = parser.parse_args()
    row, steps = ("tiny", 4) if options.smoke else ("gpt", options.steps)
    ranks = run_ranks(train, 2, row, steps, limit_seconds=600.0)
    rows, figures = [], []
    for title, part in (("first two steps", slice(CHECKED_STEPS)), ("later steps", slice(CHECKED_STEPS, None))):
        contracts = statistics.median(contract for spent in ranks for contract, _ in spent[part])
        whole = statistics.median(step for spent in ranks for _, step in spent[part])
        figures.append({"steps": title, "contract_cpu_seconds": contracts, "step_cpu_seconds": whole})
        goal = f"< {GOAL:.0%}" if title == "later steps" else ""
        rows.append([title, f"{contracts * 1e3:.2f}", f"{whole * 1e3:.0f}", f"{contracts / whole:.2%}", goal])
    heads = ["", "CPU ms in contracts", "CPU ms of the step", "share", "goal"]
    table = Table(f"{ROWS[row].title}, scale-fsdp with reshard, world 2, median over ranks and steps", heads, rows)
    print(table.markdown())
    if options.date:
        save("contracts", options.date, __doc__ or "", [table], figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
