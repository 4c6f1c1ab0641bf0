"""Offloading on one GPU: a step with nothing, half or all of the optimizer's state on the host, beside torch's FSDP2.

    python benchmarks/offload_gpu.py                       # a GPT of 1.2 billion parameters, under three minutes
    python benchmarks/offload_gpu.py --layers 12           # a smaller one, for a smaller GPU or host
    python benchmarks/offload_gpu.py --smoke               # a tiny one, one turn; also without a GPU
    python benchmarks/offload_gpu.py --date 2026-11-21     # also writes results/2026-11-21-offload_gpu.*

One process, one GPU. Every engine trains the same GPT from the same weights on the same tokens: fp32 parameters, bf16
computation, AdamW (torch's fused kernel wherever it runs), no clipping, every block a unit. A step is forward, backward
and update, from one idle device to the next, wall time; the median over the turns. Engines run one after another, so
that the peak is each one's own: `max_memory_allocated` over the steps that are measured. The loss after the last step
is that of all engines up to the rounding of other kernels.

"state on the host" is `OffloadOptimizer` over `fully_shard`; "overlap_step" updates during the backward pass. "shards
on the host" is `offload_policy=CPUOffloadPolicy()`. FSDP2 is `torch.distributed.fsdp.fully_shard`; its offload is its
`CPUOffloadPolicy`. The goals: half of the state on the host takes at most 1.3 times the step that has none there, and a
step with shards on the host, updated during the backward pass, at most 0.67 times that of FSDP2 with its own.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from engines import GPT, VOCABULARY
from report import Table, save
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import AdamW, Optimizer

import scale_fsdp
from scale_fsdp import OffloadOptimizer, ShardOptions

GIB = 2**30
BF16 = torch.bfloat16
SETTINGS: dict[str, Any] = {"lr": 1e-4, "fused": True}

Engine = Callable[[GPT, torch.device], tuple[nn.Module, Optimizer]]


def scale(model: GPT, device: torch.device, *, on_host: bool = False, **optimizer: Any) -> tuple[nn.Module, Optimizer]:
    """fully_shard with AdamW or, given its settings, OffloadOptimizer."""
    precision = scale_fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    place = scale_fsdp.CPUOffloadPolicy() if on_host else None
    shard = partial(
        scale_fsdp.fully_shard, mp_policy=precision, offload_policy=place, options=ShardOptions(compute_device=device)
    )
    if not on_host and model.positions.device != device:
        model = model.to(device)
    for block in model.blocks:
        shard(block)
    shard(model)
    if optimizer:
        return model, OffloadOptimizer(AdamW, model.parameters(), **optimizer, **SETTINGS)
    return model, AdamW(model.parameters(), **SETTINGS)


def torch_fsdp(model: GPT, device: torch.device, *, on_host: bool = False) -> tuple[nn.Module, Optimizer]:
    settings: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)}
    if on_host:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    else:
        model = model.to(device)
    for block in model.blocks:
        fsdp2(block, **settings)
    fsdp2(model, **settings)
    return model, AdamW(model.parameters(), **SETTINGS)


NOTHING, HALF = "scale-fsdp", "scale-fsdp, half of the state on the host"
OVERLAPPED = "scale-fsdp, shards on the host, overlap_step"
TORCH_HOST = "FSDP2, shards on the host"
ENGINES: dict[str, Engine] = {
    NOTHING: scale,
    HALF: partial(scale, host_fraction=0.5),
    "scale-fsdp, all of the state on the host": partial(scale, host_fraction=1.0),
    "scale-fsdp, all of the state on the host, overlap_step": partial(scale, host_fraction=1.0, overlap_step=True),
    "scale-fsdp, shards on the host": partial(scale, on_host=True),
    OVERLAPPED: partial(scale, on_host=True, host_fraction=1.0, overlap_step=True),
    "FSDP2": torch_fsdp,
    TORCH_HOST: partial(torch_fsdp, on_host=True),
}
GOALS = {HALF: (1.3, NOTHING), OVERLAPPED: (0.67, TORCH_HOST)}


@dataclass
class Result:
    """One engine.

    Attributes:
        seconds: Of each step that was measured.
        peak_bytes: Of the device.
        loss: Of the last step.
        error: Why it could not run.
    """

    engine: str
    num_elements: int
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float = float("nan")
    error: str = ""

    @property
    def step_seconds(self) -> float:
        return median(self.seconds) if self.seconds else float("nan")


def measure(engine: str, options: argparse.Namespace, device: torch.device) -> Result:
    torch.manual_seed(0)
    plain = GPT(options.layers, options.width, max(1, options.width // 128), options.length)
    result = Result(engine, sum(param.numel() for param in plain.parameters()))
    try:
        model, optimizer = ENGINES[engine](plain, device)
        del plain
        for step in range(options.warm_up + options.turns):
            if step == options.warm_up and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds, result.loss = timed(model, optimizer, batch(options, step, device), device)
            if step >= options.warm_up:
                result.seconds.append(seconds)
        result.peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    except (RuntimeError, torch.OutOfMemoryError) as error:  # The others are measured all the same.
        result.error = str(error).splitlines()[0][:100]
    return result


def batch(options: argparse.Namespace, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (options.batch, options.length + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def timed(
    model: nn.Module, optimizer: Optimizer, data: tuple[Tensor, Tensor], device: torch.device
) -> tuple[float, float]:
    """Seconds and loss of one step."""
    wait(device)
    begin = time.perf_counter()
    loss = model(*data)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    wait(device)
    return time.perf_counter() - begin, float(loss.detach())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table_of(results: Sequence[Result], title: str) -> Table:
    found = {result.engine: result for result in results}
    heads = ["engine", "step, ms", "over scale-fsdp", "over FSDP2 with shards on the host", "goal", "peak, GiB", "loss"]
    rows = []
    for result in results:
        goal = f"<= {GOALS[result.engine][0]}" if result.engine in GOALS else ""
        ratios = [
            f"{result.step_seconds / found[other].step_seconds:.2f}" if other in found else ""
            for other in (NOTHING, TORCH_HOST)
        ]
        figures = [f"{1e3 * result.step_seconds:.1f}", *ratios, goal, f"{result.peak_bytes / GIB:.2f}"]
        rows.append([result.engine, *figures, result.error or f"{result.loss:.4f}"])
    return Table(title, heads, rows)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="may be given several times; default: all")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one turn: whether it runs")
    parser.add_argument("--date", help="also writes results/DATE-offload_gpu.json and .md")
    return parser


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = command_line().parse_args(arguments)
    if options.smoke:
        options.layers, options.width, options.length, options.batch, options.turns = 2, 128, 32, 2, 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("offload_gpu measures a GPU, and there is none here: --smoke runs it without one", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    results = []
    for engine in options.engine or ENGINES:
        results.append(measure(engine, options, device))
        print(f"{engine}: {1e3 * results[-1].step_seconds:.1f} ms {results[-1].error}", file=sys.stderr, flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    title = f"GPT of {results[0].num_elements / 1e9:.2f} billion parameters, {options.batch} x {options.length} tokens"
    table = table_of(results, f"{title}, on {name}, {torch.get_num_threads()} threads of the host")
    print(table.markdown())
    dist.destroy_process_group()
    if options.date:
        save("offload_gpu", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    return 1 if any(result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
