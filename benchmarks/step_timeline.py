"""How long a step takes on a device with streams, by the order of its work: a simulation with durations.

    python benchmarks/step_timeline.py                     # all engines at 40, 80 and 200 GB/s
    python benchmarks/step_timeline.py --smoke             # a tiny model
    python benchmarks/step_timeline.py --date 2026-11-29   # also writes results/2026-11-29-step_timeline.*

The step runs in a simulation of one of 16 ranks: the operators and collectives are the real ones, on tensors without
values. Each stream has a clock. An operator begins when the host has launched it and its stream is free; a collective
begins on the communicator's stream when the stream that calls it has come so far; a wait moves the clock of the stream
that waits. Products take their floating-point operations at 500 TFLOP/s, other operators their bytes at 2.5 TB/s, a
launch 6 us of the host, a collective 20 us and the bytes that a ring sends at the bandwidth of the column.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

import torch
from report import Table, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from scale_check.simulate import Simulation, fake_device, simulate
from scale_checkpoint import checkpoint_wrapper
from scale_core import compat
from scale_core.comm import collectives
from scale_core.tree import tensors_in
from scale_fsdp import MixedPrecisionPolicy, fully_shard
from scale_fsdp.runtime.root import Root
from scale_fsdp.runtime.unit import units_in
from scale_oss import OSS, ShardedDataParallel
from scale_pipe.distributed.program import CrossStageTensors, Receive, Send, Task, build_programs
from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.registry import get_schedule

GIB = 2**30
WORLD_SIZE = 16
FLOPS_PER_SECOND, BYTES_PER_SECOND = 500e12, 2.5e12
LAUNCH_SECONDS, COLLECTIVE_SECONDS = 6e-6, 20e-6
PIPELINES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
PIPELINE_RANKS, MICRO_BATCHES = 4, 16
FORWARD_SECONDS, ACTIVATION_BYTES = 10e-3, 128 * 2**20  # of all stages of a rank, and of one transfer
COMPUTE, COMMUNICATION = "compute", "communication"
_PRODUCTS = ("aten::mm", "aten::addmm")
_NO_KERNEL = ("aten::empty", "aten::detach", "aten::set_", "aten::is_", "aten::new_empty", "prim::")


@dataclass
class Clocks:
    """The time of the host and of each stream, in seconds.

    Attributes:
        host: When the host is free.
        streams: When each stream is free.
        current: The streams that are entered, the innermost last.
        bytes_per_second: Of collectives.
        in_start: A collective is being started whose wait comes later.
        last_end: When the last collective ends.
    """

    bytes_per_second: float
    host: float = 0.0
    streams: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    current: list[str] = field(default_factory=lambda: [COMPUTE])
    in_start: bool = False
    last_end: float = 0.0

    @property
    def now(self) -> float:
        return max(self.host, *self.streams.values())

    def run(self, stream: str, seconds: float, after: float = 0.0) -> float:
        """Runs something of this duration on a stream; returns when it ends."""
        self.host += LAUNCH_SECONDS
        self.streams[stream] = max(self.streams[stream], self.host, after) + seconds
        return self.streams[stream]

    def wait(self, time: float) -> None:
        """The current stream does nothing before this time."""
        stream = self.current[-1]
        self.streams[stream] = max(self.streams[stream], time)


class Timed(TorchDispatchMode):
    """Moves the clocks with every operator of a simulation."""

    def __init__(self, clocks: Clocks, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clocks, self.simulation = clocks, simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(compat.is_wrapper, types)):
            return NotImplemented  # Its operators on plain tensors come by afterwards.
        sent = len(self.simulation.collectives)
        result = func(*args, **(kwargs or {}))
        name, clocks = func.name(), self.clocks
        if len(self.simulation.collectives) > sent:
            num_bytes = self.simulation.collectives[-1].bytes_sent
            seconds = COLLECTIVE_SECONDS + num_bytes / clocks.bytes_per_second if clocks.bytes_per_second else 0.0
            clocks.last_end = clocks.run(COMMUNICATION, seconds, clocks.streams[clocks.current[-1]])
            if not clocks.in_start:  # The caller waits at once.
                clocks.wait(clocks.last_end)
            return result
        tensors = [tensor for tensor in tensors_in([args, result]) if tensor.device.type == "sim"]
        if not tensors or func.is_view or name.startswith(_NO_KERNEL) or name.startswith("c10d::"):
            return result
        clocks.run(clocks.current[-1], _seconds(name, args, result, tensors))
        return result


def _seconds(name: str, args: Any, result: Any, tensors: Sequence[Tensor]) -> float:
    if name.startswith(_PRODUCTS):
        left, right = [tensor for tensor in args if isinstance(tensor, Tensor) and tensor.dim() == 2][-2:]
        return 2 * left.shape[0] * left.shape[1] * right.shape[1] / FLOPS_PER_SECOND
    if name.startswith("aten::copy_"):
        tensors = args[:2]  # The target is written, and not read.
    return sum(tensor.nbytes for tensor in tensors) / BYTES_PER_SECOND


class TimedWork:
    """The handle of a collective of scale_core: its wait moves the current stream's clock."""

    def __init__(self, clocks: Clocks, work: Any) -> None:
        self.clocks, self.work, self.end = clocks, work, clocks.last_end

    def wait(self, *timeout: Any) -> bool:
        self.clocks.wait(self.end)
        return True


def timed_streams(clocks: Clocks) -> tuple[type, Callable[..., Any], Callable[..., Any]]:
    """Stream, `current_stream` and `stream` of a device module, for engines that make streams of their own."""

    class Stream:
        count = 0

        def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
            Stream.count += 1
            self.name, self.time = name or f"side {Stream.count}", 0.0

        def wait_stream(self, other: Any) -> None:
            clocks.streams[self.name] = max(clocks.streams[self.name], clocks.streams[other.name])

        def wait_event(self, event: Any) -> None:
            clocks.streams[self.name] = max(clocks.streams[self.name], event.time)

        def record_event(self, event: Any = None) -> Any:
            event = event or Stream()
            event.time = clocks.streams[self.name]
            return event

        def record(self, stream: Any = None) -> None:
            self.time = clocks.streams[stream.name if stream is not None else clocks.current[-1]]

        def wait(self, stream: Any = None) -> None:
            name = stream.name if stream is not None else clocks.current[-1]
            clocks.streams[name] = max(clocks.streams[name], self.time)

        def synchronize(self) -> None:
            clocks.host = max(clocks.host, self.time)

        def query(self) -> bool:
            return True

    @contextmanager
    def entered(stream: Any) -> Iterator[None]:
        clocks.current.append(stream.name)
        try:
            yield
        finally:
            clocks.current.pop()

    return Stream, lambda device=None: Stream(name=clocks.current[-1]), entered


@contextmanager
def durations(clocks: Clocks, simulation: Simulation) -> Iterator[None]:
    """Inside, operators, collectives and waits move the clocks."""
    start, module = collectives.start_work, fake_device._module
    kept = {name: module.__dict__.get(name) for name in ("Stream", "Event", "current_stream", "stream")}

    def timed_start(peer: Any, begin: Any) -> Any:
        clocks.in_start = True
        try:
            peer, work = start(peer, begin)
        finally:
            clocks.in_start = False
        return peer, TimedWork(clocks, work)

    stream, current_stream, entered = timed_streams(clocks)
    module.__dict__.update(Stream=stream, Event=stream, current_stream=current_stream, stream=entered)
    collectives.start_work = timed_start
    try:
        with Timed(clocks, simulation):
            yield
    finally:
        collectives.start_work = start
        for name, value in kept.items():
            module.__dict__.pop(name)
            if value is not None:
                module.__dict__[name] = value


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
        cast(Root, unit.root).reductions.waits_at_first_gradient = True
    return result


def torch_sharded(model: nn.Sequential) -> tuple[nn.Module, Any]:
    policy = TorchMixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with compat.without_fake_tensors():
        mesh = init_device_mesh("sim", (WORLD_SIZE,))
    for block in model:
        fsdp2(block, mesh=mesh, mp_policy=policy)
    fsdp2(model, mesh=mesh, mp_policy=policy)
    return model, adam(model)


def oss(model: nn.Sequential) -> tuple[nn.Module, Any]:
    model = model.bfloat16()
    optimizer = OSS(model.parameters(), AdamW, foreach=False)
    return ShardedDataParallel(model, optimizer), optimizer


ENGINES: dict[str, Train] = {
    "FSDP2": torch_sharded,
    "fully_shard": sharded,
    "fully_shard, waiting at the first gradient": waiting_early,
    "fully_shard, not resharded after the forward": partial(sharded, reshard_after_forward=False),
    "fully_shard, checkpointed": partial(sharded, checkpoints=True),
    "OSS + ShardedDataParallel, bf16": oss,
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


def step_of(engine: str, bytes_per_second: float, layers: int, width: int, tokens: int) -> tuple[float, float, int]:
    """Seconds of a steady step, seconds of the host, and the peak in bytes; collectives take no time at 0 bytes/s."""
    with simulate(world_size=WORLD_SIZE, device="sim", check=False) as simulation:
        clocks = Clocks(bytes_per_second)
        with durations(clocks, simulation):
            with torch.device("sim"):
                plain = nn.Sequential(*(Block(width) for _ in range(layers)))
            model, optimizer = ENGINES[engine](plain)
            for step in range(4):
                if step == 3:
                    simulation.restart()
                    begin, clocks.host = clocks.now, clocks.now
                model(torch.zeros(tokens, width, device="sim", dtype=torch.bfloat16)).sum().backward()
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
    parser.add_argument("--engine", choices=ENGINES, action="append", help="may be given several times; default: all")
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
    results = []
    for engine in options.engine or ENGINES:
        results += [measure(engine, bandwidth, *sizes) for bandwidth in options.bandwidth]
    title = f"{options.layers} blocks of width {options.width}, {options.tokens} tokens, {WORLD_SIZE} ranks, simulated"
    pipelines = [measure_pipeline(name, bandwidth) for name in PIPELINES for bandwidth in options.bandwidth]
    tables = [table_of(results, title), pipeline_table(pipelines)]
    for table in tables:
        print(table.markdown())
    if options.date:
        figures = [asdict(result) for result in (*results, *pipelines)]
        save("step_timeline", options.date, __doc__ or "", tables, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
