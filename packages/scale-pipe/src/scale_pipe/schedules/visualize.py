"""Schedules as pictures: an SVG with a row for each rank, a box for each action, and time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from xml.sax.saxutils import escape

from scale_pipe.schedules.action import COMPUTES, Kind
from scale_pipe.schedules.simulation import Simulation

COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.INPUT_GRADIENT: "#e07b39",
    Kind.WEIGHT_GRADIENT: "#59a14f",
    Kind.BACKWARD: "#c44e52",
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.INPUT_GRADIENT: "gradient of inputs",
    Kind.WEIGHT_GRADIENT: "gradient of weights",
    Kind.BACKWARD: "both gradients",
}
ROW, GAP, LEFT, HEAD = 22, 4, 56, 30
PALEST = 0.45


def draw(simulations: Simulation | Sequence[Simulation], *, width: int = 960) -> str:
    """Returns an SVG; several simulations stand one below the other on one scale of time, such as planned and measured.

    A box carries the number of its micro-batch; the paler it is, the earlier its stage stands among those of its rank.

    Args:
        simulations: One or more.
        width: Of the picture, in pixels.

    Raises:
        ValueError: There is none, or the width leaves no room.
    """
    shown = [simulations] if isinstance(simulations, Simulation) else list(simulations)
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


def save_drawing(
    simulations: Simulation | Sequence[Simulation], path: str | PathLike[str], *, width: int = 960
) -> None:
    """Writes an SVG; see `draw`.

    Args:
        simulations: One or more.
        path: A file, replaced if it is there.
        width: Of the picture, in pixels.

    Raises:
        ValueError: See `draw`.
        OSError: It cannot be written.
    """
    Path(path).write_text(draw(simulations, width=width), encoding="utf-8")


def _panel(simulation: Simulation, top: int, scale: float) -> list[str]:
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
            f'<rect x="{x:.2f}" y="{y}" width="{long:.2f}" height="{ROW}" fill="{COLOURS[action.kind]}" '
            f'fill-opacity="{opacity:.2f}" stroke="#ffffff" stroke-width="0.7">'
            f"<title>{action}: {start:.4g} to {end:.4g}</title></rect>"
        )
        number = str(action.micro_batch)
        if long >= 7 * len(number):
            middle = f'x="{x + long / 2:.2f}" y="{y + 15}" text-anchor="middle"'
            parts.append(f'<text {middle} fill="#ffffff">{number}</text>')
    return parts


def _legend(shown: list[Simulation], y: int) -> list[str]:
    used = {span.action.kind for one in shown for span in one.spans}
    parts, x = [], LEFT
    for kind, colour in COLOURS.items():
        if kind in used:
            parts.append(f'<rect x="{x}" y="{y + 4}" width="14" height="14" fill="{colour}"/>')
            parts.append(f'<text x="{x + 19}" y="{y + 15}" fill="#222222">{NAMES[kind]}</text>')
            x += 160
    return parts
