"""A plan as text: what is done with each block, and how memory stands over the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from scale_checkpoint.planner.timeline import Moment, Segment, Timeline

BAR_WIDTH = 50
MAX_BARS = 48


def format_bytes(num_bytes: float) -> str:
    """Returns a size as people read it.

    >>> [format_bytes(size) for size in (0, 1023, 1536, 5 * 2**30)]
    ['0 B', '1023 B', '1.50 KiB', '5.00 GiB']
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"


def format_seconds(seconds: float) -> str:
    """Returns a time as people read it.

    >>> [format_seconds(seconds) for seconds in (0.0001234, 0.012, 3.5)]
    ['123 us', '12.0 ms', '3.50 s']
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, its first two columns to the left and the others to the right.

    Args:
        heads: One per column.
        rows: Cells.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for row in [heads, ["-" * width for width in widths], *rows]:
        cells = (cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def way_table(segments: Sequence[Segment], ways: Mapping[str, str], reference: str) -> str:
    """Returns what a plan does with each block: what it keeps, of how much, and the time that it adds.

    Args:
        segments: Of the profile.
        ways: By block.
        reference: The way beside which time is compared.
    """
    rows = []
    for segment in segments:
        if segment.is_block:
            way = segment.ways[ways[segment.name]]
            plain = segment.ways.get(reference, way)
            added = way.seconds - plain.seconds
            bytes_told = (format_bytes(way.kept_bytes), format_bytes(plain.kept_bytes))
            rows.append((segment.name, ways[segment.name], *bytes_told, format_seconds(added) if added > 0 else "0"))
    return table(("block", "way", "keeps", "of", "adds"), rows)


def bar_chart(step: Timeline, budget_bytes: int | None) -> str:
    """Returns a bar for the peak of each moment of a step, forward and then backward.

    Args:
        step: The step.
        budget_bytes: The length of the longest bar that may be; None takes the peak.
    """
    full = max(budget_bytes or 0, step.peak_bytes, 1)
    moments = list(_merged(step.moments))
    width = max(len(name) for name, _, _ in moments)
    lines = []
    for name, backward, peak in moments:
        bar = "█" * round(BAR_WIDTH * peak / full)
        mark = " < peak" if peak == step.peak_bytes else ""
        lines.append(
            f"{'backward' if backward else 'forward ':8} {name:{width}} {bar:{BAR_WIDTH}} {format_bytes(peak)}{mark}"
        )
    return "\n".join(lines)


def _merged(moments: Sequence[Moment]) -> Iterator[tuple[str, bool, int]]:
    """At most `MAX_BARS` rows of neighbours, each with the highest of their peaks; of blocks where they are few."""
    shown = [moment for moment in moments if not moment.name.startswith("after ") or moment.name == "after the blocks"]
    rows = {id(moment): moment.peak_bytes for moment in shown}
    last = shown[0]
    for moment in moments:
        last = moment if id(moment) in rows else last
        rows[id(last)] = max(rows[id(last)], moment.peak_bytes)
    size = -(-len(shown) // MAX_BARS)
    for backward in (False, True):
        half = [moment for moment in shown if moment.backward == backward]
        for start in range(0, len(half), size):
            group = half[start : start + size]
            name = group[0].name if len(group) == 1 else f"{group[0].name} .. {group[-1].name}"
            yield name, backward, max(rows[id(moment)] for moment in group)


MIB = 2**20


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
