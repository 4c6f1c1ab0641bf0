"""`scale-train plan`: a table of what fits, the fastest of it as a command and as Python, a picture, or JSON.

Exit codes: 0 something fits; 1 nothing does; 2 wrong input.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scale_train.configuration.checks import number_problem
from scale_train.errors import InputError, reported
from scale_train.plan.estimate import Estimate, count_parameters, estimate, least_bytes
from scale_train.plan.model import PlannedModel, planned_model
from scale_train.plan.options import PlanOptions
from scale_train.plan.step_time import rates_of, step_seconds
from scale_train.plan.strategies import Strategy, ranks_per_host, strategies
from scale_train.resolve import model_config, parse_bytes

NOTHING_FITS = 1
_GIB = 2**30
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


@dataclass(frozen=True)
class PlanRow:
    """One way to train, judged."""

    found: Estimate
    fits: bool
    reason: str  # why it does not fit, or can't be trained so
    seconds: float | None
    command: str | None
    python: list[str]


def plan(options: PlanOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _plan(options))


def _plan(options: PlanOptions) -> int:
    _check(options)
    planned = planned_model(options)
    num_params = count_parameters(planned)
    candidates = strategies(options, _num_layers(options))
    rows = [_judged(planned, found, options) for found in _estimates(planned, candidates, options, num_params)]
    fitting = sorted((row for row in rows if row.fits), key=lambda row: row.seconds or 0.0)
    if options.json:
        print(json.dumps(_as_json(planned, num_params, options, rows, fitting)))
    else:
        _print(planned, num_params, options, rows, fitting)
    if options.picture is not None:
        draw([row.found for row in rows], parse_bytes("--device-memory", options.device_memory), options.picture)
    return 0 if fitting else NOTHING_FITS


def _check(options: PlanOptions) -> None:
    for name in ("layers", "width", "heads", "ranks", "batch", "sequence", "loss_chunk", "vocabulary", "experts"):
        number = getattr(options, name)
        if number is not None and (problem := number_problem(name, number)):
            raise InputError(problem)
    if options.ranks_per_host is not None and options.ranks_per_host < 1:
        raise InputError(f"--ranks-per-host {options.ranks_per_host}: at least 1 is needed")
    for flag, rate in (
        ("--tflops", options.tflops),
        ("--link", options.link),
        ("--host-link", options.host_link),
        ("--memory-bandwidth", options.memory_bandwidth),
        ("--host-bandwidth", options.host_bandwidth),
    ):
        if not rate > 0:
            raise InputError(f"{flag} {rate:g}: a number above 0 is needed")
    _check_experts(options)
    if not 0 <= options.margin < 1:
        raise InputError(f"--margin {options.margin:g}: a part from 0 to below 1 is needed")
    parse_bytes("--device-memory", options.device_memory)
    parse_bytes("--host-memory", options.host_memory)


def _check_experts(options: PlanOptions) -> None:
    experts, over = options.experts, options.expert_parallel
    if not experts and (over != 1 or options.top_k != PlanOptions.top_k):
        raise InputError("--expert-parallel and --top-k are for mixtures: say of how many, as --experts 8")
    if experts and not 1 <= options.top_k <= experts:
        raise InputError(f"--top-k {options.top_k}: from 1 to the {experts} of --experts is needed")
    if over < 1 or options.ranks % over or over > max(1, experts):
        raise InputError(
            f"--expert-parallel {over}: a divisor of --ranks {options.ranks} up to --experts {experts} is needed"
        )


def _num_layers(options: PlanOptions) -> int | None:
    if options.config is not None or options.factory is not None:
        return None
    from scale_train.options import ModelOptions, Options

    asked = ModelOptions(options.size, options.layers, options.width, options.heads)
    return model_config(Options(model=asked)).layers


def _estimates(
    planned: PlannedModel, candidates: list[Strategy], options: PlanOptions, num_params: int
) -> list[Estimate]:
    """One for each candidate, several at a time in processes of their own."""
    memory = parse_bytes("--device-memory", options.device_memory)
    known = {each: least for each in candidates if (least := least_bytes(each, num_params)) > memory}
    left = [each for each in candidates if each not in known]
    found = {each: Estimate(each, at_least_bytes=least) for each, least in known.items()}
    jobs = min(options.jobs or min(os.cpu_count() or 1, 8), len(left))
    with _progress(options, len(left)) as advance:
        if jobs <= 1:
            for each in left:
                found[each] = estimate(planned, each, options)
                advance()
        else:
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
                for made in as_completed([pool.submit(estimate_named, each, options) for each in left]):
                    found[made.result().strategy] = made.result()
                    advance()
    return [found[each] for each in candidates]


def estimate_named(strategy: Strategy, options: PlanOptions) -> Estimate:
    """Makes the model that the options name, and estimates; in a process of its own."""
    torch.set_num_threads(1)
    return estimate(planned_model(options), strategy, options)


def _judged(planned: PlannedModel, found: Estimate, options: PlanOptions) -> PlanRow:
    memory = parse_bytes("--device-memory", options.device_memory)
    strategy = found.strategy
    if found.problem:
        return PlanRow(found, False, found.problem, None, None, [])
    usable = memory * (1 - options.margin)
    per_host = ranks_per_host(options)
    host = found.host_bytes * per_host
    reason = ""
    if found.peak_bytes > usable:
        reason = f"{found.peak_bytes / _GIB:.1f} GiB of {usable / _GIB:.1f}"
    elif host > parse_bytes("--host-memory", options.host_memory):
        reason = f"host: {host / _GIB:.0f} GiB for {per_host} ranks"
    seconds = None if found.work is None else step_seconds(found.work, rates_of(options))
    command = strategy.command(options, planned.size)
    return PlanRow(found, not reason, reason, seconds, command, strategy.python(options.precision))


@contextmanager
def _progress(options: PlanOptions, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's standard error; gives what moves it on."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal or options.json) as bar:
        task = bar.add_task("ways to train", total=total)
        yield lambda: bar.advance(task)


def by_column(by_kind: dict[str, int]) -> dict[str, int]:
    """Returns bytes by column of the table."""
    columns = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered", "activations"), 0)
    for kind, num_bytes in by_kind.items():
        columns[_KINDS[kind]] += num_bytes
    return columns


def _print(
    planned: PlannedModel, num_params: int, options: PlanOptions, rows: list[PlanRow], fitting: list[PlanRow]
) -> None:
    console = Console(width=max(168, Console().width), highlight=False)
    console.print(
        f"{planned.title}: {num_params / 1e9:.3g} billion parameters; {options.ranks} ranks of "
        f"{options.device_memory}, {options.batch} sequences of {options.sequence} tokens in a step, "
        f"{options.precision}, AdamW"
    )
    table = Table(title="GiB of one rank at its peak", title_justify="left")
    table.add_column("way to train", no_wrap=True)
    for name in ("fits", "peak", "parameters", "gradients", "optimizer", "gathered", "activations", "host"):
        table.add_column(name, justify="right")
    for name in ("sent GB", "step s", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row, options))
    console.print(table)
    for row in rows:
        if row.found.problem:
            console.print(f"{row.found.strategy.title}: {row.found.problem}", markup=False)
    console.print(
        f"Fits: with {options.margin:.0%} of the device left free. Step: --tflops {options.tflops:g}, --link "
        f"{options.link:g}, --host-link {options.host_link:g}, --memory-bandwidth {options.memory_bandwidth:g}, "
        f"--host-bandwidth {options.host_bandwidth:g}; a model for comparing, not a measurement.",
        markup=False,
    )
    if not fitting:
        smallest = min(
            (row for row in rows if not row.found.problem), key=lambda row: row.found.peak_bytes, default=None
        )
        near = "" if smallest is None else f"; {smallest.found.strategy.title} needs least: {smallest.reason}"
        console.print(f"Nothing fits{near}. Take more --ranks, or a smaller --batch or --sequence.")
        return
    best = fitting[0]
    console.print(f"\nThe fastest that fits: {best.found.strategy.title}")
    if best.command is not None:
        console.print(best.command, markup=False, soft_wrap=True)
    for line in best.python:
        console.print(f"    {line}", markup=False, soft_wrap=True)


def _cells(row: PlanRow, options: PlanOptions) -> list[str]:
    found = row.found
    if found.problem:
        return [found.strategy.title, "no", *[""] * 10]
    if found.work is None:
        return [found.strategy.title, "no", f"> {found.at_least_bytes / _GIB:.1f}", *[""] * 9]
    columns = [f"{num_bytes / _GIB:.2f}" for num_bytes in by_column(found.peak_by_kind).values()]
    host = f"{found.host_bytes / _GIB:.1f}" if found.host_bytes else ""
    sent = f"{sum(found.bytes_sent.values()) / 1e9:.2f}"
    assert row.seconds is not None
    speed = options.batch * options.sequence / row.seconds
    fits = "yes" if row.fits else "no"
    return [
        found.strategy.title,
        fits,
        f"{found.peak_bytes / _GIB:.2f}",
        *columns,
        host,
        sent,
        f"{row.seconds:.3f}",
        f"{speed:,.0f}",
    ]


def _as_json(
    planned: PlannedModel, num_params: int, options: PlanOptions, rows: list[PlanRow], fitting: list[PlanRow]
) -> dict[str, Any]:
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    return {
        "model": planned.title,
        "num_parameters": num_params,
        "options": asked,
        "suggested": fitting[0].found.strategy.title if fitting else None,
        "strategies": [
            {
                "title": row.found.strategy.title,
                **asdict(row.found.strategy),
                "fits": row.fits,
                "reason": row.reason,
                "peak_bytes": row.found.peak_bytes,
                "peak_is_lower_bound": row.found.work is None and not row.found.problem,
                "peak_by_kind": row.found.peak_by_kind,
                "host_peak_by_kind": row.found.host_peak_by_kind,
                "bytes_sent": row.found.bytes_sent,
                "work": None if row.found.work is None else row.found.work._asdict(),
                "step_seconds": row.seconds,
                "command": row.command,
                "python": row.python,
            }
            for row in rows
        ],
    }


def draw(found: list[Estimate], memory: int, path: Path) -> None:
    """Draws the peaks by kind as bars, with a line at the device's memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [each for each in reversed(found) if each.work is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(shown)))
    left = [0.0] * len(shown)
    for column in by_column({}):
        sizes = [by_column(each.peak_by_kind)[column] / _GIB for each in shown]
        axes.barh([each.strategy.title for each in shown], sizes, left=left, label=column)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(memory / _GIB, color="black", linestyle="--", label="memory of a device")
    axes.set_xlabel("GiB of one rank at its peak")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        print(f"scale-train: --picture {path}: {error}", file=sys.stderr)
    finally:
        pyplot.close(figure)
