"""`scale-train pipe show` and `ls`. Exit codes: 0 done; 1 a rank has failed; 2 wrong input."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch

from scale_pipe import simulate
from scale_pipe.schedules.registry import NAMES, SOLVE, get_schedule
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import ScheduleSimulation
from scale_pipe.schedules.visualize import save_drawing
from scale_tools.pipe.measurement import measure
from scale_tools.pipe.options import ListOptions, PipeOptions, ShowOptions
from scale_tools.pipe.text_drawing import draw_text, legend
from scale_train.configuration.resolve import MAX_RANKS_PER_CORE
from scale_train.errors import InputError, RanksLost, reason_of, reported

_LEAST_WIDTH, _MOST_RANKS, _MOST_CHUNKS = 40, 1024, 4096


def pipe(options: PipeOptions) -> int:
    """Runs the command and returns its exit code."""
    command = options.command
    return reported(lambda: _list(command) if isinstance(command, ListOptions) else _show(command))


def _list(options: ListOptions) -> int:
    """Prints every schedule that has a name and is possible for these numbers, the shortest step first."""
    _check_sizes(options.ranks, None, options.chunks)
    rows_by_name, refused = {}, {}
    for name in NAMES:
        if name != SOLVE:
            try:
                rows_by_name[name] = simulate(get_schedule(name, options.ranks, options.chunks, None))
            except ValueError as error:
                refused[name] = str(error)
    rows = sorted(rows_by_name.items(), key=lambda row: row[1].bubble)
    if options.json:
        listed = [_values(row) | {"name": name, "stages": row.schedule.num_stages} for name, row in rows]
        print(json.dumps({"schedules": listed, "refused": refused}))
        return 0
    print(f"{options.ranks} ranks, {options.chunks} micro-batches; times as 1 for a forward and 1 for each gradient\n")
    print(f"{'schedule':<22} {'stages':>6} {'bubble':>8} {'live micro-batches':>20}")
    for name, schedule_row in rows:
        stages, peak_live = schedule_row.schedule.num_stages, max(schedule_row.peak_live)
        print(f"{name:<22} {stages:>6} {schedule_row.bubble:>8.1%} {peak_live:>20g}")
    for name, why in refused.items():
        print(f"{name}: {why}")
    return 0


def _show(options: ShowOptions) -> int:
    schedule = _schedule(options)
    shown = {"planned": simulate(schedule)}
    if options.measure:
        requested = SOLVE if options.schedule.lower() == SOLVE else schedule
        try:
            measured = measure(
                requested, options.ranks, schedule.num_stages, schedule.num_micro_batches, options.device
            )
        except RanksLost as error:
            print(f"scale-train: {error}", file=sys.stderr)
            return error.exit_code
        # The plan with the times that the stages took: the rest is waiting that no plan has.
        shown = {
            "planned": simulate(measured.schedule),
            "planned, measured times": simulate(measured.schedule, measured.costs),
        }
        shown["measured"] = measured
    if options.svg is not None:
        try:
            save_drawing(list(shown.values())[-2:], options.svg)
        except OSError as error:
            raise InputError(f"--svg {options.svg}: {reason_of(error)}") from error
    if options.json:
        print(json.dumps(_as_json(options, shown)))
    else:
        _print(options, shown)
    return 0


def _schedule(options: ShowOptions) -> Schedule:
    """The schedule that the options name; an InputError where there is none."""
    _check_sizes(options.ranks, options.stages, options.chunks)
    if options.width is not None and options.width < _LEAST_WIDTH:
        raise InputError(f"--width {options.width}: {_LEAST_WIDTH} or more is needed")
    if options.measure and options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        raise InputError(
            f"--device cuda: {options.ranks} ranks need as many GPUs, and there are "
            f"{torch.cuda.device_count()}; take --device cpu"
        )
    most = (os.cpu_count() or 1) * MAX_RANKS_PER_CORE
    if options.measure and options.device == "cpu" and options.ranks > most:
        raise InputError(
            f"--ranks {options.ranks}: --measure starts as many here, and there are {os.cpu_count() or 1} cores, at "
            f"most {MAX_RANKS_PER_CORE} ranks each; at most {most}"
        )
    if options.schedule.lower() == SOLVE and not options.measure:
        raise InputError("--schedule solve: it is found for measured times; add --measure")
    if options.stages is not None and options.stages % options.ranks:
        raise InputError(
            f"--stages {options.stages} does not divide among {options.ranks} ranks; take {options.ranks} "
            "or a multiple of it"
        )
    try:
        if Path(options.schedule).is_file():
            schedule = Schedule.load(options.schedule)
            return get_schedule(schedule, options.ranks, options.chunks, None)
        per_rank = None if options.stages is None else options.stages // options.ranks
        return get_schedule(options.schedule, options.ranks, options.chunks, per_rank)
    except (ValueError, OSError) as error:
        raise InputError(f"--schedule {options.schedule}: {error}") from error


def _check_sizes(ranks: int, stages: int | None, chunks: int) -> None:
    for flag, number, most in (
        ("--ranks", ranks, _MOST_RANKS),
        ("--stages", ranks if stages is None else stages, _MOST_RANKS * 16),
        ("--chunks", chunks, _MOST_CHUNKS),
    ):
        if not 1 <= number <= most:
            raise InputError(f"{flag} {number}: a number from 1 to {most} is needed")


def _values(simulation: ScheduleSimulation) -> dict[str, object]:
    return {
        "bubble": simulation.bubble,
        "idle": list(simulation.idle),
        "makespan": simulation.makespan,
        "peak_live": list(simulation.peak_live),
    }


def _as_json(options: ShowOptions, shown: dict[str, ScheduleSimulation]) -> dict[str, object]:
    schedule = next(iter(shown.values())).schedule
    return {
        "schedule": schedule.to_json(),
        "measured_on": options.device if options.measure else None,
        **{name.replace(", ", "_with_").replace(" ", "_"): _values(drawn) for name, drawn in shown.items()},
    }


def _print(options: ShowOptions, shown: dict[str, ScheduleSimulation]) -> None:
    schedule, peak = shown["planned"].schedule, max(shown["planned"].peak_live)
    width = options.width or max(_LEAST_WIDTH, min(200, shutil.get_terminal_size().columns))
    print(
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks ({schedule.placement.shape}), "
        f"{schedule.num_micro_batches} micro-batches, at most {peak:g} live on a rank"
    )
    # Times of a plan by itself are counted in forwards, those that were measured in seconds.
    last = max(drawn.makespan for name, drawn in shown.items() if name != "planned" or len(shown) == 1)
    for name, simulated in shown.items():
        unit = f"{simulated.makespan:g} forwards" if name == "planned" else f"{1000 * simulated.makespan:.1f} ms"
        print(f"\n{name}: bubble {simulated.bubble:.1%}, {unit}")
        if name != "planned" or len(shown) == 1:
            print(draw_text(simulated, makespan=last, width=width))
    print(f"\n{legend(list(shown.values()))}; spaces: waiting")
    cores = os.cpu_count() or 1
    if options.measure and options.device == "cpu" and cores < schedule.num_ranks:
        print(f"{schedule.num_ranks} ranks share {cores} cores here: what is measured waits for cores, too")
