"""A pipeline of two ranks beside one process that accumulates, and beside torch's schedules.

    python benchmarks/pipeline.py                       # all schedules, 5 turns; some minutes of two cores
    python benchmarks/pipeline.py --only 1f1b,torch-1f1b --turns 9
    python benchmarks/pipeline.py --smoke               # a tiny model, one turn: that it runs
    python benchmarks/pipeline.py --check               # fails where a goal is missed
    python benchmarks/pipeline.py --date 2026-11-21     # also writes results/2026-11-21-pipeline.*

Eight transformer blocks, eight micro-batches, fp32, gloo, one thread for each rank. Every candidate's ranks stay alive
and they take turns, so that what the machine does beside it meets all alike; a figure is the median over the turns of
its ratio to the plain process in the same turn.

"CPU" is the CPU time of both ranks, the transport's threads included, over that of the plain process. "wall" is the
time of the slower rank, over the plain process; "ideal" the same from the simulator: the schedule's makespan under the
times of the stages, measured one by one in the plain process, with nothing for transfers. "wall / ideal" has the goal
of 1.04. "simulated" is the makespan under the times that the ranks' own actions took in their last step, over the
makespan of that step: how well the simulator tells what happens. "losses" compares with the plain process, which adds
micro-batches up in order.

"two halves" is what the machine takes for two processes at once: each computes its half of the model forward and
backward, micro-batch by micro-batch, in one piece, sends nothing and waits for nobody. No pipeline can take less than
that; in the quiet of a machine with enough caches and memory channels it would be 1.00 and 0.500.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import spending
from report import Table, save
from team import ALLOCATOR_FOR_TIME, Nursery, Team, TeamError, raise_ranks
from torch import Tensor, nn

from scale_pipe import Costs, DistributedPipe, profile_stages, simulate
from scale_pipe.schedules.registry import get_schedule

RANKS, CHUNKS, BLOCKS = 2, 8, 8
WARM_UP = 3
GOAL_CPU, GOAL_WALL, GOAL_SIMULATED = 1.05, 1.04, 0.05


@dataclass(frozen=True)
class Candidate:
    """A schedule, ours or torch's.

    Attributes:
        title: For the table.
        schedule: Our name for it; None for the plain process and its halves.
        stages: Of one rank.
        torch_name: The class of torch's, if it is theirs.
        num_ranks: How many ranks it takes.
    """

    title: str
    schedule: str | None = None
    stages: int = 1
    torch_name: str = ""
    num_ranks: int = RANKS


CANDIDATES = {
    "plain": Candidate("one process, accumulating", num_ranks=1),
    "halves": Candidate("two halves, nothing sent"),
    "gpipe": Candidate("GPipe", "gpipe"),
    "1f1b": Candidate("1F1B", "1f1b"),
    "interleaved": Candidate("interleaved 1F1B", "interleaved_1f1b", 2),
    "breadth-first": Candidate("looped breadth-first", "looped_breadth_first", 2),
    "zb-h1": Candidate("ZB-H1", "zb_h1"),
    "zb-v": Candidate("ZB-V", "zb_v", 2),
    "v-half": Candidate("V-Half", "v_half", 2),
    "v-min": Candidate("V-Min", "v_min", 2),
    "dual-pipe-v": Candidate("DualPipe-V", "dual_pipe_v", 2),
    "solve": Candidate("solved, 2 stages per rank", "solve", 2),
    "torch-gpipe": Candidate("torch GPipe", "gpipe", 1, "ScheduleGPipe"),
    "torch-1f1b": Candidate("torch 1F1B", "1f1b", 1, "Schedule1F1B"),
    "torch-interleaved": Candidate("torch interleaved 1F1B", "interleaved_1f1b", 2, "ScheduleInterleaved1F1B"),
    "torch-zb-v": Candidate("torch ZB-V", "zb_v", 2, "ScheduleZBVZeroBubble"),
    "torch-dual-pipe-v": Candidate("torch DualPipe-V", "dual_pipe_v", 2, "ScheduleDualPipeV"),
}


@dataclass
class Result:
    """What was found of a candidate; ratios to the plain process, by turn."""

    name: str
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    ideal: float | None = None
    simulated: float | None = None
    equal: bool | None = None
    error: str | None = None


class Block(nn.Module):
    """Attention and a feed-forward layer, [batch, sequence, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = (p.view(batch, sequence, 4, width // 4).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        y: Tensor = x + self.feed(x)
        return y


def build(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def batch_of(order: Mapping[str, Any], step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (CHUNKS * order["sequences"], order["length"], order["width"])
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


Step = Callable[[Tensor, Tensor], float | None]
"""One step on a batch and its target; returns the mean loss where it is known."""


def start_rank(order: dict[str, Any]) -> dict[str, Callable[..., dict[str, Any]]]:
    """Builds one rank of a candidate."""
    candidate = CANDIDATES[order["candidate"]]
    model = build(order["width"])
    pipe: DistributedPipe | None = None
    if candidate.num_ranks == 1:
        step, params = plain_step(model), list(model.parameters())
    elif candidate.schedule is None:
        size = BLOCKS // RANKS
        half = model[dist.get_rank() * size : (dist.get_rank() + 1) * size]
        step, params = half_step(half), list(half.parameters())
    elif candidate.torch_name:
        step, params = torch_step(model, candidate, order)
    else:
        balance = [BLOCKS // (RANKS * candidate.stages)] * (RANKS * candidate.stages)
        pipe = DistributedPipe(model, candidate.schedule, balance=balance, chunks=CHUNKS)
        params, step = list(pipe.parameters()), piped_step(pipe)
    optimizer = torch.optim.SGD(params, lr=1e-3)
    done = 0

    def run(steps: int) -> dict[str, Any]:
        nonlocal done
        losses, batches = [], [batch_of(order, done + number) for number in range(steps)]
        done += steps
        with spending() as spent:
            for x, target in batches:
                losses.append(step(x, target))
                optimizer.step()
                optimizer.zero_grad()
        return {"losses": losses, "cpu": spent.cpu_seconds / steps, "wall": spent.wall_seconds / steps}

    def costs(stages: int) -> dict[str, Any]:
        """The times of equal stages, measured one by one: on the plain process."""
        size = BLOCKS // stages
        found = profile_stages(
            [model[i : i + size] for i in range(0, BLOCKS, size)], batch_of(order, 0)[0][: order["sequences"]]
        )
        return asdict(found)

    def trace() -> dict[str, Any]:
        """How long the last step took by the simulator, over what it took."""
        assert pipe is not None
        found = pipe.measured()
        return {"simulated": simulate(pipe.schedule, found.costs).makespan / found.makespan}

    return {"run": run, "costs": costs, "trace": trace}


def plain_step(model: nn.Sequential) -> Step:
    def step(x: Tensor, target: Tensor) -> float:
        total = torch.zeros(())
        for part, to in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            loss = nn.functional.mse_loss(model(part), to) / CHUNKS
            loss.backward()
            total += loss.detach()
        return total.item()

    return step


def half_step(half: nn.Module) -> Step:
    """A part of the model by itself: it is given what the others would send, and waits for nobody."""
    is_last = dist.get_rank() == RANKS - 1

    def step(x: Tensor, target: Tensor) -> None:
        for part, to in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            output = half(part.detach().requires_grad_(dist.get_rank() > 0))
            if is_last:
                (nn.functional.mse_loss(output, to) / CHUNKS).backward()
            else:
                output.backward(to)

    return step


def piped_step(pipe: DistributedPipe) -> Step:
    return lambda x, target: pipe.step(x, target=target, loss_fn=nn.functional.mse_loss).item()


def torch_step(model: nn.Sequential, candidate: Candidate, order: Mapping[str, Any]) -> tuple[Step, list[nn.Parameter]]:
    from torch.distributed import pipelining

    assert candidate.schedule is not None
    rank, num_stages = dist.get_rank(), RANKS * candidate.stages
    placement = get_schedule(candidate.schedule, RANKS, CHUNKS, candidate.stages).placement
    size = BLOCKS // num_stages
    stages = [
        pipelining.PipelineStage(model[s * size : (s + 1) * size], s, num_stages, torch.device("cpu"))
        for s in placement.stages_of[rank]
    ]
    kind = getattr(pipelining, candidate.torch_name)
    given: Any = stages if candidate.stages > 1 else stages[0]
    schedule = kind(given, CHUNKS, loss_fn=nn.functional.mse_loss)
    first, last = 0 in placement.stages_of[rank], num_stages - 1 in placement.stages_of[rank]

    def step(x: Tensor, target: Tensor) -> float | None:
        losses: list[Tensor] = []
        schedule.step(*[x] * first, target=target if last else None, losses=losses if last else None)
        return sum(loss.item() for loss in losses) / CHUNKS if last else None

    return step, [param for stage in stages for param in stage.submod.parameters()]


def measure(options: argparse.Namespace) -> list[Result]:
    """Lets the candidates take turns."""
    sizes = {"width": options.width, "length": options.length, "sequences": options.sequences}
    results = {name: Result(name) for name in options.only.split(",")}
    teams: dict[str, Team] = {}
    with Nursery(__file__, ALLOCATOR_FOR_TIME) as nursery:
        try:
            first = {}
            for name in ("plain", *results):
                teams[name] = Team(nursery, {"candidate": name, **sizes}, CANDIDATES[name].num_ranks)
                try:
                    first[name] = _losses(teams[name].ask("run", steps=WARM_UP))
                except TeamError as error:
                    results[name].error = str(error).splitlines()[0][:160]
                    teams.pop(name).close()
            for name, result in results.items():
                if name in teams and first[name]:
                    result.equal = first[name] == first["plain"]
            _take_turns(teams, results, options)
            for name, result in results.items():
                candidate = CANDIDATES[name]
                if name in teams and candidate.schedule is None:
                    result.ideal = 1 / RANKS
                elif name in teams and candidate.schedule != "solve":
                    result.ideal = _ideal(candidate, teams["plain"])
                if name in teams and candidate.schedule and not candidate.torch_name:
                    result.simulated = teams[name].ask("trace")[0]["simulated"]
        finally:
            for team in teams.values():
                team.close()
    return list(results.values())


def _take_turns(teams: Mapping[str, Team], results: Mapping[str, Result], options: argparse.Namespace) -> None:
    for _ in range(options.turns):
        (base,) = teams["plain"].ask("run", steps=options.steps)
        for name, result in results.items():
            if name not in teams:
                continue
            answers = teams[name].ask("run", steps=options.steps)
            result.cpu.append(sum(answer["cpu"] for answer in answers) / base["cpu"])
            result.wall.append(max(answer["wall"] for answer in answers) / base["wall"])


def _losses(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    return next((answer["losses"] for answer in reversed(answers) if None not in answer["losses"]), [])


def _ideal(candidate: Candidate, plain: Team) -> float:
    """The makespan of a schedule over the time of one process."""
    assert candidate.schedule is not None
    schedule = get_schedule(candidate.schedule, RANKS, CHUNKS, candidate.stages)
    (found,) = plain.ask("costs", stages=schedule.num_stages)
    costs = Costs.measured(**found)
    return simulate(schedule, costs).makespan / (CHUNKS * sum(map(costs.stage_time, range(costs.num_stages))))


def table_of(results: Sequence[Result]) -> Table:
    heads = ["", "CPU", "wall", "ideal", "wall / ideal", "simulated", "losses"]
    lines = []
    for result in results:
        title = CANDIDATES[result.name].title
        if result.error is not None:
            lines.append([title, f"does not run: {result.error}", *[""] * (len(heads) - 2)])
            continue
        lines.append(
            [
                title,
                f"{median(result.cpu):.2f}",
                f"{median(result.wall):.3f}",
                "" if result.ideal is None else f"{result.ideal:.3f}",
                "" if result.ideal is None else f"{median(result.wall) / result.ideal:.2f}",
                "" if result.simulated is None else f"{result.simulated:.3f}",
                {True: "to the bit", False: "differ in rounding", None: ""}[result.equal],
            ]
        )
    return Table(f"{BLOCKS} blocks on {RANKS} ranks, {CHUNKS} micro-batches, over one process", heads, lines)


def check(results: Sequence[Result]) -> list[str]:
    """Returns which goals are missed."""
    problems = []
    for result in results:
        if CANDIDATES[result.name].torch_name or result.name == "halves" or result.error is not None:
            continue
        if median(result.cpu) > GOAL_CPU:
            problems.append(f"{result.name}: CPU {median(result.cpu):.3f}, the goal is {GOAL_CPU}")
        if result.ideal is not None and median(result.wall) > GOAL_WALL * result.ideal:
            problems.append(
                f"{result.name}: wall {median(result.wall):.3f}, the goal is {GOAL_WALL * result.ideal:.3f}"
            )
        if result.simulated is not None and abs(result.simulated - 1) > GOAL_SIMULATED:
            problems.append(f"{result.name}: simulated {result.simulated:.3f} of the measured step")
    return problems


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = [name for name in CANDIDATES if name != "plain"]
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="per candidate and turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=2, help="in a micro-batch")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one turn")
    parser.add_argument("--date", help="writes results/DATE-pipeline.json and .md")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.width, options.length, options.turns, options.steps = 16, 8, 1, 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.nursery is not None:
        return raise_ranks(options.nursery, start_rank)
    results = measure(options)
    table = table_of(results)
    print(table.markdown())
    if options.date:
        save("pipeline", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    problems = check(results) if options.check else []
    if problems:
        print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
