"""How long a step takes on a device with streams, by the order of its work: a simulation with durations.

    python benchmarks/step_timeline.py                     # all engines at 40, 80 and 200 GB/s
    python benchmarks/step_timeline.py --smoke             # a tiny model
    python benchmarks/step_timeline.py --date 2026-11-30   # also writes results/2026-11-30-step_timeline.*

The step runs in a simulation of one of 16 ranks: the operators and collectives are the real ones, on tensors without
values. Each stream has a clock. An operator begins when the host has launched it and its stream is free; a collective
begins on the communicator's stream when the stream that calls it has come so far; a wait moves the clock of the stream
that waits (`scale_check.simulate.durations`). Products take their floating-point operations at 500 TFLOP/s, other
operators their bytes at 2.5 TB/s, a launch 6 us of the host, a collective 20 us and the bytes that a ring sends at the
bandwidth of the column.

Tensor parallel ranks divide the sequence between products: torch by `parallelize_module`, which runs a collective and a
product one after the other (its asynchronous form needs symmetric memory). The even all-to-all is a layer of experts in
25 lines: every rank sends as many rows to each other one, which no router promises. In a simulation routers promise it.

The pipelines are computed from the programs of their ranks, each with a forward of 10 ms and backward of 20 ms for a
micro-batch, and 128 MiB of activations between stages: with receives that begin at their turn, after all that was
launched before, and with those that begin one computation earlier wherever the order of transfers stays the same.

The durations are round numbers and no GPU's: what the table shows is which communication the computation waits for.
"exposed" is the step less the same step with collectives that take no time. One model, bf16 in computation, fp32 in
reduction and parameters, AdamW: 12 blocks of 268 million parameters, 8192 tokens on each rank.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from report import Table, save
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import scale_tp
from scale_check.simulate import simulate
from scale_check.simulate.durations import Rates, durations
from scale_checkpoint import checkpoint_wrapper
from scale_core import compat
from scale_core.comm.group import group_of
from scale_fsdp import MixedPrecisionPolicy, fully_shard
from scale_fsdp.runtime.root import Root
from scale_fsdp.runtime.unit import units_in
from scale_moe import MoE
from scale_oss import OSS, ShardedDataParallel
from scale_pipe.distributed.program import CrossStageTensors, Receive, Send, Task, build_programs
from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.registry import get_schedule

GIB = 2**30
WORLD_SIZE = 16
NUM_EXPERTS, TOP_K = 32, 2
PIPELINES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
PIPELINE_RANKS, MICRO_BATCHES = 4, 16
FORWARD_SECONDS, ACTIVATION_BYTES = 10e-3, 128 * 2**20  # of all stages of a rank, and of one transfer


class Block(nn.Module):
    """Two branches beside the residual stream, of two products each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = ((width, 4 * width), (4 * width, width), (width, 4 * width), (4 * width, width))
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers[1](self.layers[0](x))
        y: Tensor = x + self.layers[3](torch.relu(self.layers[2](x)))
        return y


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Train = Callable[[nn.Sequential], tuple[nn.Module, Any]]


def adam(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), foreach=False)


def sharded(model: nn.Sequential, *, checkpoints: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    if checkpoints:
        model = nn.Sequential(*(checkpoint_wrapper(block) for block in model))
    for block in model:
        fully_shard(block, mp_policy=BF16, **options)
    fully_shard(model, mp_policy=BF16, **options)
    return model, adam(model)


def waiting_early(model: nn.Sequential) -> tuple[nn.Module, Any]:
    """As on the host, and as everywhere before 2026-11-29: waits for a reduction at the next unit's first gradient."""
    result = sharded(model)
    model(torch.zeros(1, model[0].layers[0].in_features, device="sim", dtype=torch.bfloat16)).sum().backward()
    for unit in units_in(model):
        cast(Root, unit.root).waits_at_first_gradient = True
    return result


def torch_sharded(model: nn.Sequential) -> tuple[nn.Module, Any]:
    policy = TorchMixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with compat.without_fake_tensors():
        mesh = init_device_mesh("sim", (WORLD_SIZE,))
    for block in model:
        fsdp2(block, mesh=mesh, mp_policy=policy)
    fsdp2(model, mesh=mesh, mp_policy=policy)
    return model, adam(model)


def last_kept(model: nn.Sequential) -> tuple[nn.Module, Any]:
    """The last block stays gathered until its backward, as torchtitan has it."""
    fully_shard(model[-1], mp_policy=BF16, reshard_after_forward=False)
    for block in model[:-1]:
        fully_shard(block, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    return model, adam(model)


def oss(model: nn.Sequential) -> tuple[nn.Module, Any]:
    model = model.bfloat16()
    optimizer = OSS(model.parameters(), AdamW, foreach=False)
    return ShardedDataParallel(model, optimizer), optimizer


def oss_in_ddp(model: nn.Sequential) -> tuple[nn.Module, Any]:
    model = model.bfloat16()
    optimizer = OSS(model.parameters(), AdamW, foreach=False)
    return DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True), optimizer


def zero_in_ddp(model: nn.Sequential) -> tuple[nn.Module, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # It warns of what torch itself has deprecated.

    model = model.bfloat16()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, foreach=False)
    return DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True), optimizer


def torch_divided(model: nn.Sequential) -> tuple[nn.Module, Any]:
    """torch's tensor parallelism, with divided sequences between the products."""
    with compat.without_fake_tensors():
        mesh = init_device_mesh("sim", (WORLD_SIZE,))
    first = ColwiseParallel(input_layouts=Shard(0), use_local_output=True)
    second = RowwiseParallel(output_layouts=Shard(0), use_local_output=True)
    for block in model.bfloat16():
        parallelize_module(block, mesh, {f"layers.{index}": (first, second)[index % 2] for index in range(4)})
    return model, adam(model)


def divided(model: nn.Sequential, **options: Any) -> tuple[nn.Module, Any]:
    for block in model.bfloat16():
        layers = block.layers
        for index, layer in enumerate(layers):
            layer_options = scale_tp.LayerOptions(sequence_parallel=True, **options)
            common: Any = {"bias": False, "device": "sim", "dtype": torch.bfloat16, "options": layer_options}
            common |= {"process_group": group_of()}
            sizes = layer.in_features, layer.out_features
            if index % 2 == 0:
                layers[index] = scale_tp.ColumnParallelLinear(*sizes, gather_output=False, **common)
            else:
                layers[index] = scale_tp.RowParallelLinear(*sizes, input_is_parallel=True, **common)
    return model, adam(model)


class PlainExperts(nn.Module):
    """Experts as a program of its own has them: an even all-to-all there, one back, and products in a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False, dtype=BF16.param_dtype)
        sizes = NUM_EXPERTS // WORLD_SIZE, width, 2 * width
        self.gate, self.up = (nn.Parameter(torch.empty(sizes, dtype=BF16.param_dtype)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1], dtype=BF16.param_dtype))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).topk(TOP_K)
        order = experts.flatten().argsort()
        rows = x.index_select(0, order // TOP_K)
        even = [len(rows) // WORLD_SIZE] * WORLD_SIZE
        received = wait_tensor(all_to_all_single_autograd(rows, even, even, dist.group.WORLD))
        batch = received.view(WORLD_SIZE, len(self.gate), -1, x.shape[1]).transpose(0, 1).flatten(1, 2)
        hidden = torch.nn.functional.silu(torch.bmm(batch, self.gate)) * torch.bmm(batch, self.up)
        result = torch.bmm(hidden, self.down).unflatten(1, (WORLD_SIZE, -1)).transpose(0, 1).flatten(0, 2)
        returned = wait_tensor(all_to_all_single_autograd(result, even, even, dist.group.WORLD))
        placed = torch.zeros_like(returned).index_copy(0, order, returned).view(len(x), TOP_K, -1)
        return x + (placed * weights[..., None]).sum(1)


class Experts(nn.Module):
    """A layer of scale-moe beside the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.moe = MoE(width, 2 * width, NUM_EXPERTS, TOP_K, process_group=group_of(), dtype=BF16.param_dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(x)
        return y


def experts(model: nn.Sequential, kind: Callable[[int], nn.Module]) -> tuple[nn.Module, Any]:
    width = model[0].layers[0].in_features
    with torch.device("sim"):
        layers = nn.Sequential(*(kind(width) for _ in model))
    return layers, adam(layers)


ENGINES: dict[str, Train] = {
    "FSDP2": torch_sharded,
    "fully_shard": sharded,
    "fully_shard, waiting at the first gradient": waiting_early,
    "fully_shard, not resharded after the forward": partial(sharded, reshard_after_forward=False),
    "fully_shard, checkpointed": partial(sharded, checkpoints=True),
    "fully_shard, last block not resharded": last_kept,
    "DistributedDataParallel + ZeroRedundancyOptimizer, bf16": zero_in_ddp,
    "DistributedDataParallel + OSS, bf16": oss_in_ddp,
    "OSS + ShardedDataParallel, bf16": oss,
}
TENSOR_PARALLEL: dict[str, Train] = {
    "torch's parallelize_module": torch_divided,
    "scale-tp": divided,
    "scale-tp, overlap_pieces=1": partial(divided, overlap_pieces=1),
    "scale-tp, overlap_pieces=2": partial(divided, overlap_pieces=2),
}
EXPERT_PARALLEL: dict[str, Train] = {
    "an even all-to-all": partial(experts, kind=PlainExperts),
    "scale-moe": partial(experts, kind=Experts),
}


@dataclass
class Result:
    """One engine at one bandwidth.

    Attributes:
        step_seconds: Of the last step.
        exposed_seconds: Of it, what collectives add to the computation.
        host_seconds: What the host takes to launch the step.
        peak_bytes: Of the device.
    """

    engine: str
    gigabytes_per_second: int
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    host_seconds: float = 0.0
    peak_bytes: int = 0


def measure(engine: str, bandwidth: int, layers: int, width: int, tokens: int) -> Result:
    seconds, host, peak = step_of(engine, 1e9 * bandwidth, layers, width, tokens)
    computing, _, _ = step_of(engine, 0.0, layers, width, tokens)
    return Result(engine, bandwidth, seconds, seconds - computing, host, peak)


@cache
def step_of(engine: str, bytes_per_second: float, layers: int, width: int, tokens: int) -> tuple[float, float, int]:
    """Seconds of a steady step, seconds of the host, and the peak in bytes; collectives take no time at 0 bytes/s."""
    is_divided = engine in TENSOR_PARALLEL
    shape = (tokens // WORLD_SIZE, width) if is_divided else (tokens, width)
    with simulate(world_size=WORLD_SIZE, device="sim", check=False) as simulation:
        with durations(simulation, Rates(network_bytes_per_second=bytes_per_second)) as clocks:
            with torch.device("sim"):
                plain = nn.Sequential(*(Block(width) for _ in range(layers)))
            model, optimizer = (ENGINES | TENSOR_PARALLEL | EXPERT_PARALLEL)[engine](plain)
            del plain
            for step in range(4):
                if step == 3:
                    simulation.restart()
                    begin, clocks.host = clocks.now, clocks.now
                x = torch.zeros(shape, device="sim", dtype=torch.bfloat16, requires_grad=is_divided)
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return clocks.now - begin, clocks.host - begin, simulation.peak_bytes


@dataclass
class PipelineResult:
    """The makespan of one schedule, in seconds: transfers that take no time, receives at their turn, and ahead."""

    schedule: str
    gigabytes_per_second: int
    without_transfers: float
    at_their_turn: float
    ahead: float


def measure_pipeline(name: str, bandwidth: int) -> PipelineResult:
    stages = {"1f1b": 1, "gpipe": 1, "zb_h1": 1}.get(name, 2)
    schedule = get_schedule(name, PIPELINE_RANKS, MICRO_BATCHES, stages_per_rank=stages)
    programs = build_programs(schedule, CrossStageTensors())
    seconds = ACTIVATION_BYTES / (1e9 * bandwidth)
    spans = [makespan(programs, stages, *case) for case in ((0.0, False), (seconds, False), (seconds, True))]
    return PipelineResult(name, bandwidth, *spans)


def makespan(programs: Sequence[Sequence[Task]], stages_per_rank: int, transfer: float, ahead: bool) -> float:
    """When the last rank is done, of programs whose transfers between two ranks pass one after the other.

    A receive begins when the rank's stream has come to where the host posted it: at its turn, or, with `ahead`, before
    the computation in front of it.
    """
    times = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT_GRADIENT: 1.0, Kind.WEIGHT_GRADIENT: 1.0}
    streams, before = [0.0] * len(programs), [0.0] * len(programs)
    places = [0] * len(programs)
    sent: dict[Any, float] = {}
    links: dict[frozenset[int], float] = defaultdict(float)
    progresses = True
    while progresses:
        progresses = False
        for rank, tasks in enumerate(programs):
            while places[rank] < len(tasks):
                task = tasks[places[rank]]
                if isinstance(task, Send):
                    sent[task.slot] = streams[rank]
                elif isinstance(task, Receive):
                    if task.slot not in sent:
                        break
                    follows = places[rank] and isinstance(tasks[places[rank] - 1], Action)
                    posted = before[rank] if ahead and follows else streams[rank]
                    link = frozenset((rank, task.peer))
                    links[link] = max(links[link], sent[task.slot], posted) + transfer
                    streams[rank] = max(streams[rank], links[link])
                elif isinstance(task, Action) and task.kind in times:
                    before[rank] = streams[rank]
                    streams[rank] += FORWARD_SECONDS / stages_per_rank * times[task.kind]
                places[rank] += 1
                progresses = True
    assert all(place == len(tasks) for place, tasks in zip(places, programs, strict=True)), "the programs deadlock"
    return max(streams)


def pipeline_table(results: Sequence[PipelineResult]) -> Table:
    bandwidths = list(dict.fromkeys(result.gigabytes_per_second for result in results))
    heads = ["makespan, ms: at their turn / ahead", *(f"{bandwidth} GB/s" for bandwidth in bandwidths), "no transfers"]
    rows = []
    for name in dict.fromkeys(result.schedule for result in results):
        of_schedule = [result for result in results if result.schedule == name]
        cells = [f"{1e3 * result.at_their_turn:.0f} / {1e3 * result.ahead:.0f}" for result in of_schedule]
        rows.append([name, *cells, f"{1e3 * of_schedule[0].without_transfers:.0f}"])
    return Table(
        f"{PIPELINE_RANKS} ranks, {MICRO_BATCHES} micro-batches, receives of {ACTIVATION_BYTES >> 20} MiB", heads, rows
    )


def table_of(results: Sequence[Result], title: str) -> Table:
    bandwidths = list(dict.fromkeys(result.gigabytes_per_second for result in results))
    heads = ["step, ms (exposed)", *(f"{bandwidth} GB/s" for bandwidth in bandwidths), "peak, GiB"]
    rows = []
    for engine in dict.fromkeys(result.engine for result in results):
        of_engine = [result for result in results if result.engine == engine]
        cells = [f"{1e3 * result.step_seconds:.0f} ({1e3 * result.exposed_seconds:.0f})" for result in of_engine]
        rows.append([engine, *cells, f"{of_engine[0].peak_bytes / GIB:.2f}"])
    return Table(title, heads, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--engine",
        choices=ENGINES | TENSOR_PARALLEL | EXPERT_PARALLEL,
        action="append",
        help="may be given several times; default: all",
    )
    parser.add_argument("--bandwidth", type=int, nargs="+", default=[40, 80, 200], help="GB/s of a rank")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--smoke", action="store_true", help="a tiny model: whether it runs")
    parser.add_argument("--date", help="also writes results/DATE-step_timeline.json and .md")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.layers, options.width, options.tokens, options.bandwidth = 3, 64, 16, [80]
    sizes = (options.layers, options.width, options.tokens)
    title = f"{options.layers} blocks of width {options.width}, {options.tokens} tokens, {WORLD_SIZE} ranks, simulated"
    layers = f"{options.layers} layers of {NUM_EXPERTS} experts, {TOP_K} for each token, {WORLD_SIZE} ranks, simulated"
    results, tables = [], []
    for engines, text in (
        (ENGINES, title),
        (TENSOR_PARALLEL, f"{title}, tensor parallel with divided sequences"),
        (EXPERT_PARALLEL, layers),
    ):
        names = [name for name in engines if not options.engine or name in options.engine]
        of_table = [measure(name, bandwidth, *sizes) for name in names for bandwidth in options.bandwidth]
        results += of_table
        tables += [table_of(of_table, text)] if of_table else []
    pipelines = [measure_pipeline(name, bandwidth) for name in PIPELINES for bandwidth in options.bandwidth]
    tables.append(pipeline_table(pipelines))
    for table in tables:
        print(table.markdown())
    if options.date:
        figures = [asdict(result) for result in (*results, *pipelines)]
        save("step_timeline", options.date, __doc__ or "", tables, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
