"""Plans as text and pictures: tables of blocks, and memory over the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from scale_checkpoint.planner.timeline import Segment, SegmentPass, Timeline

BAR_WIDTH = 50
MAX_BARS = 48


def format_bytes(num_bytes: float) -> str:
    """Returns a size as people read it.

    >>> [format_bytes(size) for size in (0, 1023, -1536, 5 * 2**30)]
    ['0 B', '1023 B', '-1.50 KiB', '5.00 GiB']
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
    """Returns a table, its first two columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for row in [heads, ["-" * width for width in widths], *rows]:
        cells = (cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def strategy_table(segments: Sequence[Segment], strategies: Mapping[str, str], reference: str) -> str:
    """Returns the strategy of each block: the memory it keeps, that under `reference`, and the time it adds."""
    rows = []
    for segment in segments:
        if segment.is_block:
            name = strategies[segment.name]
            cost = segment.costs[name]
            plain = segment.costs.get(reference, cost)
            added = cost.seconds - plain.seconds
            kept_column = (format_bytes(cost.kept_bytes), format_bytes(plain.kept_bytes))
            rows.append((segment.name, name, *kept_column, format_seconds(added) if added > 0 else "0"))
    return table(("block", "strategy", "keeps", "of", "adds"), rows)


def bar_chart(step: Timeline, budget_bytes: int | None) -> str:
    """Returns a bar for the peak of each pass of a step, forward and then backward."""
    full = max(budget_bytes or 0, step.peak_bytes, 1)
    rows = list(_merged(step.passes))
    width = max(len(name) for name, _, _ in rows)
    lines = []
    for name, backward, peak in rows:
        bar = "█" * round(BAR_WIDTH * peak / full)
        mark = " < peak" if peak == step.peak_bytes else ""
        lines.append(
            f"{'backward' if backward else 'forward ':8} {name:{width}} {bar:{BAR_WIDTH}} {format_bytes(peak)}{mark}"
        )
    return "\n".join(lines)


def _merged(passes: Sequence[SegmentPass]) -> Iterator[tuple[str, bool, int]]:
    """At most `MAX_BARS` rows of neighbors, each with the highest of their peaks; of blocks where they are few."""
    shown = [trace for trace in passes if not trace.name.startswith("after ") or trace.name == "after the blocks"]
    peaks = {id(trace): trace.peak_bytes for trace in shown}
    last = shown[0]
    for candidate in passes:
        last = candidate if id(candidate) in peaks else last
        peaks[id(last)] = max(peaks[id(last)], candidate.peak_bytes)
    size = -(-len(shown) // MAX_BARS)
    for backward in (False, True):
        half = [trace for trace in shown if trace.backward == backward]
        for start in range(0, len(half), size):
            group = half[start : start + size]
            name = group[0].name if len(group) == 1 else f"{group[0].name} .. {group[-1].name}"
            yield name, backward, max(peaks[id(trace)] for trace in group)


MIB = 2**20


def new_figure(width: float = 8, height: float = 4) -> Any:
    """Returns an empty figure that looks for no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install scale-checkpoint[plot]") from error
    return Figure(figsize=(width, height), layout="constrained")


def plot_timelines(
    timelines: Mapping[str, Timeline], path: str | PathLike[str], budget_bytes: int | None = None
) -> None:
    """Draws memory over the passes of a step, one line for each plan."""
    figure = new_figure()
    axes = figure.add_subplot()
    longest = 0
    for label, step in timelines.items():
        points = [size / MIB for trace in step.passes for size in (trace.start_bytes, trace.peak_bytes)]
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
