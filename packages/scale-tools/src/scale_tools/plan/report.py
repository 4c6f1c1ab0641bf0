"""What `scale-train plan` gives out: the table with the best rows below it, the JSON object, and the picture."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scale_tools.plan.model import PlannedModel
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.rates import attention_tflops
from scale_tools.plan.rows import GIB, PlanRow, Suggested
from scale_tools.plan.simulated_rank import PINNED_ROUNDING
from scale_tools.plan.strategies import ranks_per_host

_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer",
    "gathered": "gathered",
    "reduction": "gathered",
    "activations": "activations",
    "temporaries": "activations",
    "buffers": "parameters",
}


def by_column(by_kind: dict[str, int]) -> dict[str, int]:
    """Returns bytes by column of the table."""
    columns = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered", "activations"), 0)
    for kind, num_bytes in by_kind.items():
        columns[_KINDS[kind]] += num_bytes
    return columns


@dataclass(frozen=True)
class _Units:
    """What the table counts in: small models in small units."""

    memory: tuple[str, float]
    sent: tuple[str, float]
    seconds: tuple[str, float]

    @classmethod
    def of(cls, rows: list[PlanRow]) -> _Units:
        peak = max((max(row.found.peak_bytes, row.found.host_bytes) for row in rows), default=0)
        sent = max((sum(row.found.bytes_sent.values()) for row in rows), default=0)
        longest = max((row.seconds or 0.0 for row in rows), default=0.0)
        return cls(
            ("GiB", GIB) if peak >= GIB else ("MiB", 2**20),
            ("GB", 1e9) if sent >= 1e9 else ("MB", 1e6),
            ("s", 1.0) if longest >= 1 else ("ms", 1e-3),
        )


def print_plan(
    planned: PlannedModel, num_params: int, options: PlanOptions, rows: list[PlanRow], suggested: Suggested | None
) -> None:
    """Prints the table, and below it the best of what fits with its command and its Python."""
    console = Console(width=max(184, Console().width), highlight=False)
    console.print(
        f"{planned.title}: {_count(num_params)} parameters; {' or '.join(map(str, options.ranks))} ranks of "
        f"{options.device_memory}, {options.batch} sequences of {options.sequence} tokens in a step, "
        f"{options.precision}, AdamW"
    )
    units = _Units.of(rows)
    table = Table(title=f"{units.memory[0]} of one rank at its peak", title_justify="left")
    table.add_column("way to train", no_wrap=True)
    for name in ("ranks", "fits", "peak", "reserved", "params", "grads", "optim", "gathered", "activations", "host"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (f"sent {units.sent[0]}", f"step {units.seconds[0]}", "tokens/s", "device s/M tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row, options, units))
    console.print(table)
    titles_by_note: dict[str, list[str]] = {}
    for row in rows:
        for note in _notes_of(row, options):
            titles_by_note.setdefault(note, []).append(row.found.strategy.title)
    for note, titles in titles_by_note.items():
        further = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
        console.print(f"{titles[0]}{further}: {note}", markup=False)
    console.print(
        f"Fits: with {options.margin:.0%} of the device left free, and {options.host_memory} of a host. Reserved: by "
        "torch's allocator, with the freed blocks that it keeps. Step: "
        f"--tflops {options.tflops:g}, --attention-tflops {attention_tflops(options):g}, --link "
        f"{options.link:g}, --host-link {options.host_link:g}, --memory-bandwidth "
        f"{options.memory_bandwidth:g}, --host-bandwidth {options.host_bandwidth:g}; a model for comparing, not a "
        "measurement. Device s/M tokens: ranks x step / tokens, for a million.",
        markup=False,
    )
    if suggested is None:
        smallest = min(
            (row for row in rows if not row.found.problem), key=lambda row: row.found.peak_bytes, default=None
        )
        near = "" if smallest is None else f"; {smallest.found.strategy.title} needs least: {smallest.reason}"
        console.print(f"Nothing fits{near}. Take more --ranks, or a smaller --batch or --sequence.")
        return
    several = len(options.ranks) > 1
    for name, row in suggested.named(several=several):
        on = f", {row.found.strategy.ranks} ranks" if several else ""
        console.print(f"\n{name.capitalize()} of what fits: {row.found.strategy.title}{on}", markup=False)
        if row.command is not None:
            console.print(row.command, markup=False, soft_wrap=True)
        for line in row.python:
            console.print(f"    {line}", markup=False, soft_wrap=True)


def _notes_of(row: PlanRow, options: PlanOptions) -> list[str]:
    """Returns the lines about an estimate below the table."""
    estimate, notes = row.found, []
    if estimate.problem:
        notes.append(estimate.problem)
    if estimate.no_time_reason:
        notes.append(f"no time and no reserved memory, because {estimate.no_time_reason}")
    if row.fits and estimate.num_alloc_retries:
        notes.append(
            f"torch's allocator frees cached memory {estimate.num_alloc_retries} times in a step, because the device "
            "is full. The time of the step does not include this"
        )
    rounding = estimate.host_peak_by_kind.get(PINNED_ROUNDING, 0) * ranks_per_host(options, estimate.strategy.ranks)
    if rounding >= GIB:
        notes.append(
            f"torch rounds pinned memory up to powers of two, {rounding / GIB:.1f} GiB of a host. From torch 2.13 on, "
            "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:N rounds only tensors of at most N MiB"
        )
    return notes


def _count(number: int) -> str:
    """A number of parameters in words: 13 billion."""
    for word, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def _cells(row: PlanRow, options: PlanOptions, units: _Units) -> list[str]:
    found, size = row.found, units.memory[1]
    head = [found.strategy.title, str(found.strategy.ranks)]
    if found.problem:
        return [*head, "no", *[""] * 12]
    if found.is_lower_bound:
        return [*head, "no", f"> {found.at_least_bytes / size:.1f}", *[""] * 11]
    columns = [f"{num_bytes / size:.2f}" for num_bytes in by_column(found.peak_by_kind).values()]
    times = ["", "", ""]
    if row.seconds is not None:
        tokens_per_second = options.batch * options.sequence / row.seconds
        times = [f"{row.seconds / units.seconds[1]:.3f}", f"{tokens_per_second:,.0f}", f"{row.device_seconds:.3g}"]
    return [
        *head,
        "yes" if row.fits else "host" if row.reason.startswith("host") else "no",
        f"{found.peak_bytes / size:.2f}",
        "" if found.reserved_bytes is None else f"{found.reserved_bytes / size:.2f}",
        *columns,
        f"{found.host_bytes / size:.1f}" if found.host_bytes else "",
        f"{sum(found.bytes_sent.values()) / units.sent[1]:.2f}",
        *times,
    ]


def as_json(
    planned: PlannedModel, num_params: int, options: PlanOptions, rows: list[PlanRow], suggested: Suggested | None
) -> dict[str, Any]:
    """Returns what --json prints."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    best = None if suggested is None else {name: _row_as_json(getattr(suggested, name)) for name in vars(suggested)}
    return {
        "model": planned.title,
        "num_parameters": num_params,
        "options": asked,
        "suggested": best,
        "strategies": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: PlanRow) -> dict[str, Any]:
    found = row.found
    return {
        "title": found.strategy.title,
        **asdict(found.strategy),
        "fits": row.fits,
        "reason": row.reason,
        "peak_bytes": found.peak_bytes,
        "peak_is_lower_bound": found.is_lower_bound,
        "peak_reserved_bytes": found.reserved_bytes,
        "num_alloc_retries": found.num_alloc_retries,
        "peak_by_kind": found.peak_by_kind,
        "host_peak_by_kind": found.host_peak_by_kind,
        "bytes_sent": found.bytes_sent,
        "step_seconds": row.seconds,
        "no_time_reason": found.no_time_reason,
        "device_seconds_per_million_tokens": row.device_seconds,
        "command": row.command,
        "python": row.python,
    }


def draw(rows: list[PlanRow], suggested: Suggested | None, memory: int, path: Path) -> None:
    """Draws the peaks by kind as bars, with a line at the device's memory, and the cost beside; the best are named."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in reversed(rows) if row.found.peak_by_kind]
    several = len({row.found.strategy.ranks for row in shown}) > 1
    named = [] if suggested is None else suggested.named(several=several)
    best = {id(row): f" ({name})" for name, row in named}
    labels = [
        row.found.strategy.title + (f", {row.found.strategy.ranks} ranks" if several else "") + best.get(id(row), "")
        for row in shown
    ]
    figure, (axes, costs) = pyplot.subplots(
        1, 2, sharey=True, figsize=(13, 1.6 + 0.3 * len(shown)), gridspec_kw={"width_ratios": [3, 1]}
    )
    places, left = range(len(shown)), [0.0] * len(shown)
    for column in by_column({}):
        sizes = [by_column(row.found.peak_by_kind)[column] / GIB for row in shown]
        axes.barh(places, sizes, left=left, label=column)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(places, labels, fontsize=8)
    axes.axvline(memory / GIB, color="black", linestyle="--", label="memory of a device")
    axes.set_xlabel("GiB of one rank at its peak")
    axes.legend(loc="lower right", fontsize=8)
    costs.barh(
        places, [row.device_seconds or 0.0 for row in shown], color=["C0" if row.fits else "0.8" for row in shown]
    )
    costs.set_xlabel("device-seconds for a million tokens\n(gray: does not fit)")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        print(f"scale-train: --picture {path}: {error}", file=sys.stderr)
    finally:
        pyplot.close(figure)
