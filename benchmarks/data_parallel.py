"""scale-fsdp and scale-oss beside torch's own engines, at world 2: CPU time, wall time, peak, bytes, copies, parity.

    python benchmarks/data_parallel.py                                # both models, all engines, 5 turns
    python benchmarks/data_parallel.py --rows gpt --only ddp,scale    # a quick look while working on an engine
    python benchmarks/data_parallel.py --environments torchrun        # leave ranks of the launcher out
    python benchmarks/data_parallel.py --profile scale --rows gpt     # where one engine's time goes
    python benchmarks/data_parallel.py --smoke                        # seconds: what does not depend on time
    python benchmarks/data_parallel.py --date 2026-11-21              # also writes results/2026-11-21-data_parallel.*

Time is taken with every engine's ranks alive at once, one thread each, doing a few steps by turns; a ratio is the
median over the turns of an engine's time in a turn over that of DDP in the same turn. It is taken in two environments,
each with a DDP of its own: that of torchrun, and that of ranks that `launch_local` has started, where the C library
keeps all memory that is freed. Page faults are those of one rank's step.

Memory is taken in a further pass, in processes whose allocator returns freed tensors to the system at once, from the
second step on, over what the process takes when it has trained a tiny model and thrown it away. Operations are counted
in a step of their own.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES, REFERENCE, ROWS, Row
from measure import MB, OperationCount, peak_bytes, reset_peak, resident_bytes, spending
from profiling import profile_steps
from report import Table, save
from team import ALLOCATOR_FOR_MEMORY, ALLOCATOR_FOR_TIME, Handlers, Nursery, Team, TeamError, raise_ranks

from scale_oss import OSS

WARMUP_STEPS = 3

# What ranks are started with: by torchrun, or by `scale_core.launch.launch_local`.
ENVIRONMENTS = {"torchrun": {}, "launcher": ALLOCATOR_FOR_TIME}

# What ours must not exceed under torchrun: wall ratio, CPU ratio, peak (under that of DDP, since what counts as the
# base would otherwise be part of the goal), MB sent.
GOALS = {
    ("gpt", "scale"): "<= 1.08, 1.02, DDP - 185, 116",
    ("gpt", "scale-keep"): "<= 1.02, 0.98, DDP - 140, 78",
    ("gpt", "oss"): "<= .95, .92, DDP - 105, 116",
    ("gpt", "oss-sharded"): "<= .92, .90, DDP - 140, 78",
    ("mlp", "oss"): "<= 1.05, 1.00, DDP - 362, 309",
    ("mlp", "oss-sharded"): "<= .95, .85, DDP - 422, 207",
    ("mlp", "scale"): "<= 1.30, 1.20, DDP - 482, 309",
    ("mlp", "scale-keep"): "<= 1.05, 1.00, DDP - 292, 207",
}


class Training:
    """A rank's side: one engine on one model, advanced by steps. Batches depend on the rank and the step alone."""

    def __init__(self, row: Row, engine: str) -> None:
        torch.manual_seed(0)
        self.row = row
        self.model, self.optimizer = ENGINES[engine].start(row.build())
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []

    def step(self) -> None:
        inputs, targets = self.row.batch(self.generator)
        loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    # What the caller may ask for.

    def run(self, steps: int) -> dict[str, Any]:
        dist.barrier()
        with spending() as spent:
            for _ in range(steps):
                self.step()
            if isinstance(self.optimizer, OSS):
                self.optimizer.wait()  # What the last step sends belongs to it.
        return {**asdict(spent), "losses": self.losses}

    def count(self) -> dict[str, Any]:
        with OperationCount() as counted:
            self.step()
        return {
            "copies": counted.copies,
            "copied_bytes": counted.copied_bytes,
            "collectives": counted.collectives,
            "operations": counted.operations,
        }

    def profile(self, steps: int) -> dict[str, Any]:
        return {"text": profile_steps(self.step, steps)}


def start_rank(order: dict[str, Any]) -> Handlers:
    row, engine = ROWS[order["row"]], order["engine"]
    if order["purpose"] == "memory":
        return {"peak": lambda steps: _peak(row, engine, steps)}
    training = Training(row, engine)
    return {"run": training.run, "count": training.count, "profile": training.profile}


def _peak(row: Row, engine: str, steps: int) -> dict[str, Any]:
    tiny = Training(ROWS["tiny"], engine)  # Code and modules that are loaded at the first use belong to the base.
    tiny.step()
    tiny.step()
    del tiny
    gc.collect()
    base = resident_bytes()
    training = Training(row, engine)
    training.step()
    gc.collect()
    reset_peak()
    for _ in range(steps):
        training.step()
    return {"peak": peak_bytes() - base, "base": base}


@dataclass
class Timing:
    """One engine on one model in one environment.

    Attributes:
        cpu_seconds: Per turn and step, of all ranks together.
        wall_seconds: Per turn and step, of the slower rank.
        cpu_ratio: Over the reference in the same turn, median.
        wall_ratio: The same of wall time.
        page_faults: Per turn and step, of the rank with more of them.
    """

    cpu_seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    cpu_ratio: float | None = None
    wall_ratio: float | None = None
    page_faults: list[float] = field(default_factory=list)


@dataclass
class Result:
    """One engine on one model; per rank, where it is no ratio.

    Attributes:
        timings: By environment.
        sent_mb: Per step.
        peak_mb: Over the base; the larger rank's.
        collectives: Per step, by the name of the operation.
        copies: Per step.
        copied_mb: Per step.
        parity: Whether all losses of all ranks equal the reference's to the bit; None without a reference.
        error: Why it does not run.
    """

    row: str
    engine: str
    timings: dict[str, Timing] = field(default_factory=dict)
    sent_mb: float | None = None
    peak_mb: float | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    copies: int | None = None
    copied_mb: float | None = None
    parity: bool | None = None
    error: str | None = None


def order_of(row: str, engine: str, purpose: str) -> dict[str, str]:
    return {"row": row, "engine": engine, "purpose": purpose}


def measure_time(
    environment: str, nursery: Nursery, row: str, results: dict[str, Result], turns: int, steps: int
) -> None:
    """All engines by turns; fills what depends on time, bytes, parity, and the counts of one more step."""
    teams: dict[str, Team] = {}
    losses: dict[str, list[list[float]]] = {}
    try:
        for name, result in results.items():
            team = teams[name] = Team(nursery, order_of(row, name, "time"))
            result.timings[environment] = Timing()
            try:
                team.ask("run", steps=WARMUP_STEPS)
            except TeamError as error:
                result.error = str(error).splitlines()[0]
                teams.pop(name).close()
        for turn in range(turns):
            names = list(teams)
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:  # Nobody always runs after the same neighbor.
                answers = teams[name].ask("run", steps=steps)
                result, timing = results[name], results[name].timings[environment]
                timing.cpu_seconds.append(sum(a["cpu_seconds"] for a in answers) / steps)
                timing.wall_seconds.append(max(a["wall_seconds"] for a in answers) / steps)
                timing.page_faults.append(max(a["page_faults"] for a in answers) / steps)
                result.sent_mb = max(a["bytes_sent"] for a in answers) / steps / MB
                losses[name] = [a["losses"] for a in answers]
        for name, team in teams.items():
            counted = team.ask("count")[0]
            result = results[name]
            result.copies, result.copied_mb = counted["copies"], counted["copied_bytes"] / MB
            result.collectives = counted["collectives"]
    finally:
        for team in teams.values():
            team.close()
    if REFERENCE in teams:
        compare(environment, results, losses)


def compare(environment: str, results: dict[str, Result], losses: dict[str, list[list[float]]]) -> None:
    reference = results[REFERENCE].timings[environment]
    for name in losses:
        result, timing = results[name], results[name].timings[environment]
        result.parity = result.parity is not False and losses[name] == losses[REFERENCE]
        timing.cpu_ratio = median(a / b for a, b in zip(timing.cpu_seconds, reference.cpu_seconds, strict=True))
        timing.wall_ratio = median(a / b for a, b in zip(timing.wall_seconds, reference.wall_seconds, strict=True))


def measure_memory(nursery: Nursery, row: str, results: dict[str, Result]) -> None:
    """One engine after the other; fills the peaks."""
    for name, result in results.items():
        if result.error is None:
            with Team(nursery, order_of(row, name, "memory")) as team:
                result.peak_mb = max(answer["peak"] for answer in team.ask("peak", steps=2)) / MB


def table_of(row: str, results: Sequence[Result]) -> Table:
    environments = list(results[0].timings)
    heads = [""]
    for environment in environments:
        heads += [f"{environment}: wall", "CPU", "page faults"]
    heads += ["peak MB", "sent MB", "collectives", "copies", "copied MB", "losses as DDP", "goal"]
    lines = []
    for result in results:
        title = ENGINES[result.engine].title
        if result.error is not None:
            lines.append([title, f"does not run: {result.error}", *[""] * (len(heads) - 2)])
            continue
        line = [title]
        for timing in result.timings.values():
            line += [_number(timing.wall_ratio, ".2f"), _number(timing.cpu_ratio, ".2f")]
            line += [_number(median(timing.page_faults), ",.0f")]
        line += [
            _number(result.peak_mb, ".0f"),
            _number(result.sent_mb, ".1f"),
            str(sum(result.collectives.values())),
            str(result.copies),
            _number(result.copied_mb, ".0f"),
            {True: "to the bit", False: "no", None: ""}[result.parity],
            GOALS.get((row, result.engine), ""),
        ]
        lines.append(line)
    return Table(ROWS[row].title, heads, lines)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def check(row: str, results: Sequence[Result]) -> list[str]:
    """Returns what is wrong with figures that do not depend on time."""
    problems = []
    num_bytes = 4 * sum(param.numel() for param in ROWS[row].build().parameters())
    for result in results:
        if result.error is not None or not result.engine.startswith("scale"):
            continue
        assert result.sent_mb is not None
        passes = 1.0 if "keep" in result.engine else 1.5
        floor = passes * num_bytes / MB
        if not result.sent_mb <= 1.02 * floor + 0.1:
            problems.append(f"{row}, {result.engine}: sent {result.sent_mb:.2f} MB per step, expected {floor:.2f}")
        if result.parity is False:
            problems.append(f"{row}, {result.engine}: losses differ from DDP's")
    return problems


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="gpt,mlp", help=f"of {', '.join(ROWS)}")
    default = [name for name, engine in ENGINES.items() if engine.by_default]
    parser.add_argument("--only", default=",".join(default), help=f"engines, of {', '.join(ENGINES)}")
    parser.add_argument("--environments", default=",".join(ENVIRONMENTS), help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="per engine and turn")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory pass out")
    parser.add_argument("--check", action="store_true", help="fail where bytes or losses are not as they must be")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one turn, no memory pass, checked")
    parser.add_argument("--profile", metavar="ENGINE", choices=ENGINES, help="print where rank 0's time goes instead")
    parser.add_argument("--date", help="writes results/DATE-data_parallel.json and .md")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rows, options.only, options.no_memory = "tiny", "ddp,scale,scale-keep", True
        options.turns, options.steps, options.check = 1, 2, True
    return options


def print_profile(rows: Sequence[str], engine: str, steps: int) -> None:
    with Nursery(__file__, ALLOCATOR_FOR_TIME) as nursery:
        for row in rows:
            with Team(nursery, order_of(row, engine, "time")) as team:
                team.ask("run", steps=WARMUP_STEPS)
                print(team.ask("profile", steps=steps)[0]["text"])


def measure(options: argparse.Namespace) -> dict[str, list[Result]]:
    """Returns the results of all engines by row, and prints each row's table when it is there."""
    found = {}
    names = options.environments.split(",")
    with ExitStack() as stack:
        nurseries = {name: stack.enter_context(Nursery(__file__, ENVIRONMENTS[name])) for name in names}
        exact = stack.enter_context(Nursery(__file__, ALLOCATOR_FOR_MEMORY))
        for row in options.rows.split(","):
            results = {name: Result(row, name) for name in options.only.split(",")}
            for environment, nursery in nurseries.items():
                measure_time(environment, nursery, row, results, options.turns, options.steps)
            if not options.no_memory:
                measure_memory(exact, row, results)
            found[row] = list(results.values())
            print(table_of(row, found[row]).markdown(), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.nursery is not None:
        return raise_ranks(options.nursery, start_rank)
    if options.profile:
        print_profile(options.rows.split(","), options.profile, options.steps)
        return 0
    found = measure(options)
    if options.date:
        tables = [table_of(row, results) for row, results in found.items()]
        figures = [asdict(result) for results in found.values() for result in results]
        save("data_parallel", options.date, __doc__ or "", tables, figures)
    problems = [problem for row, results in found.items() for problem in check(row, results)]
    if options.check and problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
