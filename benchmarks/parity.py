"""What scale-check says of right programs: the largest difference beside their rounding; and what a check costs.

    python benchmarks/parity.py                     # 200 programs drawn from a seed, in several wrappers
    python benchmarks/parity.py --programs 40 --seed 7
    python benchmarks/parity.py --smoke             # a few programs, to see that it runs
    python benchmarks/parity.py --date 2026-11-29   # also writes results/2026-11-29-parity.*

A program is a model of random layers (linear, convolution, norms, attention, residual parts), batches, and an
optimizer, in float32 or float64, on two ranks, three steps. All of them are right, so each verdict but "equal" or
"rounding" is a false alarm. A difference is called a bug above a ratio of 100. The last table is the time of a script
under `scale-check run`, with its three runs, beside the script by itself on the same ranks, for as many steps.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Table, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from scale_check import ParityError, parity
from scale_check.comparison import BUG_RATIO
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))))
data = TensorDataset(torch.randn(4096, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x,) in enumerate(DataLoader(data, batch_size=64, sampler=DistributedSampler(data))):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == int(sys.argv[1]):
        break
"""


class Attention(nn.Module):
    """Self-attention over rows of features, as tokens of four."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.width = width

    def forward(self, features: Tensor) -> Tensor:
        tokens = features.unflatten(1, (self.width // 4, 4))
        attended: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return features + attended.flatten(1)


class Residual(nn.Module):
    """A part whose input is added to its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.part = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.part(features)
        return features + output


class Program:
    """A program that a seed draws; it can be pickled, as the ranks need."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        drawn = random.Random(seed)
        self.width = drawn.choice([8, 12, 16])
        self.layers = [
            drawn.choice(["linear", "residual", "attention", "norm", "conv"]) for _ in range(drawn.randint(2, 5))
        ]
        self.activation = drawn.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])
        self.wrapper = drawn.choice(["DDP", "FSDP2", "fully_shard", "ShardedDataParallel"])
        self.kind = drawn.choice(["sgd", "adam", "adamw"])
        self.dtype = drawn.choice([torch.float32, torch.float64])

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = []
        for name in self.layers:
            layers += {
                "linear": lambda: [nn.Linear(self.width, self.width), self.activation()],
                "residual": lambda: [Residual(self.width)],
                "attention": lambda: [Attention(self.width)],
                "norm": lambda: [nn.LayerNorm(self.width)],
                "conv": lambda: [nn.Unflatten(1, (2, self.width // 2)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()],
            }[name]()
        return nn.Sequential(*layers, nn.Linear(self.width, 3))

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.wrapper == "DDP":
            return DistributedDataParallel(model)
        if self.wrapper == "ShardedDataParallel":
            return model  # Around its optimizer, below.
        if self.wrapper == "FSDP2":
            from torch.distributed.fsdp import fully_shard as torch_fully_shard

            return torch_fully_shard(model)
        fully_shard(model[-1])  # type: ignore[index]
        return fully_shard(model)

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        if self.kind == "sgd":
            return SGD(params, lr=0.1, momentum=0.9)
        return (Adam if self.kind == "adam" else AdamW)(params, lr=0.01)

    def step(self, model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        return loss

    def batches(self) -> list[Tensor]:
        drawn = torch.Generator().manual_seed(self.seed)
        return [torch.randn(8, self.width, generator=drawn) for _ in range(3)]

    def largest_ratio(self) -> tuple[float, str]:
        """The ratio of the report, and the first difference in words if it is called one."""
        try:
            report = parity(
                self.build, self.step, self.wrap, batches=self.batches(), optimizer=self.optimizer, dtype=self.dtype
            )
        except ParityError as error:
            return error.report.largest_ratio, str(error)
        return report.largest_ratio, ""


class ShardedProgram(Program):
    """One whose optimizer and wrapper belong together."""

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        if not torch.distributed.is_initialized():
            return super().optimizer(params)
        kinds: dict[str, Any] = {"sgd": (SGD, {"lr": 0.1, "momentum": 0.9}), "adam": (Adam, {"lr": 0.01})}
        cls, options = kinds.get(self.kind, (AdamW, {"lr": 0.01}))
        return OSS(params, cls, **options)

    def step(self, model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
        if isinstance(optimizer, OSS):
            wrapped = vars(optimizer).get("model_of_benchmark")
            if wrapped is None:
                wrapped = optimizer.model_of_benchmark = ShardedDataParallel(model, optimizer)  # type: ignore[attr-defined]
            model = wrapped
        return super().step(model, optimizer, batch)


def draw(seed: int) -> Program:
    program = Program(seed)
    return ShardedProgram(seed) if program.wrapper == "ShardedDataParallel" else program


def script_seconds(steps: int, turns: int) -> tuple[float, float]:
    """The median time of a script by itself on two ranks, and under `scale-check run`."""
    alone, checked = [], []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        check = [sys.executable, "-m", "scale_check.cli", "run", "--steps", str(steps)]
        for _ in range(turns):
            for command, seconds in ((torchrun, alone), (check, checked)):
                began = time.perf_counter()
                subprocess.run([*command, str(script), str(steps)], check=True, env=environment, capture_output=True)
                seconds.append(time.perf_counter() - began)
    return median(alone), median(checked)


def main() -> int:
    parser = argparse.ArgumentParser(description="What scale-check says of right programs, and what it costs.")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few programs, to see that it runs")
    parser.add_argument("--date", help="write the figures to results/ under this date")
    options = parser.parse_args()
    count, turns, steps = (4, 1, 1) if options.smoke else (options.programs, 3, 3)
    found: dict[tuple[str, str], list[float]] = {}
    alarms: list[str] = []
    for seed in range(options.seed, options.seed + count):
        program = draw(seed)
        ratio, wrong = program.largest_ratio()
        found.setdefault((program.wrapper, str(program.dtype).removeprefix("torch.")), []).append(ratio)
        if wrong:
            alarms.append(f"seed {seed}, {program.wrapper}, {program.layers}: {wrong}")
    rows = [
        [wrapper, dtype, str(len(ratios)), f"{median(ratios):.1f}", f"{max(ratios):.1f}"]
        for (wrapper, dtype), ratios in sorted(found.items())
    ]
    every = [ratio for ratios in found.values() for ratio in ratios]
    rows.append(["all", "", str(len(every)), f"{median(every):.1f}", f"{max(every):.1f}"])
    heads = ["wrapper", "dtype", "programs", "ratio, median", "ratio, largest"]
    ratios = Table(f"Right programs; {len(alarms)} false alarms above {BUG_RATIO:g}", heads, rows)
    alone, checked = script_seconds(steps, turns)
    cost = Table(
        f"A script, {steps} steps on two ranks",
        ["by itself", "scale-check run", "ratio"],
        [[f"{alone:.1f} s", f"{checked:.1f} s", f"{checked / alone:.1f}"]],
    )
    print(ratios.markdown(), cost.markdown(), *alarms, sep="\n")
    if options.date:
        figures = [{"wrapper": w, "dtype": d, "ratios": each} for (w, d), each in found.items()]
        save("parity", options.date, __doc__ or "", [ratios, cost], [*figures, {"alone": alone, "checked": checked}])
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
