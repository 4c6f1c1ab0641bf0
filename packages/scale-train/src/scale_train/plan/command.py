"""`scale-train plan`: a table of what fits, the cheapest of it as a command and as Python, a picture, or JSON.

Cheapest is what takes the fewest device-seconds for a token. On one number of ranks that is the fastest; of several
numbers the fastest and the one with the fewest devices are told as well, where they differ.

Exit codes: 0 something fits; 1 nothing does; 2 wrong input.
"""

from __future__ import annotations

import json
import math
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
from scale_train.plan.step_time import device_seconds, rates_of, step_seconds
from scale_train.plan.strategies import Strategy, ranks_per_host, strategies, with_offload
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
    seconds: float | None  # of a step
    device_seconds: float | None  # for a million tokens
    command: str | None
    python: list[str]


@dataclass(frozen=True)
class Suggested:
    """The best of what fits."""

    cheapest: PlanRow
    fastest: PlanRow
    fewest_devices: PlanRow

    def named(self, *, several: bool) -> list[tuple[str, PlanRow]]:
        """Each row once, with all that it is: "cheapest and fastest"; fewest devices among several numbers of ranks."""
        best = [("cheapest", self.cheapest), ("fastest", self.fastest)]
        best += [("fewest devices", self.fewest_devices)] * several
        names: dict[int, list[str]] = {}
        for name, row in best:
            names.setdefault(id(row), []).append(name)
        rows = {id(row): row for _, row in best}
        return [(_listed(said), rows[key]) for key, said in names.items()]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def suggest(rows: list[PlanRow]) -> Suggested | None:
    """Returns the best of the rows that fit; of equal ones the first. None where nothing fits."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None

    def cost(row: PlanRow) -> tuple[float, float]:
        return row.device_seconds or 0.0, row.seconds or 0.0

    fastest = min(fitting, key=lambda row: (row.seconds or 0.0, row.device_seconds or 0.0))
    fewest = min(fitting, key=lambda row: (row.found.strategy.ranks, *cost(row)))
    return Suggested(min(fitting, key=cost), fastest, fewest)


def plan(options: PlanOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _plan(options))


def _plan(options: PlanOptions) -> int:
    _check(options)
    planned = planned_model(options)
    num_params = count_parameters(planned)
    candidates = strategies(options, _num_layers(options))
    rows = [_judged(planned, found, options) for found in _estimates(planned, candidates, options, num_params)]
    if "offload" in options.activations:
        # Copies cost time: what fits without is planned without.
        left = [row.found.strategy for row in rows if not row.fits and not row.found.problem]
        more = [each for each in map(with_offload, left) if each is not None]
        rows += [_judged(planned, found, options) for found in _estimates(planned, more, options, num_params)]
    suggested = suggest(rows)
    if options.json:
        print(json.dumps(_as_json(planned, num_params, options, rows, suggested)))
    else:
        _print(planned, num_params, options, rows, suggested)
    if options.picture is not None:
        draw(rows, suggested, parse_bytes("--device-memory", options.device_memory), options.picture)
    return 0 if suggested else NOTHING_FITS


def _check(options: PlanOptions) -> None:
    names = ("layers", "width", "heads", "batch", "sequence", "loss_chunk", "vocabulary", "experts")
    numbers = [*(("ranks", ranks) for ranks in options.ranks), *((name, getattr(options, name)) for name in names)]
    for name, number in numbers:
        if number is not None and (problem := number_problem(name, number)):
            raise InputError(problem)
    for flag, several in (("--ranks", options.ranks), ("--activations", options.activations)):
        if not several:
            raise InputError(f"{flag}: one or more are needed")
        if len(set(several)) < len(several):
            raise InputError(f"{flag} {' '.join(map(str, several))}: name each once")
    if options.activations == ("offload",):
        raise InputError("--activations offload: it is planned beside others; take --activations keep offload")
    if options.jobs is not None and options.jobs < 1:
        raise InputError(f"--jobs {options.jobs}: at least 1 is needed")
    if options.ranks_per_host is not None and options.ranks_per_host < 1:
        raise InputError(f"--ranks-per-host {options.ranks_per_host}: at least 1 is needed")
    for flag, rate in (
        ("--tflops", options.tflops),
        ("--link", options.link),
        ("--host-link", options.host_link),
        ("--memory-bandwidth", options.memory_bandwidth),
        ("--host-bandwidth", options.host_bandwidth),
    ):
        if not 0 < rate < math.inf:
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
    for ranks in options.ranks:
        if over < 1 or ranks % over or over > max(1, experts):
            raise InputError(
                f"--expert-parallel {over}: a divisor of --ranks {ranks} up to --experts {experts} is needed"
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
        return PlanRow(found, False, found.problem, None, None, None, [])
    usable = memory * (1 - options.margin)
    per_host = ranks_per_host(options, strategy.ranks)
    host = found.host_bytes * per_host
    reason = ""
    if found.peak_bytes > usable:
        reason = f"{found.peak_bytes / _GIB:.1f} GiB of {usable / _GIB:.1f}"
    elif host > parse_bytes("--host-memory", options.host_memory):
        reason = f"host: {host / _GIB:.0f} GiB for {per_host} ranks"
    seconds = None if found.work is None else step_seconds(found.work, rates_of(options, strategy.ranks))
    cost = None if seconds is None else device_seconds(strategy.ranks, seconds, options)
    command = strategy.command(options, planned.size)
    return PlanRow(found, not reason, reason, seconds, cost, command, strategy.python(options.precision))


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
            ("GiB", _GIB) if peak >= _GIB else ("MiB", 2**20),
            ("GB", 1e9) if sent >= 1e9 else ("MB", 1e6),
            ("s", 1.0) if longest >= 1 else ("ms", 1e-3),
        )


def _print(
    planned: PlannedModel, num_params: int, options: PlanOptions, rows: list[PlanRow], suggested: Suggested | None
) -> None:
    console = Console(width=max(184, Console().width), highlight=False)
    console.print(
        f"{planned.title}: {_count(num_params)} parameters; {' or '.join(map(str, options.ranks))} ranks of "
        f"{options.device_memory}, {options.batch} sequences of {options.sequence} tokens in a step, "
        f"{options.precision}, AdamW"
    )
    units = _Units.of(rows)
    table = Table(title=f"{units.memory[0]} of one rank at its peak", title_justify="left")
    table.add_column("way to train", no_wrap=True)
    for name in ("ranks", "fits", "peak", "parameters", "gradients", "optimizer", "gathered", "activations", "host"):
        table.add_column(name, justify="right")
    for name in (f"sent {units.sent[0]}", f"step {units.seconds[0]}", "tokens/s", "device s/M tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row, options, units))
    console.print(table)
    for row in rows:
        if row.found.problem:
            console.print(f"{row.found.strategy.title}: {row.found.problem}", markup=False)
    console.print(
        f"Fits: with {options.margin:.0%} of the device left free, and {options.host_memory} of a host. Step: "
        f"--tflops {options.tflops:g}, --link {options.link:g}, --host-link {options.host_link:g}, --memory-bandwidth "
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
        return [*head, "no", *[""] * 11]
    if found.work is None:
        return [*head, "no", f"> {found.at_least_bytes / size:.1f}", *[""] * 10]
    columns = [f"{num_bytes / size:.2f}" for num_bytes in by_column(found.peak_by_kind).values()]
    assert row.seconds is not None and row.device_seconds is not None
    return [
        *head,
        "yes" if row.fits else "host" if row.reason.startswith("host") else "no",
        f"{found.peak_bytes / size:.2f}",
        *columns,
        f"{found.host_bytes / size:.1f}" if found.host_bytes else "",
        f"{sum(found.bytes_sent.values()) / units.sent[1]:.2f}",
        f"{row.seconds / units.seconds[1]:.3f}",
        f"{options.batch * options.sequence / row.seconds:,.0f}",
        f"{row.device_seconds:.3g}",
    ]


def _as_json(
    planned: PlannedModel, num_params: int, options: PlanOptions, rows: list[PlanRow], suggested: Suggested | None
) -> dict[str, Any]:
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
        "peak_is_lower_bound": found.work is None and not found.problem,
        "peak_by_kind": found.peak_by_kind,
        "host_peak_by_kind": found.host_peak_by_kind,
        "bytes_sent": found.bytes_sent,
        "work": None if found.work is None else found.work._asdict(),
        "step_seconds": row.seconds,
        "device_seconds_per_million_tokens": row.device_seconds,
        "command": row.command,
        "python": row.python,
    }


def draw(rows: list[PlanRow], suggested: Suggested | None, memory: int, path: Path) -> None:
    """Draws the peaks by kind as bars, with a line at the device's memory, and the cost beside; the best are named."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in reversed(rows) if row.found.work is not None]
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
        sizes = [by_column(row.found.peak_by_kind)[column] / _GIB for row in shown]
        axes.barh(places, sizes, left=left, label=column)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(places, labels, fontsize=8)
    axes.axvline(memory / _GIB, color="black", linestyle="--", label="memory of a device")
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
