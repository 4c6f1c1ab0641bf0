"""What AdaScale costs: CPU time of a step beside the same optimizer without it.

    python benchmarks/adascale.py                      # about three minutes of two cores
    python benchmarks/adascale.py --turns 3            # fewer turns
    python benchmarks/adascale.py --only DDP           # rows whose name has this
    python benchmarks/adascale.py --width 256          # layers of 256 x 256
    python benchmarks/adascale.py --smoke              # tiny layers, one turn
    python benchmarks/adascale.py --plain-allocator    # without the launcher's settings of the allocator
    python benchmarks/adascale.py --check              # fails where a goal is missed
    python benchmarks/adascale.py --date 2026-11-22    # also writes results/2026-11-22-adascale.*

All candidates live in the same ranks, and take turns of a few steps; a ratio is that of the CPU time of all threads of
all ranks: of the fastest turns of both, which a loaded machine disturbs least, then the median over the turns and
what half of them are between. The MLP has 4 layers of 1024 x 1024 (`--width`), batches of 128 per rank and pass where
no other number stands, SGD with momentum; a rank has one thread, and the allocator's settings of the launcher. What
AdaScale costs does not depend on the batch. The goals are 1.02 under DDP and 1.03 with four gradients
accumulated. FairScale's AdaScale takes part where it is installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from measure import has_fairscale
from report import Table, save
from team import ALLOCATOR_FOR_TIME
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scale_adascale import AdaScale
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel

LAYERS, STEPS = 4, 4


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        name: For people.
        kind: How it is spread.
        ranks: On how many ranks.
        accumulate: Backward passes per step.
        adam: AdamW in the place of SGD.
        batch: Samples per rank and pass.
        width: Of the layers.
        goal: The ratio that is to be kept; None where there is none.
    """

    name: str
    kind: str
    ranks: int
    accumulate: int = 1
    adam: bool = False
    batch: int = 128
    width: int = 1024
    goal: float | None = None


CASES = (
    Case("DDP, 2 ranks", "ddp", 2, goal=1.02),
    Case("DDP, 2 ranks, 4 gradients", "ddp", 2, 4, goal=1.03),
    Case("DDP, 2 ranks, batches of 512", "ddp", 2, batch=512, goal=1.02),
    Case("1 rank, 4 gradients", "plain", 1, 4, goal=1.03),
    Case("ShardedDataParallel, 2 ranks", "sharded", 2),
    Case("fully_shard, 2 ranks", "fsdp", 2),
    Case("fully_shard, 2 ranks, 4 gradients", "fsdp", 2, 4),
    Case("DDP, 2 ranks, AdamW", "ddp", 2, adam=True),
)


class Candidate:
    """A model and its optimizer, with an AdaScale around it or without."""

    def __init__(self, case: Case, adascale: Callable[..., Any] | None) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(case.width, case.width), nn.ReLU()]
        self.model: nn.Module = nn.Sequential(*layers)
        self.case = case
        kind: Any = torch.optim.AdamW if case.adam else torch.optim.SGD
        options: dict[str, Any] = {"lr": 1e-4} if case.adam else {"lr": 1e-3, "momentum": 0.9}
        self.optimizer: Any
        if case.kind == "sharded":
            inner = OSS(self.model.parameters(), kind, **options)
            self.model = ShardedDataParallel(self.model, inner)
        else:
            if case.kind == "fsdp":
                for layer in layers[::2]:
                    fully_shard(layer)
                fully_shard(self.model)
            inner = kind(self.model.parameters(), **options)
            if case.kind == "ddp":
                self.model = DistributedDataParallel(self.model)
        self.optimizer = adascale(inner, num_gradients_to_accumulate=case.accumulate) if adascale else inner
        self.batch = torch.randn(case.batch, case.width)

    def seconds(self) -> float:
        """CPU seconds of some steps."""
        began = time.process_time()
        for _ in range(STEPS):
            for number in range(self.case.accumulate):
                last = number == self.case.accumulate - 1 or self.case.kind == "plain"
                with nullcontext() if last else self.model.no_sync():  # type: ignore[operator]
                    (self.model(self.batch).square().mean() / self.case.accumulate).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.process_time() - began


def play(case: Case, turns: int) -> list[list[float]]:
    """CPU seconds of each candidate in each turn, on this rank: without AdaScale, with ours, with FairScale's."""
    candidates = [Candidate(case, None), Candidate(case, AdaScale)]
    if case.kind in ("plain", "ddp") and has_fairscale():
        from fairscale.optim import AdaScale as FairScale

        candidates.append(Candidate(case, FairScale))
    for candidate in candidates:
        candidate.seconds()
    return [[candidate.seconds() for candidate in candidates] for _ in range(turns)]


@dataclass(frozen=True)
class Ratio:
    """CPU time over that without AdaScale.

    Attributes:
        turns: Of each turn, sorted.
        least: Of the fastest turns of both.
    """

    turns: list[float]
    least: float

    def __str__(self) -> str:
        quarter = len(self.turns) // 4
        half = f"{self.turns[quarter]:.3f} to {self.turns[-1 - quarter]:.3f}"
        return f"{self.least:.3f}, {statistics.median(self.turns):.3f} ({half})"


def ratios_of(case: Case, turns: int) -> list[Ratio]:
    """That of each candidate but the first."""
    by_rank = run_ranks(play, case.ranks, case, turns, limit_seconds=600, backend=None if case.ranks == 1 else "gloo")
    by_turn = [[sum(times) for times in zip(*rows, strict=True)] for rows in zip(*by_rank, strict=True)]
    least = [min(times) for times in zip(*by_turn, strict=True)]
    return [Ratio(sorted(row[n] / row[0] for row in by_turn), least[n] / least[0]) for n in range(1, len(least))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--smoke", action="store_true", help="tiny layers, one turn")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plain-allocator", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--date")
    options = parser.parse_args()
    if not options.plain_allocator:
        os.environ.update(ALLOCATOR_FOR_TIME)  # The ranks are started afterwards.
    width, turns = (32, 1) if options.smoke else (options.width, options.turns)
    rows, figures, missed = [], [], []
    for case in (replace(case, width=width) for case in CASES if options.only in case.name):
        ours, *others = ratios_of(case, turns)
        goal = "" if case.goal is None else f"{case.goal:.2f}"
        rows.append([case.name, str(ours), goal, *(map(str, others) if others else [""])])
        figures.append({**asdict(case), "ratio": asdict(ours), "fairscale": [asdict(each) for each in others]})
        print(*rows[-1], sep="  ", flush=True)
        if case.goal is not None and ours.least > case.goal:
            missed.append(case.name)
    table = Table(
        "CPU time over that without AdaScale: least, median (half of the turns)",
        ["", "ours", "goal", "FairScale"],
        rows,
    )
    print(table.markdown())
    if options.date:
        save("adascale", options.date, __doc__ or "", [table], figures)
    if options.check and missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
