"""What it costs to compare replicas, beside the training step before which it is done once in 100.

    python benchmarks/replica_checks.py                      # two sizes of models, 15 turns
    python benchmarks/replica_checks.py --smoke              # seconds: that it runs
    python benchmarks/replica_checks.py --date 2026-11-23    # also writes results/2026-11-23-replica_checks.*

A stack of linear layers trains under `ShardedDataParallel` with `OSS` of Adam on two ranks over gloo, one thread each;
then `check_replicas` compares all of its parameters. Turns alternate in the same processes; the figures are medians
of rank 0. "Per step" is the comparison's time over 100 steps, as a share of a step.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from report import Table, save
from torch import nn

from scale_core import check_replicas
from scale_core.testing import run_ranks
from scale_oss import OSS, OSSOptions, ShardedDataParallel

EVERY = 100


def train(width: int, num_layers: int, turns: int) -> tuple[int, float, float]:
    """The bytes of the parameters, and the seconds of a step and of a comparison."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])
    optimizer = OSS(model.parameters(), torch.optim.Adam, options=OSSOptions(check_replicas_every=0))
    wrapped = ShardedDataParallel(model, optimizer)
    batch = torch.randn(16, width)
    steps, checks = [], []
    for _ in range(turns + 1):
        begun = time.perf_counter()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        optimizer.wait()
        optimizer.zero_grad()
        between = time.perf_counter()
        check_replicas(model)
        steps.append(between - begun)
        checks.append(time.perf_counter() - between)
    return sum(param.nbytes for param in model.parameters()), median(steps[1:]), median(checks[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="one small model, few turns")
    parser.add_argument("--date", help="write the figures to results/ under this date")
    options = parser.parse_args()
    rows, figures = [], []
    for width, num_layers in [(64, 4)] if options.smoke else [(64, 200), (2048, 12)]:
        num_bytes, step, check = run_ranks(train, 2, width, num_layers, 3 if options.smoke else options.turns)[0]
        share = check / EVERY / step
        name = f"{num_layers} layers of {width} x {width}"
        speed = num_bytes / check / 1e9
        rows.append(
            [
                name,
                f"{num_bytes / 1e6:.0f} MB",
                f"{step * 1e3:.1f}",
                f"{check * 1e3:.1f}",
                f"{speed:.1f}",
                f"{share:.2%}",
            ]
        )
        figures.append({"model": name, "bytes": num_bytes, "step_s": step, "check_s": check, "share_per_step": share})
    heads = ["model", "parameters", "step, ms", "comparison, ms", "GB/s", f"per step, once in {EVERY}"]
    table = Table("check_replicas beside a training step, 2 ranks", heads, rows)
    print(table.markdown())
    if options.date:
        save("replica_checks", options.date, __doc__ or "", [table], figures)


if __name__ == "__main__":
    main()
