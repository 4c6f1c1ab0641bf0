"""A simulated or measured schedule in letters, for terminals."""

from __future__ import annotations

from scale_pipe.schedules.action import COMPUTES, Kind
from scale_pipe.schedules.simulation import ScheduleSimulation

LETTERS = {  # The first letter of a box, its filling, and its legend.
    Kind.FORWARD: ("F", "=", "forward"),
    Kind.BACKWARD: ("B", "-", "both gradients"),
    Kind.INPUT_GRADIENT: ("I", "~", "gradient of inputs"),
    Kind.WEIGHT_GRADIENT: ("W", "+", "gradient of weights"),
}
MARGIN = len("rank 00 |")


def draw_text(simulation: ScheduleSimulation, *, makespan: float, width: int) -> str:
    """Returns a line for each rank: a box for each computation with its micro-batch, and spaces where the rank waits.

    Args:
        simulation: The pass to draw.
        makespan: The time that the full width stands for; for several drawings the time of the longest.
        width: Columns of the drawing.
    """
    scale = (width - MARGIN) / (makespan or 1.0)
    lines = []
    for rank in range(simulation.schedule.num_ranks):
        row = [" "] * (width - MARGIN)
        for span in simulation.spans:
            if span.rank == rank and span.action.kind in COMPUTES:
                first, last = round(span.start * scale), max(round(span.start * scale) + 1, round(span.end * scale))
                letter, fill, _ = LETTERS[span.action.kind]
                box = f"{letter}{span.action.micro_batch}".ljust(last - first, fill)[: last - first]
                row[first:last] = box[: len(row) - first]
        lines.append(f"rank {rank:<2} |{''.join(row)}".rstrip())
    return "\n".join(lines)


def legend(simulations: list[ScheduleSimulation]) -> str:
    """Returns the meaning of the letters in these drawings."""
    used = {span.action.kind for simulation in simulations for span in simulation.spans}
    return ", ".join(f"{letter} {words}" for kind, (letter, _, words) in LETTERS.items() if kind in used)
