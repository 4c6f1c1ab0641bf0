"""How far the way of one training step is: the files of ours that it enters, and how often it goes from one to another.

    python tools/step_path.py                                # all techniques and torch's FSDP2
    python tools/step_path.py fully_shard --calls            # one, with the functions in order
    python tools/step_path.py --smoke                        # one technique
    python tools/step_path.py --json                         # for `tests/test_house.py`, which holds the files
    python tools/step_path.py --ranges                       # what a step is called in a trace of torch.profiler
    python tools/step_path.py --date 2026-11-23              # also writes benchmarks/results/2026-11-23-step_path.*

A small net (a linear layer, three blocks of a norm and two linear layers, a linear layer) trains on two ranks over
gloo. Rank 0 traces its fifth step, in all of its threads, in the sources of our packages alone. Transport counts, too:
gloo's reductions and gathers are made of messages in `scale_core.comm`, where those of peers are in C++. "lines" counts
all lines of these files, "read" those of the functions that the step calls, with their docstrings and comments.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.testing import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from report import Table, save

PACKAGES = ["core", "fsdp", "oss", "pipe", "tp", "adascale", "checkpoint"]
WIDTH, BATCH, STEPS = 16, 8, 5

Step = Callable[[], object]


@dataclass
class Trace:
    """What one step called.

    Attributes:
        calls: (file, function) to how often it was called, in the order of first calls; files as `scale_fsdp/step.py`.
        stacks: The stacks of calls that there were, outermost first, in the order of their first time.
        jumps: How often a call was in another file than the call before it.
        depth: The most calls of ours on the stack.
        paths: Of each file, its path.
        read: Of each file, the numbers of the lines of the functions that were called.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    stacks: dict[tuple[tuple[str, str], ...], None] = field(default_factory=dict)
    jumps: int = 0
    depth: int = 0
    paths: dict[str, str] = field(default_factory=dict)
    read: dict[str, set[int]] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """The number of lines of all files."""
        return sum(len(Path(path).read_text(encoding="utf-8").splitlines()) for path in self.paths.values())

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))


class Tracer:
    """Fills a `Trace` while its block runs, from calls in the folders `roots`."""

    def __init__(self, roots: list[Path]) -> None:
        self.trace = Trace()
        self._roots = {str(root): root.parent for root in roots}
        self._names: dict[str, str | None] = {}
        self._last: str | None = None

    def __enter__(self) -> Trace:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self.trace

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _call(self, frame: FrameType, event: str, _arg: object) -> None:
        name = self._ours(frame)
        if name is None:
            return
        stack = []
        at: FrameType | None = frame
        while at is not None:
            above = self._ours(at)
            if above is not None:
                stack.append((above, at.f_code.co_name))
            at = at.f_back
        trace = self.trace
        code = frame.f_code
        trace.calls[name, code.co_qualname] += 1
        if trace.calls[name, code.co_qualname] == 1:
            trace.paths[name] = code.co_filename
            last = max(line for *_, line in code.co_lines() if line is not None)
            trace.read.setdefault(name, set()).update(range(code.co_firstlineno, last + 1))
        trace.depth = max(trace.depth, len(stack))
        trace.jumps += name != self._last
        trace.stacks[tuple(reversed(stack))] = None
        self._last = name

    def _ours(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if code.co_name.startswith("<"):
            return None
        if code.co_filename not in self._names:
            home = next((home for root, home in self._roots.items() if code.co_filename.startswith(root)), None)
            name = None if home is None else str(Path(code.co_filename).relative_to(home))
            runs_ranks = name is not None and name.startswith("scale_core/testing/")
            self._names[code.co_filename] = None if runs_ranks else name
        return self._names[code.co_filename]


class Block(nn.Module):
    """A norm and two linear layers, with what comes in added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Three blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def fully_sharded(_rank: int) -> Step:
    from scale_fsdp import fully_shard

    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return loop(model, adamw(model))


def fsdp2(_rank: int) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return loop(model, adamw(model))


def sharded_data_parallel(_rank: int) -> Step:
    from scale_oss import OSS, ShardedDataParallel

    model = Net()
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return loop(ShardedDataParallel(model, optimizer), optimizer)


def oss_with_ddp(_rank: int) -> Step:
    from scale_oss import OSS

    model = nn.parallel.DistributedDataParallel(Net())
    return loop(model, OSS(model.parameters(), torch.optim.AdamW, lr=1e-3))


def parallelized(_rank: int) -> Step:
    from scale_tp import parallelize

    model = Net()
    plan = {"blocks.*.norm": "replicate", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    parallelize(model, plan, torch.distributed.group.WORLD)
    return loop(model, adamw(model))


def parallel_layers(_rank: int) -> Step:
    from scale_tp import ColumnParallelLinear, RowParallelLinear, initialize_model_parallel

    initialize_model_parallel(2)
    layers = [ColumnParallelLinear(WIDTH, 64, gather_output=False), RowParallelLinear(64, 4, input_is_parallel=True)]
    model = nn.Sequential(*layers)
    return loop(model, adamw(model))


def adascale(_rank: int) -> Step:
    from scale_adascale import AdaScale

    model = nn.parallel.DistributedDataParallel(Net())
    return loop(model, AdaScale(torch.optim.SGD(model.parameters(), lr=1e-3)))


def checkpointed(_rank: int) -> Step:
    from scale_checkpoint import checkpoint_wrapper

    model = Net()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return loop(model, adamw(model))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 4))


def distributed_pipe(rank: int) -> Step:
    from scale_pipe import DistributedPipe

    pipe = DistributedPipe(layers(), "1f1b", balance=[2, 2], chunks=4)
    optimizer, x, target = adamw(pipe), torch.randn(BATCH, WIDTH), torch.randn(BATCH, 4)

    def step() -> None:
        pipe.step(x if rank == 0 else None, target=target if rank else None, loss_fn=nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipe(_rank: int) -> Step:
    from scale_pipe import Pipe

    model = Pipe(layers(), [2, 2], devices=["cpu", "cpu"], chunks=4)
    return loop(model, adamw(model))


TECHNIQUES: dict[str, Callable[[int], Step]] = {
    "fully_shard": fully_sharded,
    "ShardedDataParallel": sharded_data_parallel,
    "OSS with DDP": oss_with_ddp,
    "DistributedPipe": distributed_pipe,
    "Pipe": pipe,
    "parallelize": parallelized,
    "ColumnParallelLinear": parallel_layers,
    "AdaScale": adascale,
    "checkpoint_wrapper": checkpointed,
    "torch FSDP2": fsdp2,
}


_COLUMNS = ["technique", "files", "lines", "read", "functions", "calls", "changes of file", "deepest"]


def home_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is not installed"
    return Path(spec.origin).parent


def trace_step(technique: str) -> Trace:
    """Trains on this rank, and returns what the fifth step called."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    of_torch = technique.startswith("torch")
    roots = [home_of("torch.distributed.fsdp")] if of_torch else [home_of(f"scale_{name}") for name in PACKAGES]
    step = TECHNIQUES[technique](torch.distributed.get_rank())
    for _ in range(STEPS - 1):
        step()
    with Tracer(roots) as trace:
        step()
    return trace


def trace_ranges(technique: str) -> list[str]:
    """Trains on this rank, and returns the names that the third step has in the trace of torch's profiler."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    step = TECHNIQUES[technique](torch.distributed.get_rank())
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
        torch.distributed.barrier()
    return sorted({event.key for event in profiler.key_averages() if event.key.startswith("scale_")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help=f"of {', '.join(TECHNIQUES)}; all of them")
    parser.add_argument("--calls", action="store_true", help="print the functions, too")
    parser.add_argument("--json", action="store_true", help="print figures for a program in place of a table")
    parser.add_argument("--ranges", action="store_true", help="print as JSON what a trace of torch.profiler names")
    parser.add_argument("--smoke", action="store_true", help="one technique")
    parser.add_argument("--date", help="write results of this date")
    options = parser.parse_args()
    unknown = sorted(set(options.techniques) - set(TECHNIQUES))
    if unknown:
        parser.error(f"no technique {unknown[0]!r}: choose from {', '.join(TECHNIQUES)}")
    names = ["fully_shard"] if options.smoke else options.techniques or list(TECHNIQUES)
    if options.ranges:
        print(json.dumps({name: run_ranks(trace_ranges, 2, name)[0] for name in names}))
        return
    traces = {name: run_ranks(trace_step, 2, name)[0] for name in names}
    if options.json:
        print(json.dumps({name: _figures(trace) for name, trace in traces.items()}))
        return
    rows = [
        [name, *(str(value) for key, value in _figures(trace).items() if isinstance(value, int))]
        for name, trace in traces.items()
    ]
    table = Table("One steady step", _COLUMNS, rows)
    print(table.markdown())
    for name, trace in traces.items() if options.calls else ():
        print(f"\n{name}")
        for (file, function), count in trace.calls.items():
            print(f"{count:6}  {file}  {function}")
    if options.date:
        save(
            "step_path",
            options.date,
            __doc__ or "",
            [table],
            [{"technique": n, **_figures(t)} for n, t in traces.items()],
        )


def _figures(trace: Trace) -> dict[str, Any]:
    return {
        "files": len(trace.files),
        "lines": trace.lines,
        "read": sum(map(len, trace.read.values())),
        "functions": len(trace.calls),
        "calls": trace.calls.total(),
        "jumps": trace.jumps,
        "depth": trace.depth,
        "path": trace.files,
    }


if __name__ == "__main__":
    main()
