"""One transformer block, divided between ranks, beside torch's `parallelize_module`.

    python benchmarks/tensor_parallel.py                       # worlds 2 and 4, 7 turns; some minutes of two cores
    python benchmarks/tensor_parallel.py --worlds 2 --turns 9
    python benchmarks/tensor_parallel.py --smoke               # a tiny block, one turn: that it runs
    python benchmarks/tensor_parallel.py --check               # fails where a goal is missed
    python benchmarks/tensor_parallel.py --date 2026-11-22     # also writes results/2026-11-22-tensor-parallel.*

A block in the manner of Llama (RMSNorm, attention, gated perceptron), forward and backward with a gradient for the
input, fp32, gloo, one thread for each rank, the same block and the same plan for both. Every candidate's ranks stay
alive and they take turns, so that what the machine does beside it meets all alike; a figure is the median over the
turns of its ratio to torch's in the same turn.

"CPU" is the CPU time of all ranks, the transport's threads included, over that of torch's. "alone" is that of the
whole block on one process, over the same. "sent" is what one rank writes to its sockets in a step, counted by the
kernel; "collectives" is how often all ranks exchange something in it: operations of torch's process group there, and
here sums, gathers and scattered sums, those of copies and questions to each other included, whatever messages these are
made of. "error" is the largest difference of an output from the whole block's. Under torch's sequence parallelism the
gradients of norms are left as summands; they are summed in the step here, as an optimizer would have it.

Beside them stand the same blocks with `overlap_pieces=1`, and FairScale's layers where FairScale is installed; these
need no CUDA, and have no sequence parallelism. On one machine with few cores overlap can gain little: the transport
works on the cores that multiply. What it may cost is seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import MB, OperationCount, has_fairscale, spending
from report import Table, save
from team import ALLOCATOR_FOR_TIME, Nursery, Team, raise_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from scale_core.comm.collectives import exchange
from scale_tp import comm as moves
from scale_tp.async_tp import chunks as pieces
from scale_tp.conversion.parallelize import parallelize
from scale_tp.layers import linear_ops as copies

HEADS, KEY_VALUE_HEADS = 8, 4
WARM_UP = 3
GOAL_CPU = 0.95
TITLES = {
    "alone": "one process",
    "torch": "torch parallelize_module",
    "scale": "scale-tp parallelize",
    "torch-sequence": "torch, sequence parallel",
    "scale-sequence": "scale-tp, sequence parallel",
    "scale-overlap": "scale-tp, overlap",
    "scale-sequence-overlap": "scale-tp, sequence parallel, overlap",
    "fairscale": "FairScale's layers",
}
PLAN = {
    "blocks.*.attention.[qkv]": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.feed.(gate|up)": "colwise",
    "blocks.*.feed.down": "rowwise",
}
FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
COUNTED = (
    moves.start_all_reduce,
    moves.start_all_gather,
    moves.start_reduce_scatter,
    pieces.all_gather_chunks,
    pieces.reduce_scatter_chunks,
    copies.all_reduce_copies,
    exchange,
)


@dataclass
class Result:
    """What was found of a candidate.

    Attributes:
        world: The number of ranks.
        name: Of `TITLES`.
        cpu: Seconds of all ranks for a step, by turn.
        wall: Those of the slowest rank.
        sent: Bytes that one rank sends in a step.
        collectives: In a step.
        error: The largest difference of an output.
    """

    world: int
    name: str
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    sent: float = 0.0
    collectives: int = 0
    error: float = 0.0


class Attention(nn.Module):
    """Causal attention with shared key-value heads; [batch, positions, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = width // HEADS
        self.num_heads, self.num_key_value_heads = HEADS, KEY_VALUE_HEADS
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, KEY_VALUE_HEADS * self.head_dim, bias=False)
        self.v = nn.Linear(width, KEY_VALUE_HEADS * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return y


class Feed(nn.Module):
    """A gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Both, with a norm before each and a sum behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.feed_norm, self.feed = nn.RMSNorm(width), Feed(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = x + self.feed(self.feed_norm(x))
        return y


class Model(nn.Module):
    """One block in a list, as models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def divided_by_torch(model: Model, *, sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1) if sequence_parallel else Replicate())
    plan: dict[str, Any] = {f"blocks.0.attention.{name}": columns for name in "qkv"}
    plan |= {"blocks.0.attention.out": rows, "blocks.0.feed.down": rows}
    plan |= {f"blocks.0.feed.{name}": columns for name in ("gate", "up")}
    if not sequence_parallel:
        parallelize_module(model, mesh, plan)
        return model
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan |= dict.fromkeys(("blocks.0.norm", "blocks.0.feed_norm"), SequenceParallel(use_local_output=True))
    plan |= {"blocks.0.attention": gathered, "blocks.0.feed": gathered}
    parallelize_module(model, mesh, plan)

    def forward(x: Tensor) -> Tensor:
        part = DTensor.from_local(x, mesh, (Replicate(),), run_check=False).redistribute(mesh, (Shard(1),)).to_local()
        output = DTensor.from_local(model(part), mesh, (Shard(1),), run_check=False)
        whole: Tensor = output.redistribute(mesh, (Replicate(),)).to_local()
        return whole

    return forward


def start_rank(order: dict[str, Any]) -> dict[str, Callable[..., dict[str, Any]]]:
    """Builds one rank of a candidate."""
    name, width = order["candidate"], order["width"]
    torch.manual_seed(0)
    model = Model(width)
    data = torch.randn(order["batch"], order["length"], width)
    torch.manual_seed(1)
    target = torch.randn_like(data)
    with torch.no_grad():
        expected = model(data)
    sequence_parallel = "sequence" in name
    forward: Callable[[Tensor], Tensor] = model
    if name.startswith("torch"):
        forward = divided_by_torch(model, sequence_parallel=sequence_parallel)
    elif name.startswith("scale"):
        options: dict[str, Any] = {"overlap_pieces": 1} if name.endswith("overlap") else {}
        parallelize(model, PLAN, dist.group.WORLD, sequence_parallel=sequence_parallel, **options)
    elif name == "fairscale":
        take_layers_of_fairscale(model)

    def step() -> None:
        x = data.detach().requires_grad_()
        (forward(x) * target).sum().backward()
        for param in model.parameters():
            # torch leaves the norms' gradients as summands, for whoever reads them first; here an optimizer would.
            if isinstance(param.grad, DTensor) and any(placed.is_partial() for placed in param.grad.placements):
                param.grad.redistribute(placements=[Replicate()])
        model.zero_grad()

    def run(steps: int) -> dict[str, Any]:
        with spending() as spent:
            for _ in range(steps):
                step()
        found = {"cpu": spent.cpu_seconds, "wall": spent.wall_seconds, "sent": spent.bytes_sent}
        return {key: value / steps for key, value in found.items()}

    def check() -> dict[str, Any]:
        """What is exchanged, and what comes out."""
        with torch.no_grad():
            error = (forward(data) - expected).abs().max().item()
        if name.startswith("scale"):
            with counting() as number:
                step()
            return {"difference": error, "collectives": sum(number)}
        with OperationCount() as counted:
            step()
        if name == "fairscale":
            return {"difference": error, "collectives": counted.collectives.total()}
        # Below each of these is one of the process group, which would count once more.
        asked = [counted.operations[f"_c10d_functional::{name}"] for name in FUNCTIONAL]
        return {"difference": error, "collectives": sum(asked)}

    return {"run": run, "check": check}


def take_layers_of_fairscale(model: Model) -> None:
    """Puts FairScale's parallel layers, with this rank's parts of the weights, in the place of the linear ones."""
    from fairscale.nn import model_parallel as theirs

    theirs.initialize_model_parallel(dist.get_world_size())
    for block in model.blocks:
        for module, names, kind, dim in (
            (block.attention, ("q", "k", "v"), theirs.ColumnParallelLinear, 0),
            (block.feed, ("gate", "up"), theirs.ColumnParallelLinear, 0),
            (block.attention, ("out",), theirs.RowParallelLinear, 1),
            (block.feed, ("down",), theirs.RowParallelLinear, 1),
        ):
            for name in names:
                whole = getattr(module, name)
                options = {"gather_output": False} if dim == 0 else {"input_is_parallel": True}
                layer = kind(whole.in_features, whole.out_features, bias=False, init_method=lambda x: x, **options)
                with torch.no_grad():
                    layer.weight.copy_(whole.weight.chunk(dist.get_world_size(), dim)[dist.get_rank()])
                setattr(module, name, layer)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts how often all ranks exchange something: one for each, in the list, of all that scale-tp calls."""
    number: list[int] = []

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number.append(1)
            return act(*args, **kwargs)

        return call

    replaced = [
        (module, name, value)
        for path, module in list(sys.modules.items())
        if path.split(".")[0] == "scale_tp"
        for name, value in list(vars(module).items())
        if any(value is act for act in COUNTED)
    ]
    for module, name, value in replaced:
        setattr(module, name, counted(value))
    try:
        yield number
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def measure(world: int, options: argparse.Namespace) -> list[Result]:
    """Lets the candidates take turns."""
    sizes = {"width": options.width, "length": options.length, "batch": options.batch}
    results = {name: Result(world, name) for name in TITLES if name != "fairscale" or has_fairscale()}
    with Nursery(__file__, ALLOCATOR_FOR_TIME) as nursery:
        teams: dict[str, Team] = {}
        try:
            for name, result in results.items():
                teams[name] = Team(nursery, {"candidate": name, **sizes}, 1 if name == "alone" else world)
                checked = teams[name].ask("check")[0]
                result.error, result.collectives = checked["difference"], checked["collectives"]
                teams[name].ask("run", steps=WARM_UP)
            for _ in range(options.turns):
                for name, result in results.items():
                    answers = teams[name].ask("run", steps=options.steps)
                    result.cpu.append(sum(answer["cpu"] for answer in answers))
                    result.wall.append(max(answer["wall"] for answer in answers))
                    result.sent = max(answer["sent"] for answer in answers)
        finally:
            for team in teams.values():
                team.close()
    return list(results.values())


def ratio(results: Sequence[Result], name: str, base: str = "torch") -> float:
    """The median over the turns of what a candidate's ranks spent, over what another's did."""
    by_name = {result.name: result for result in results}
    return median(mine / other for mine, other in zip(by_name[name].cpu, by_name[base].cpu, strict=True))


def table_of(results: Sequence[Result], options: argparse.Namespace) -> Table:
    rows = [
        [
            TITLES[result.name],
            f"{ratio(results, result.name, 'torch-sequence' if 'sequence' in result.name else 'torch'):.2f}",
            f"{1000 * median(result.wall):.1f}",
            f"{result.sent / MB:.2f}",
            str(result.collectives),
            f"{result.error:.0e}",
        ]
        for result in results
    ]
    title = f"World {results[0].world}: width {options.width}, {options.batch} x {options.length} positions"
    return Table(title, ["", "CPU / torch's", "wall ms", "sent MB", "collectives", "error"], rows)


def check(results: Sequence[Result]) -> list[str]:
    """Returns which goals are missed."""
    by_name = {result.name: result for result in results}
    problems = []
    for mine, theirs in (("scale", "torch"), ("scale-sequence", "torch-sequence")):
        where = f"world {results[0].world}, {TITLES[mine]}"
        found = ratio(results, mine, theirs)
        if found > GOAL_CPU:
            problems.append(f"{where}: CPU {found:.3f} of torch's, the goal is {GOAL_CPU}")
        if by_name[mine].sent > 1.01 * by_name[theirs].sent:  # Headers of messages are counted, too.
            problems.append(f"{where}: sends {by_name[mine].sent:,.0f} bytes, torch {by_name[theirs].sent:,.0f}")
        if by_name[mine].collectives > by_name[theirs].collectives:
            problems.append(f"{where}: {by_name[mine].collectives} collectives, torch {by_name[theirs].collectives}")
    return problems


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="per candidate and turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128, help="of a sequence")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("--smoke", action="store_true", help="a tiny block, one turn")
    parser.add_argument("--date", help="writes results/DATE-tensor-parallel.json and .md")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.worlds, options.width, options.length, options.turns, options.steps = "2", 32, 8, 1, 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.nursery is not None:
        return raise_ranks(options.nursery, start_rank)
    tables, problems, figures = [], [], []
    for world in map(int, options.worlds.split(",")):
        results = measure(world, options)
        tables.append(table_of(results, options))
        print(tables[-1].markdown())
        problems += check(results)
        figures += [asdict(result) for result in results]
    if options.date:
        save("tensor-parallel", options.date, __doc__ or "", tables, figures)
    if problems and options.check:
        print("\n".join(problems), file=sys.stderr)
    return 1 if problems and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
