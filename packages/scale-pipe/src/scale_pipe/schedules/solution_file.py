"""Solutions that are kept: one JSON file, by a digest of everything that they follow from."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from scale_pipe.schedules.costs import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule

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
