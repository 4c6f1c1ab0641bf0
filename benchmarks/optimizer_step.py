"""What `optimizer.step()` and `zero_grad()` cost on many small shards, compared with plain tensors of the same size.

    python benchmarks/optimizer_step.py                      # 1,000 parameters, 60 turns
    python benchmarks/optimizer_step.py --smoke              # seconds: that it runs
    python benchmarks/optimizer_step.py --date 2026-11-29    # also writes results/2026-11-29-optimizer_step.*

Two gloo ranks, one thread each, in fp32. Each rank has 1,000 parameters of 32 x 8, of which it holds a half, in 20
units: as shards of scale-fsdp, as DTensors of FSDP2, and as plain tensors of as many elements. Gradients are set by
hand, so nothing is sent but what a step itself sends. The engines step by turns in the same processes; a figure is the
CPU time of the stepping thread, the median over turns and then over ranks. `read` is one read of `param.grad` and
`param.requires_grad` of each parameter, as loops of users do.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import Table, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import scale_fsdp
from scale_core.testing import run_ranks

UNITS = 20
ROWS, COLUMNS = 32, 8
WARM_UP = 3
GOAL = 1.05  # of the CPU time of a step on plain tensors
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "SGD, foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}
PHASES = ("step", "zero_grad", "read")


def units_of(num_params: int) -> nn.Sequential:
    def unit() -> nn.Module:
        module = nn.Module()
        for number in range(num_params // UNITS):
            module.register_parameter(f"weight{number}", nn.Parameter(torch.randn(ROWS, COLUMNS)))
        return module

    return nn.Sequential(*(unit() for _ in range(UNITS)))


def scale_fsdp_params(model: nn.Sequential) -> list[Tensor]:
    for unit in model:
        scale_fsdp.fully_shard(unit)
    return list(scale_fsdp.fully_shard(model).parameters())


def fsdp2_params(model: nn.Sequential) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return list(model.parameters())


def plain_params(model: nn.Sequential) -> list[Tensor]:
    rows = ROWS // dist.get_world_size()
    return [nn.Parameter(param.detach()[:rows].clone()) for param in model.parameters()]


ENGINES: dict[str, Callable[[nn.Sequential], list[Tensor]]] = {
    "plain": plain_params,
    "scale-fsdp": scale_fsdp_params,
    "torch FSDP2": fsdp2_params,
}


def run(num_params: int, turns: int) -> dict[tuple[str, str, str], float]:
    """Returns this rank's median CPU seconds by optimizer, engine and phase."""
    torch.set_num_threads(1)
    medians = {}
    for name, build in OPTIMIZERS.items():
        params = {engine: start(units_of(num_params)) for engine, start in ENGINES.items()}
        optimizers = {engine: build(of_engine) for engine, of_engine in params.items()}
        seconds_by_phase: dict[tuple[str, str], list[float]] = {}
        for _ in range(WARM_UP + turns):
            for engine, optimizer in optimizers.items():
                for param in params[engine]:
                    param.grad = torch.ones_like(param)
                marks = [time.thread_time()]
                for param in params[engine]:
                    assert param.requires_grad and param.grad is not None
                marks.append(time.thread_time())
                optimizer.step()
                marks.append(time.thread_time())
                optimizer.zero_grad()
                marks.append(time.thread_time())
                read, step, zero_grad = (after - before for before, after in itertools.pairwise(marks))
                for phase, seconds in zip(PHASES, (step, zero_grad, read), strict=True):
                    seconds_by_phase.setdefault((engine, phase), []).append(seconds)
        medians |= {(name, *key): median(values[WARM_UP:]) for key, values in seconds_by_phase.items()}
    return medians


def main() -> int:
    parser = argparse.ArgumentParser(description="What a step over many small shards costs.")
    parser.add_argument("--params", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--smoke", action="store_true", help="few parameters and turns, to see that it runs")
    parser.add_argument("--date", help="write the figures to results/ under this date")
    options = parser.parse_args()
    num_params, turns = (2 * UNITS, 3) if options.smoke else (options.params, options.turns)
    by_rank = run_ranks(run, 2, num_params, turns, limit_seconds=900.0)
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    for name in OPTIMIZERS:
        for phase in PHASES:
            seconds = {engine: median(rank[name, engine, phase] for rank in by_rank) for engine in ENGINES}
            ratios = [seconds[engine] / seconds["plain"] for engine in ("scale-fsdp", "torch FSDP2")]
            goal = f"<= {GOAL}" if phase == "step" else ""
            rows.append([name, phase, f"{seconds['plain'] * 1e3:.2f}", *(f"{ratio:.2f}" for ratio in ratios), goal])
            figures += [{"optimizer": name, "phase": phase, "engine": e, "ms": s * 1e3} for e, s in seconds.items()]
    heads = ["", "", "plain, CPU ms", "scale-fsdp / plain", "FSDP2 / plain", "goal"]
    table = Table(f"{num_params} parameters, half of each on each rank", heads, rows)
    print(table.markdown())
    if options.date:
        save("optimizer_step", options.date, __doc__ or "", [table], figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
