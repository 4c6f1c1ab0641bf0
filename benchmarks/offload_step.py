"""The optimizer step on the host: clip, Adam, cast out to bf16, beside torch's own parts one after the other.

    python benchmarks/offload_step.py                      # 64M elements, flat and in 1,020 tensors, 7 turns
    python benchmarks/offload_step.py --smoke              # 1M elements, one turn
    python benchmarks/offload_step.py --date 2026-11-21    # also writes results/2026-11-21-offload_step.*

What stands on the host when a model is offloaded is fp32: parameters, gradients and Adam's two moments. A step clips
the gradients by their norm, updates, and writes the new values to the bf16 copy that is computed with. The floor is 28
bytes per parameter, what Adam alone must read and write, at the rate at which this machine copies a large tensor (its
bytes read and written, taken before each turn). A cost is time over that floor; the median over the turns. "Many" are
the tensors of 85 transformer blocks of width 256. Clipping is active: the norm is above its limit. Each engine has
tensors of its own, one thread works, as one rank of several on a machine would.

"torch" is `clip_grad_norm_`, `Adam(fused=True)` and one `copy_` per tensor; "torch, Adam only" leaves out the first and
the last; "scale-fsdp" is `OffloadOptimizer` with `clip_grad_norm_` and `cast_to`, all of its state on the host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import torch
from measure import spending
from report import Table, save
from torch import Tensor, nn

from scale_fsdp import OffloadOptimizer

ADAM_BYTES = 28
GOALS = {"flat": 1.6, "many": 1.7}
ENGINES = ("torch", "torch, Adam only", "scale-fsdp")
WIDTH = 256


def flat(num_elements: int) -> list[tuple[int, ...]]:
    return [(num_elements,)]


def many(num_elements: int) -> list[tuple[int, ...]]:
    """The shapes of so many transformer blocks as come next to that number."""
    d = WIDTH
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    blocks = max(1, round(num_elements / sum(torch.Size(shape).numel() for shape in block)))
    return block * blocks


LAYOUTS: dict[str, Callable[[int], list[tuple[int, ...]]]] = {"flat": flat, "many": many}


class Model:
    """Parameters with gradients and the bf16 copies of them, touched before.

    Args:
        shapes: Of the parameters.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.copies = [param.detach().to(torch.bfloat16) for param in self.params]
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator)
        self.num_elements = sum(param.numel() for param in self.params)


def torch_step(model: Model, *, only_adam: bool = False) -> Callable[[], object]:
    optimizer = torch.optim.Adam(model.params, lr=1e-4, fused=True)

    def cast_out() -> None:
        for param, copy in zip(model.params, model.copies, strict=True):
            copy.copy_(param.detach())

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.params, 1.0)
        optimizer.step()
        cast_out()

    return optimizer.step if only_adam else step


def scale_step(model: Model) -> Callable[[], object]:
    optimizer = OffloadOptimizer(torch.optim.Adam, model.params, host_fraction=1.0, lr=1e-4)
    for param, copy in zip(model.params, model.copies, strict=True):
        optimizer.cast_to(param, copy)

    def step() -> None:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    return step


def make(engine: str, model: Model) -> Callable[[], object]:
    return scale_step(model) if engine == "scale-fsdp" else torch_step(model, only_adam=engine != "torch")


@dataclass
class Result:
    """One engine on one layout.

    Attributes:
        num_tensors: How many parameters there are.
        wall_costs: Per turn, wall time over the floor.
        cpu_costs: Per turn, CPU time of all threads over that of the floor.
        copy_rates: Per turn, the rate of the copy in bytes per second of wall time.
    """

    engine: str
    layout: str
    threads: int
    num_elements: int
    num_tensors: int
    wall_costs: list[float] = field(default_factory=list)
    cpu_costs: list[float] = field(default_factory=list)
    copy_rates: list[float] = field(default_factory=list)


def measure(layout: str, num_elements: int, turns: int, repeats: int) -> list[Result]:
    """All engines by turns, each on its own tensors, one after the other in memory."""
    shapes = LAYOUTS[layout](num_elements)
    results, steps = [], []
    for engine in ENGINES:
        model = Model(shapes)
        results.append(Result(engine, layout, torch.get_num_threads(), model.num_elements, len(shapes)))
        steps.append(make(engine, model))
        for _ in range(2):  # The first makes the state.
            steps[-1]()
    source = torch.ones(num_elements)
    target = torch.zeros_like(source)
    for turn in range(turns):
        for place in range(len(steps)):
            number = (turn + place) % len(steps)
            wall, cpu = copying(source, target, repeats)
            floor = ADAM_BYTES * results[number].num_elements / (2 * source.nbytes)  # in copies of that tensor
            with spending() as spent:
                for _ in range(repeats):
                    steps[number]()
            results[number].wall_costs.append(spent.wall_seconds / repeats / (wall * floor))
            results[number].cpu_costs.append(spent.cpu_seconds / repeats / (cpu * floor))
            results[number].copy_rates.append(2 * source.nbytes / wall)
    return results


def copying(source: Tensor, target: Tensor, repeats: int) -> tuple[float, float]:
    """Seconds of wall time and of CPU time for one copy."""
    target.copy_(source)
    with spending() as spent:
        for _ in range(repeats):
            target.copy_(source)
    return spent.wall_seconds / repeats, spent.cpu_seconds / repeats


def table_of(results: Sequence[Result]) -> Table:
    heads = ["threads", "layout", "tensors", "engine", "cost, wall", "cost, CPU", "goal", "copy, GB/s"]
    rows = [
        [
            str(r.threads),
            r.layout,
            str(r.num_tensors),
            r.engine,
            f"{median(r.wall_costs):.2f}",
            f"{median(r.cpu_costs):.2f}",
            f"<= {GOALS[r.layout]}" if r.engine == "scale-fsdp" else "",
            f"{median(r.copy_rates) / 1e9:.1f}",
        ]
        for r in results
    ]
    return Table(f"Time over {ADAM_BYTES} bytes per parameter at the rate of a copy", heads, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=64 * 2**20)
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="may be given several times; default: both")
    parser.add_argument("--threads", type=int, action="append", help="may be given several times; default: 1")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3, help="steps per turn")
    parser.add_argument("--smoke", action="store_true", help="1M elements, one turn: whether it runs")
    parser.add_argument("--date", help="also writes results/DATE-offload_step.json and .md")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.elements, options.turns, options.repeats = 2**20, 1, 1
    results = []
    for threads in options.threads or [1]:
        torch.set_num_threads(threads)
        for layout in options.layout or LAYOUTS:
            results += measure(layout, options.elements, options.turns, options.repeats)
    table = table_of(results)
    print(table.markdown())
    if options.date:
        save("offload_step", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
