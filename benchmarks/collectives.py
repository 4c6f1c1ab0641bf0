"""Collectives of scale-core beside gloo's own, in memcpys of the full buffer.

    python benchmarks/collectives.py                      # 16 and 64 MB, 5 turns
    python benchmarks/collectives.py --smoke              # 1 MB, bytes only
    python benchmarks/collectives.py --date 2026-11-21    # also writes results/2026-11-21-collectives.*

A cost is the CPU time of all ranks over the CPU time of one memcpy of the full buffer, taken by one rank in the same
turn; the median over the turns. The two ranks of one team run everything, one thread each, an operation after the
other, into buffers that were touched before. What is sent is counted by the kernel, per rank and call, over the size
of the full buffer. fp32; our reduce-scatter divides by the number of ranks, gloo's only sums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import memcpy_seconds, spending
from report import Table, save
from team import ALLOCATOR_FOR_TIME, Handlers, Nursery, Team, raise_ranks

from scale_core.comm import collectives
from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.group import group_of

WORLD_SIZE = 2

# Bytes that a rank must send at least, over those of the full buffer.
LEAST = {
    "all_gather": (WORLD_SIZE - 1) / WORLD_SIZE,
    "reduce_scatter": (WORLD_SIZE - 1) / WORLD_SIZE,
    "all_reduce": 2 * (WORLD_SIZE - 1) / WORLD_SIZE,
    "all_to_all": (WORLD_SIZE - 1) / WORLD_SIZE,
}
OWNERS = ("scale", "gloo")


class Buffers:
    """A rank's side: the buffers of one size, and each operation on them.

    Args:
        num_bytes: Of the full buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self.group = group_of()
        numel = num_bytes // 4 // self.group.size * self.group.size
        self.full, self.other = torch.ones(numel), torch.zeros(numel)
        self.shard = torch.ones(numel // self.group.size)
        self.num_bytes = numel * 4
        self.operations: dict[tuple[str, str], Callable[[], object]] = {
            ("scale", "all_gather"): lambda: collectives.all_gather(self.full, self.shard, self.group).wait(),
            ("scale", "reduce_scatter"): lambda: collectives.reduce_scatter(self.full, self.group).wait(),
            ("scale", "all_reduce"): lambda: collectives.all_reduce(self.full, self.group).wait(),
            ("scale", "all_to_all"): lambda: all_to_all(self.other, self.full, self.group).wait(),
            ("gloo", "all_gather"): lambda: dist.all_gather_into_tensor(self.full, self.shard),
            ("gloo", "reduce_scatter"): lambda: dist.reduce_scatter_tensor(self.shard, self.full),
            ("gloo", "all_reduce"): lambda: dist.all_reduce(self.full),
            ("gloo", "all_to_all"): lambda: dist.all_to_all_single(self.other, self.full),
        }

    def run(self, owner: str, operation: str, repeats: int) -> dict[str, Any]:
        call = self.operations[owner, operation]
        self.full.fill_(0.0)  # Sums of zeros stay finite, however often they are summed.
        self.shard.fill_(0.0)
        call()
        dist.barrier()
        with spending() as spent:
            for _ in range(repeats):
                call()
        return asdict(spent)

    def memcpy(self) -> dict[str, Any]:
        dist.barrier()
        seconds = memcpy_seconds(self.num_bytes) if self.group.rank == 0 else 0.0
        dist.barrier()
        return {"seconds": seconds}


def start_rank(order: dict[str, Any]) -> Handlers:
    buffers = Buffers(order["num_bytes"])
    return {"run": buffers.run, "memcpy": buffers.memcpy}


@dataclass
class Result:
    """One operation at one size.

    Attributes:
        costs: Per turn, CPU time of all ranks in memcpys of the full buffer.
        wall_costs: Per turn, wall time in the same unit.
        sent: Bytes per rank and call, over those of the full buffer.
    """

    owner: str
    operation: str
    megabytes: int
    costs: list[float] = field(default_factory=list)
    wall_costs: list[float] = field(default_factory=list)
    sent: float = 0.0


def measure(nursery: Nursery, megabytes: int, turns: int, repeats: int) -> list[Result]:
    """All operations by turns."""
    results = [Result(owner, operation, megabytes) for operation in LEAST for owner in OWNERS]
    num_bytes = megabytes * 2**20
    with Team(nursery, {"num_bytes": num_bytes}, WORLD_SIZE) as team:
        for turn in range(turns):
            memcpy = team.ask("memcpy")[0]["seconds"]
            shift = turn % len(results)
            for result in results[shift:] + results[:shift]:
                answers = team.ask("run", owner=result.owner, operation=result.operation, repeats=repeats)
                result.costs.append(sum(a["cpu_seconds"] for a in answers) / repeats / memcpy)
                result.wall_costs.append(max(a["wall_seconds"] for a in answers) / repeats / memcpy)
                result.sent = max(a["bytes_sent"] for a in answers) / repeats / num_bytes
    return results


def table_of(results: Sequence[Result]) -> Table:
    sizes = sorted({result.megabytes for result in results})
    heads = ["", *(f"{size} MB, {owner}" for size in sizes for owner in OWNERS), "sent, scale", "sent, gloo", "least"]
    found = {(r.operation, r.megabytes, r.owner): r for r in results}
    rows = []
    for operation, least in LEAST.items():
        costs = [f"{median(found[operation, size, owner].costs):.1f}" for size in sizes for owner in OWNERS]
        sent = [f"{found[operation, sizes[-1], owner].sent:.3f}" for owner in OWNERS]
        rows.append([operation, *costs, *sent, f"{least:.3f}"])
    return Table(f"Cost in memcpys of the full buffer, world {WORLD_SIZE}", heads, rows)


def check(results: Sequence[Result]) -> list[str]:
    """Returns which of ours send more than the algorithm needs."""
    return [
        f"{r.operation}, {r.megabytes} MB: sent {r.sent:.4f} of the full buffer, expected {LEAST[r.operation]:.4f}"
        for r in results
        if r.owner == "scale" and r.sent > 1.01 * LEAST[r.operation]
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", default="16,64", help="of the full buffer, in MB (2**20 bytes)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="calls per operation and turn")
    parser.add_argument("--check", action="store_true", help="fail where ours send more than they must")
    parser.add_argument("--smoke", action="store_true", help="1 MB, one turn, checked")
    parser.add_argument("--date", help="writes results/DATE-collectives.json and .md")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.sizes, options.turns, options.repeats, options.check = "1", 1, 2, True
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.nursery is not None:
        return raise_ranks(options.nursery, start_rank)
    results = []
    with Nursery(__file__, ALLOCATOR_FOR_TIME) as nursery:
        for size in options.sizes.split(","):
            results += measure(nursery, int(size), options.turns, options.repeats)
    table = table_of(results)
    print(table.markdown())
    if options.date:
        save("collectives", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    problems = check(results) if options.check else []
    if problems:
        print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
