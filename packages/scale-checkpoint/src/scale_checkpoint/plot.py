"""Memory over a step as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from scale_checkpoint.timeline import Timeline

if TYPE_CHECKING:
    from scale_checkpoint.tracker import LayerTrace

MIB = 2**20


def plot_timelines(
    timelines: Mapping[str, Timeline], path: str | PathLike[str], budget_bytes: int | None = None
) -> None:
    """Draws memory over the moments of a step, one line for each plan.

    Args:
        timelines: By the name of the plan; all of one profile.
        path: A picture, replaced if it is there; its ending says its kind. In an SVG, each line is a group with the
            plan's name as its id.
        budget_bytes: Drawn as a line, of the id "budget".

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    longest = 0
    for label, step in timelines.items():
        points = [size / MIB for moment in step.moments for size in (moment.start_bytes, moment.peak_bytes)]
        longest = max(longest, len(points))
        places = [index / 2 for index in range(len(points))]
        axes.fill_between(places, points, alpha=0.15)
        axes.plot(places, points, label=f"{label}: {step.peak_bytes / MIB:.0f} MiB", gid=label)
    if budget_bytes is not None:
        axes.axhline(budget_bytes / MIB, color="black", linestyle="--", linewidth=1, label="budget", gid="budget")
    axes.axvline(longest / 4, color="gray", linewidth=0.5)
    axes.set_xticks([longest / 8, 3 * longest / 8], ["forward", "backward"])
    axes.set_ylabel("MiB that live")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    figure.savefig(path)


def plot_layers(traces: Sequence[LayerTrace], path: str | PathLike[str]) -> None:
    """Draws memory over the passes of a tracker, and what each forward leaves behind.

    Args:
        traces: In the order of time.
        path: A picture, replaced if it is there; its ending says its kind.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    figure = new_figure(height=6)
    above, below = figure.subplots(2)
    for is_forward, label in ((True, "forward"), (False, "backward")):
        chosen = [(index, trace) for index, trace in enumerate(traces) if trace.is_forward == is_forward]
        above.plot([i for i, _ in chosen], [t.peak_bytes / MIB for _, t in chosen], ".", label=label, gid=label)
    above.set_xlabel("pass")
    above.set_ylabel("MiB at its peak")
    above.legend()
    forward = [trace for trace in traces if trace.is_forward and trace.module_name]
    bars = below.bar(range(len(forward)), [trace.memory_diff / MIB for trace in forward])
    for bar, trace in zip(bars, forward, strict=True):
        bar.set_gid(trace.module_name)
    if len(forward) <= 40:
        below.set_xticks(range(len(forward)), [trace.module_name for trace in forward], rotation=90, fontsize=7)
    below.set_ylabel("MiB left by its forward")
    figure.savefig(path)


def new_figure(width: float = 8, height: float = 4) -> Any:
    """Returns an empty figure that looks for no display.

    Args:
        width: In inches.
        height: In inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install scale-checkpoint[plot]") from error
    return Figure(figsize=(width, height), layout="constrained")
