"""What is found of each way to train, judged: whether it fits, what it costs, and which ones are the best."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scale_tools.plan.model import PlannedModel
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.rates import device_seconds
from scale_tools.plan.simulated_rank import Estimate
from scale_tools.plan.strategies import ranks_per_host
from scale_train.configuration.resolve import parse_bytes

GIB = 2**30


@dataclass(frozen=True)
class PlanRow:
    """One way to train, judged."""

    found: Estimate
    fits: bool
    reason: str  # why it does not fit, or can't be trained so
    seconds: float | None  # of a step; None where the model does not run on simulated streams
    device_seconds: float | None  # for a million tokens
    command: str | None
    python: list[str]


def judge(planned: PlannedModel, found: Estimate, options: PlanOptions) -> PlanRow:
    """Returns the row of an estimate: whether it fits with the margin and the allocator, its time and its cost."""
    memory = parse_bytes("--device-memory", options.device_memory)
    strategy = found.strategy
    if found.problem:
        return PlanRow(found, False, found.problem, None, None, None, [])
    usable = memory * (1 - options.margin)
    per_host = ranks_per_host(options, strategy.ranks)
    host = found.host_bytes * per_host
    reason = ""
    if found.peak_bytes > usable:
        reason = f"{found.peak_bytes / GIB:.1f} GiB of {usable / GIB:.1f}"
    elif (found.reserved_bytes or 0) > memory:
        reason = f"the allocator reserves {(found.reserved_bytes or 0) / GIB:.1f} GiB of {memory / GIB:.1f}"
    elif host > parse_bytes("--host-memory", options.host_memory):
        reason = f"host: {host / GIB:.0f} GiB for {per_host} ranks"
    seconds = found.seconds
    cost = None if seconds is None else device_seconds(strategy.ranks, seconds, options)
    command = strategy.command(options, planned.size)
    return PlanRow(
        found,
        not reason,
        reason,
        seconds,
        cost,
        command,
        strategy.python(options.precision, with_experts=options.experts > 0, policy=planned.policy),
    )


@dataclass(frozen=True)
class Suggested:
    """The best of what fits."""

    cheapest: PlanRow
    fastest: PlanRow
    fewest_devices: PlanRow

    def named(self, *, several: bool) -> list[tuple[str, PlanRow]]:
        """Each row once, with all that it is: "cheapest and fastest"; fewest devices among several numbers of ranks."""
        best = [("cheapest", self.cheapest), ("fastest", self.fastest)]
        best += [("fewest devices", self.fewest_devices)] * several
        names: dict[int, list[str]] = {}
        for name, row in best:
            names.setdefault(id(row), []).append(name)
        rows = {id(row): row for _, row in best}
        return [(_listed(said), rows[key]) for key, said in names.items()]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def suggest(rows: list[PlanRow]) -> Suggested | None:
    """Returns the best of the rows that fit; of equal ones the first. None where nothing fits."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None

    def cost(row: PlanRow) -> tuple[float, float]:
        return (inf, inf) if row.seconds is None else (row.device_seconds or 0.0, row.seconds)

    fastest = min(fitting, key=lambda row: cost(row)[::-1])
    fewest = min(fitting, key=lambda row: (row.found.strategy.ranks, *cost(row)))
    return Suggested(min(fitting, key=cost), fastest, fewest)
