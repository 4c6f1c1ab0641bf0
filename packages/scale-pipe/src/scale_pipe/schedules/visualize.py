"""Pictures of simulated or measured schedules: an SVG, or a Chrome trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from scale_pipe.integers import checked_arguments
from scale_pipe.schedules.action import COMPUTES, Kind
from scale_pipe.schedules.simulation import ScheduleSimulation

COLORS = {  # In drawings, and in traces, for which Chrome has names; with the texts of the legend.
    Kind.FORWARD: ("#4c78a8", "thread_state_running", "forward"),
    Kind.INPUT_GRADIENT: ("#e07b39", "thread_state_iowait", "gradient of inputs"),
    Kind.WEIGHT_GRADIENT: ("#59a14f", "thread_state_runnable", "gradient of weights"),
    Kind.BACKWARD: ("#c44e52", "terrible", "both gradients"),
}
ROW, GAP, LEFT, HEAD = 22, 4, 56, 30
PALEST = 0.45
MICROSECONDS = 1e6


@checked_arguments
def draw(simulations: ScheduleSimulation | Sequence[ScheduleSimulation], *, width: int = 960) -> str:
    """Returns an SVG: a row for each rank, a box for each computation, and time from left to right.

    Several simulations, for example planned and measured, are drawn one below the other on one scale of time. A box
    has the number of its micro-batch; the paler it is, the earlier its stage is among the stages of its rank.

    Args:
        simulations: One or more.
        width: Of the picture, in pixels.

    Raises:
        ValueError: There is no simulation, or the width leaves no room.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.visualize import draw
        >>> from scale_pipe.schedules.classic import gpipe
        >>> from scale_pipe.schedules.zero_bubble import zb_v
        >>> svg = draw([simulate(gpipe(2, 4)), simulate(zb_v(2, 4))])
        >>> svg[:4]
        '<svg'

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    shown = [simulations] if isinstance(simulations, ScheduleSimulation) else list(simulations)
    if not shown:
        raise ValueError("expected at least one simulation to draw, but got none; write draw(simulate(schedule))")
    if width < 2 * LEFT:
        raise ValueError(f"a picture is at least {2 * LEFT} pixels wide, but width is {width}")
    scale = (width - LEFT - GAP) / (max(one.makespan for one in shown) or 1.0)
    parts: list[str] = []
    top = 0
    for one in shown:
        parts += _panel(one, top, scale)
        top += HEAD + one.schedule.num_ranks * (ROW + GAP)
    parts += _legend(shown, top + GAP)
    height = top + HEAD
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


@checked_arguments
def save_drawing(
    simulations: ScheduleSimulation | Sequence[ScheduleSimulation], path: str | PathLike[str], *, width: int = 960
) -> None:
    """Writes the SVG of `draw`; a file that exists is replaced.

    Examples:
        >>> import tempfile
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import gpipe
        >>> from scale_pipe.schedules.visualize import save_drawing
        >>> save_drawing(simulate(gpipe(2, 4)), f"{tempfile.mkdtemp()}/gpipe.svg")

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    Path(path).write_text(draw(simulations, width=width), encoding="utf-8")


def _panel(simulation: ScheduleSimulation, top: int, scale: float) -> list[str]:
    """Returns the rows of one simulation."""
    schedule = simulation.schedule
    title = (
        f"{schedule.name}: bubble {simulation.bubble:.1%}, makespan {simulation.makespan:.4g}, "
        f"peak {max(simulation.peak_live):g} live micro-batches"
    )
    parts = [f'<text x="{GAP}" y="{top + 19}" font-weight="bold" fill="#222222">{escape(title)}</text>']
    for rank in range(schedule.num_ranks):
        y = top + HEAD + rank * (ROW + GAP)
        length = simulation.makespan * scale
        parts.append(f'<text x="{GAP}" y="{y + 15}" fill="#222222">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.2f}" height="{ROW}" fill="#eeeeee"/>')
    for rank, action, start, end in simulation.spans:
        if action.kind not in COMPUTES:
            continue
        stages = schedule.placement.stages_of[rank]
        opacity = PALEST + (1 - PALEST) * (stages.index(action.stage) + 1) / len(stages)
        x, y, long = LEFT + start * scale, top + HEAD + rank * (ROW + GAP), (end - start) * scale
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{long:.2f}" height="{ROW}" fill="{COLORS[action.kind][0]}" '
            f'fill-opacity="{opacity:.2f}" stroke="#ffffff" stroke-width="0.7">'
            f"<title>{action}: {start:.4g} to {end:.4g}</title></rect>"
        )
        number = str(action.micro_batch)
        if long >= 7 * len(number):
            middle = f'x="{x + long / 2:.2f}" y="{y + 15}" text-anchor="middle"'
            parts.append(f'<text {middle} fill="#ffffff">{number}</text>')
    return parts


def _legend(shown: list[ScheduleSimulation], y: int) -> list[str]:
    used = {span.action.kind for one in shown for span in one.spans}
    parts, x = [], LEFT
    for kind, (color, _, name) in COLORS.items():
        if kind in used:
            parts.append(f'<rect x="{x}" y="{y + 4}" width="14" height="14" fill="{color}"/>')
            parts.append(f'<text x="{x + 19}" y="{y + 15}" fill="#222222">{name}</text>')
            x += 160
    return parts


@checked_arguments
def chrome_trace(simulation: ScheduleSimulation) -> dict[str, Any]:
    """Returns the trace events of a simulation: each rank's computations, sends and number of live micro-batches.

    Its times are taken as seconds.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.visualize import chrome_trace
        >>> from scale_pipe.schedules.classic import gpipe
        >>> trace = chrome_trace(simulate(gpipe(2, 4)))
        >>> sorted({event["ph"] for event in trace["traceEvents"]})
        ['C', 'M', 'X']

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    events: list[dict[str, Any]] = []
    for rank in range(simulation.schedule.num_ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(("computes", "sends")):
            events.append({"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}})
        for time, live in simulation.live_over_time(rank):
            counter = {"ph": "C", "pid": rank, "name": "live micro-batches", "ts": time * MICROSECONDS}
            events.append({**counter, "args": {"live": live}})
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
        if action.kind in COLORS:
            event["cname"] = COLORS[action.kind][1]
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@checked_arguments
def save_chrome_trace(simulation: ScheduleSimulation, path: str | PathLike[str]) -> None:
    """Writes the events of `chrome_trace` as JSON; a file that exists is replaced.

    Examples:
        >>> import tempfile
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import gpipe
        >>> from scale_pipe.schedules.visualize import save_chrome_trace
        >>> save_chrome_trace(simulate(gpipe(2, 4)), f"{tempfile.mkdtemp()}/trace.json")  # for ui.perfetto.dev

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    Path(path).write_text(json.dumps(chrome_trace(simulation)) + "\n", encoding="utf-8")
