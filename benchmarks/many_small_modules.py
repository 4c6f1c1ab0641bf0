"""What the hooks of a unit cost the processor, where modules are so small that nothing else takes time.

    python benchmarks/many_small_modules.py                      # 64 units, 30 turns
    python benchmarks/many_small_modules.py --smoke              # seconds: that it runs
    python benchmarks/many_small_modules.py --date 2026-11-21    # also writes results/2026-11-21-many_small_modules.*

A stack of linear layers of 8 x 8, each a unit, in a unit around all, in fp32 with gloo. The cost of the hooks is the
CPU time of the thread that runs the model, beyond that of the plain stack, divided by the units: once for the
forward, once for the backward. It holds all that a unit does there: to announce what it does, to gather, show and
release, to pack and reduce its gradients. Time that the transport's own threads take, and that a rank waits, is not in
it. The engines train by turns in the same processes, one thread each, so that what the machine does beside it meets all
of them; the figure is the median over turns and ranks. In a world of one nothing is sent, and the hooks stand alone:
that is the row with the goal of 0.15 ms.

"looks for NaN" is `error_if_nonfinite=True`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import Table, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import scale_fsdp
from scale_core.testing import run_ranks

WIDTH = 8
GOAL_MS = 0.15
WARM_UP = 3


def scale(model: nn.Sequential, **kwargs: Any) -> nn.Module:
    for layer in model:
        scale_fsdp.fully_shard(layer, **kwargs)
    return scale_fsdp.fully_shard(model, **kwargs)


def fsdp2(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


ENGINES: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "scale-fsdp": scale,
    "scale-fsdp, without resharding": lambda model: scale(model, reshard_after_forward=False),
    "scale-fsdp, looks for NaN": lambda model: scale(model, options=scale_fsdp.ShardOptions(error_if_nonfinite=True)),
    "torch FSDP2": fsdp2,
}


def train(num_units: int, turns: int) -> dict[str, tuple[float, float]]:
    """Trains every engine by turns on this rank; returns the median CPU seconds of its forward and its backward."""
    torch.set_num_threads(1)
    models = {
        name: start(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_units))))
        for name, start in ENGINES.items()
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    batch = torch.ones(4, WIDTH)
    for _ in range(WARM_UP + turns):
        for name, model in models.items():
            begun = time.thread_time()
            loss = model(batch).sum()
            between = time.thread_time()
            loss.backward()
            spent[name].append((between - begun, time.thread_time() - between))
            model.zero_grad()
    medians = {}
    for name, turns_of in spent.items():
        forwards, backwards = zip(*turns_of[WARM_UP:], strict=True)
        medians[name] = median(forwards), median(backwards)
    return medians


def main() -> int:
    parser = argparse.ArgumentParser(description="What the hooks of a unit cost.")
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="few units and turns, to see that it runs")
    parser.add_argument("--date", help="write the figures to results/ under this date")
    options = parser.parse_args()
    num_units, turns = (8, 3) if options.smoke else (options.units, options.turns)
    rows, figures = [], []
    for world in (1, 2):
        by_rank = run_ranks(train, world, num_units, turns, limit_seconds=600.0)
        plain = [median(of_rank["plain"][phase] for of_rank in by_rank) for phase in (0, 1)]
        for name in ENGINES:
            if name == "plain":
                continue
            forward, backward = (
                (median(of_rank[name][phase] for of_rank in by_rank) - plain[phase]) * 1e3 / num_units
                for phase in (0, 1)
            )
            goal = f"<= {GOAL_MS}" if world == 1 and name.startswith("scale") else ""
            rows.append([name, str(world), f"{forward:.3f}", f"{backward:.3f}", goal])
            figures.append({"engine": name, "world": world, "forward_ms": forward, "backward_ms": backward})
    heads = ["", "ranks", "forward, CPU ms", "backward, CPU ms", "goal"]
    title = f"{num_units} linear layers of {WIDTH} x {WIDTH}, per unit and pass, beyond the plain model"
    table = Table(title, heads, rows)
    print(table.markdown())
    if options.date:
        save("many_small_modules", options.date, __doc__ or "", [table], figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
