"""A simulated schedule as a Chrome trace: open the file in Perfetto or in chrome://tracing."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from scale_pipe.schedules.action import COMPUTES
from scale_pipe.schedules.simulation import Simulation

COLOURS = {"F": "thread_state_running", "I": "thread_state_iowait", "W": "thread_state_runnable", "B": "terrible"}
MICROSECONDS = 1e6


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """Returns the events of a simulation: computations and transfers of each rank, and its live micro-batches.

    Args:
        simulation: Its times are taken as seconds.
    """
    events: list[dict[str, Any]] = []
    for rank in range(simulation.schedule.num_ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(("computes", "sends")):
            events.append({"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}})
        for time, live in simulation.live(rank):
            events.append(
                {
                    "ph": "C",
                    "pid": rank,
                    "name": "live micro-batches",
                    "ts": time * MICROSECONDS,
                    "args": {"live": live},
                }
            )
    for rank, action, start, end in simulation.spans:
        event: dict[str, Any] = {
            "ph": "X",
            "pid": rank,
            "tid": 0 if action.kind in COMPUTES else 1,
            "name": str(action),
            "cat": action.kind.name.lower(),
            "ts": start * MICROSECONDS,
            "dur": (end - start) * MICROSECONDS,
            "args": {"stage": action.stage, "micro_batch": action.micro_batch},
        }
        if action.kind.value in COLOURS:
            event["cname"] = COLOURS[action.kind.value]
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome_trace(simulation: Simulation, path: str | PathLike[str]) -> None:
    """Writes a Chrome trace.

    Args:
        simulation: Its times are taken as seconds.
        path: A file, replaced if it is there.

    Raises:
        OSError: It cannot be written.
    """
    Path(path).write_text(json.dumps(chrome_trace(simulation)) + "\n", encoding="utf-8")
