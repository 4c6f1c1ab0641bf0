"""What the solver has found, and how good it is."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import Simulation
from scale_pipe.schedules.solver.bounds import Bound


@dataclass(frozen=True)
class Solution:
    """What the solver has found; `print` says how good it is.

    Attributes:
        simulation: The schedule in time, under the costs.
        bound: What no schedule of this placement can beat under the memory cap.
        best_bound: The makespan that no schedule of any tried placement can beat.
        best_classic: The name and makespan of the best classic schedule that keeps the cap; None where none does.
        visits: How many actions were evaluated, in all.
    """

    simulation: Simulation
    bound: Bound
    best_bound: float
    best_classic: tuple[str, float] | None
    visits: int

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def makespan(self) -> float:
        """Its time."""
        return self.simulation.makespan

    @property
    def bubble(self) -> float:
        """The share of it in which the busiest rank is idle."""
        return self.simulation.bubble

    @property
    def gap(self) -> float:
        """By how much a better schedule could be faster at most, as a share of the bound; 0 is proved the best."""
        return max(0.0, self.makespan / self.best_bound - 1) if self.best_bound else 0.0

    def __str__(self) -> str:
        if self.best_classic is None:
            classic = "no classic schedule keeps the memory cap"
        else:
            name, makespan = self.best_classic
            classic = f"{name} takes {makespan:g} ({makespan / self.makespan - 1:+.2%})" if self.makespan else name
        proof = "proved to be the fastest" if self.gap < 1e-9 else f"at most {self.gap:.2%} above the fastest"
        return (
            f"{self.schedule.placement.shape} placement: makespan {self.makespan:g}, bubble {self.bubble:.2%}, "
            f"peak {max(self.simulation.peak_live):g} live micro-batches; {proof}\n"
            f"bound {self.bound.makespan:g}: {self.bound.reason}\n"
            f"best classic: {classic}"
        )


FORMAT = 1
SOLVER = 2
"""Goes up whenever the solver would find another schedule for the same input: what was kept before is then not used."""


def solution_key(
    costs: Costs, num_micro_batches: int, caps: Sequence[float], placements: Sequence[Placement], visits: int
) -> str:
    """Returns the digest of all inputs of a search.

    Args:
        costs: Its times.
        num_micro_batches: M.
        caps: By rank.
        placements: What is tried.
        visits: What may be spent.
    """
    inputs = [SOLVER, asdict(costs), num_micro_batches, list(caps), [one.rank_of for one in placements], visits]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def read_solution(path: str | PathLike[str], key: str) -> tuple[Schedule, int] | None:
    """Returns a kept schedule and what it took to find it, or None where there is none.

    Args:
        path: The file; it need not exist.
        key: Of `solution_key`.

    Raises:
        ValueError: It holds something else.
        OSError: It cannot be read.
    """
    kept = _read(Path(path)).get(key)
    return None if kept is None else (Schedule.from_json(kept["schedule"]), int(kept["visits"]))


def write_solution(path: str | PathLike[str], key: str, schedule: Schedule, visits: int) -> None:
    """Adds a schedule to the kept ones; the file is replaced at once, so a reader never sees half of it.

    Args:
        path: The file, made if it is not there.
        key: Of `solution_key`.
        schedule: What was found.
        visits: What it took.

    Raises:
        ValueError: The file holds something else.
        OSError: It cannot be written.
    """
    path = Path(path)
    solutions = {**_read(path), key: {"schedule": schedule.to_json(), "visits": visits}}
    text = json.dumps({"format": FORMAT, "solutions": solutions}, indent=1) + "\n"
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == FORMAT and isinstance(content["solutions"], dict):
            return dict(content["solutions"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no solutions of the solver ({error}); name another file as cache=") from error
    raise ValueError(
        f"{path} holds solutions of format {content['format']!r}, not {FORMAT}; name another file as cache="
    )
