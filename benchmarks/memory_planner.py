"""Plans of scale-checkpoint beside "none", "all" and "every k-th block": predicted and measured memory and time.

    python benchmarks/memory_planner.py                              # three models, 5 turns
    python benchmarks/memory_planner.py --rows unet --turns 3        # a quick look
    python benchmarks/memory_planner.py --smoke                      # seconds: what does not depend on time
    python benchmarks/memory_planner.py --date 2026-11-21            # also writes results/2026-11-21-memory_planner.*
    python benchmarks/memory_planner.py --picture planner.svg        # also draws the fronts
    python benchmarks/memory_planner.py --turns 0 --rows transformer --timeline step.svg    # memory over a step

Each model is profiled once. For every plan that people make by hand there is one of the planner for the same memory,
then some for memory in between. Memory is counted, not sampled: the bytes of all storages that live, parameters and
gradients included. Beside it stands what torch's profiler has seen the allocator give out in the same step, which has
the room that kernels take inside of a call as well. A time is CPU time of forward and backward, one thread, the least
of all turns; all plans of a model run by turns, and a ratio is the median over the turns of a plan's time in a turn
over that of "none" in the same turn.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

# Freed memory stays with the process: no page is faulted in twice. Read once by the C library, at the start.
_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647", "OMP_NUM_THREADS": "1"}
if __name__ == "__main__" and any(os.environ.get(key) != value for key, value in _ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ALLOCATOR})

import torch  # noqa: E402
from planner_models import PLANNED  # noqa: E402
from report import RESULTS, Table, save  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from scale_checkpoint import apply_checkpointing, apply_plan  # noqa: E402
from scale_checkpoint.live_memory import storage_bytes  # noqa: E402
from scale_checkpoint.planner.chart import new_figure, plot_timelines  # noqa: E402
from scale_checkpoint.planner.plan import MemoryPlan, best_plan, memory_front  # noqa: E402
from scale_checkpoint.planner.profile import MemoryProfile, profile_memory  # noqa: E402
from scale_checkpoint.planner.solver import minimum_peak  # noqa: E402
from scale_checkpoint.planner.step import Step, measure_step  # noqa: E402

MIB = 2**20
WAYS = ("keep", "recompute", "selective")
REFERENCE = "none"
NUM_BETWEEN = 4
PEAK_GOAL, TIME_GOAL = 0.05, 0.10


@dataclass
class Result:
    """One plan of one model.

    Attributes:
        row: The model.
        plan: Its name.
        rival: The plan by hand whose memory the planner was given; empty otherwise.
        strategies: What is done with each block.
        predicted_bytes: Peak.
        measured_bytes: Peak, by live storages.
        allocated_bytes: Peak, by the allocator.
        predicted_seconds: Forward and backward.
        turns: CPU seconds of forward and backward, by turn.
        ratio: Over the reference in the same turn, median.
    """

    row: str
    plan: str
    rival: str
    strategies: dict[str, str]
    predicted_bytes: int
    predicted_seconds: float
    measured_bytes: int = 0
    allocated_bytes: int = 0
    turns: list[float] = field(default_factory=list)
    ratio: float = 0.0


def plans_of(profile: MemoryProfile) -> dict[str, tuple[MemoryPlan, str]]:
    """Returns plans by name, each with the plan by hand in whose memory it was made."""
    blocks = list(profile.blocks)
    by_hand = {REFERENCE: len(blocks) + 1, "all": 1, "every 2nd": 2, "every 3rd": 3}
    plans: dict[str, tuple[MemoryPlan, str]] = {}
    for name, k in by_hand.items():
        strategies = {block: "recompute" if (index + 1) % k == 0 else "keep" for index, block in enumerate(blocks)}
        plans[name] = MemoryPlan(strategies, profile), ""
    for name in by_hand:
        plans[f"planned, as {name}"] = best_plan(profile, plans[name][0].peak_bytes), name
    least, most = minimum_peak(profile.segments, profile.boundary_tensors), plans[REFERENCE][0].peak_bytes
    for index in range(NUM_BETWEEN):
        budget = least + (most - least) * index // NUM_BETWEEN
        plans[f"planned, {budget / MIB:.1f} MiB"] = best_plan(profile, budget), ""
    return plans


def measure(row: str, turns: int) -> tuple[MemoryProfile, list[Result]]:
    torch.manual_seed(0)
    model, batch = PLANNED[row].build(), PLANNED[row].batch()
    profile = profile_memory(model, batch, strategies=WAYS, repeats=max(1, turns))
    plans = plans_of(profile)
    results = {
        name: Result(row, name, rival, dict(plan.strategies), plan.peak_bytes, plan.seconds)
        for name, (plan, rival) in plans.items()
    }
    for name, result in results.items():
        apply_plan(model, plans[name][0])
        result.measured_bytes = measure_step(model, batch, repeats=0).peak_bytes
        result.allocated_bytes = allocated_bytes(model, batch)
    for turn in range(turns):
        names = list(results)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:  # No plan always runs after the same neighbor.
            apply_plan(model, plans[name][0])
            results[name].turns.append(measure_step(model, batch, repeats=3).seconds)
    for result in results.values():
        pairs = zip(result.turns, results[REFERENCE].turns, strict=True)
        result.ratio = median([ours / reference for ours, reference in pairs]) if turns else 0.0
    for name in profile.blocks:
        apply_checkpointing(model.get_submodule(name), "keep")
    return profile, list(results.values())


def allocated_bytes(model: nn.Module, batch: Tensor) -> int:
    """Returns the most that the CPU's allocator has given out in a step, over its beginning, and what stood there."""
    step = Step(model, batch, None)
    model.zero_grad()
    peak = allocated_peak(step.run)
    model.zero_grad()
    return peak + storage_bytes([*model.parameters(), *model.buffers(), batch])


def allocated_peak(run: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def table_of(row: str, results: Sequence[Result]) -> Table:
    heads = [
        "",
        "predicted MiB",
        "measured",
        "off",
        "allocator",
        "predicted ms",
        "measured",
        "off",
        "of none",
        "foreseen",
    ]
    reference = next(result for result in results if result.plan == REFERENCE)
    lines = []
    for result in results:
        cells = [result.plan, f"{result.predicted_bytes / MIB:.2f}", f"{result.measured_bytes / MIB:.2f}"]
        cells += [f"{peak_error(result):+.2%}", f"{result.allocated_bytes / MIB:.2f}"]
        cells.append(f"{result.predicted_seconds * 1e3:.1f}")
        if result.turns:
            least = min(result.turns)
            cells += [f"{least * 1e3:.1f}", f"{result.predicted_seconds / least - 1:+.1%}", f"{result.ratio:.3f}"]
        else:
            cells += [""] * 3
        lines.append([*cells, f"{result.predicted_seconds / reference.predicted_seconds:.3f}"])
    return Table(PLANNED[row].title, heads, lines)


def peak_error(result: Result) -> float:
    return result.predicted_bytes / result.measured_bytes - 1


def check(results: Sequence[Result]) -> list[str]:
    """Returns what is wrong with figures that do not depend on time, but for what was predicted of it."""
    problems = []
    plans = {result.plan: result for result in results}
    for result in results:
        if abs(peak_error(result)) > PEAK_GOAL:
            problems.append(f"{result.row}, {result.plan}: peak predicted with an error of {peak_error(result):+.1%}")
        rival = plans.get(result.rival)
        if rival is not None:
            if result.measured_bytes > rival.measured_bytes * 1.001:
                problems.append(f"{result.row}, {result.plan}: takes more memory than its rival")
            if result.predicted_seconds > rival.predicted_seconds:
                problems.append(f"{result.row}, {result.plan}: is expected to be slower than its rival")
    return problems


def draw(path: str, profiles: dict[str, MemoryProfile], results: Sequence[Result]) -> None:
    """Draws for each model the front of the planner, and measured plans, over the time and memory of "none"."""
    figure = new_figure(width=4 * len(profiles))
    for axes, (row, profile) in zip(figure.subplots(1, len(profiles), squeeze=False)[0], profiles.items(), strict=True):
        found = [result for result in results if result.row == row]
        none = next(result for result in found if result.plan == REFERENCE)
        front = list(memory_front(profile))
        memory = [plan.peak_bytes / MIB for plan in front]
        axes.step(memory, [plan.seconds / none.predicted_seconds for plan in front], where="post", label="foreseen")
        for planned, marker in ((True, "o"), (False, "x")):
            chosen = [result for result in found if result.plan.startswith("planned") == planned]
            label = "planned" if planned else "none, all, every k-th"
            axes.plot([r.measured_bytes / MIB for r in chosen], [r.ratio for r in chosen], marker, label=label)
        axes.set_title(PLANNED[row].title.split(",")[0])
        axes.set_xlabel("peak, MiB")
        axes.set_ylabel("CPU time over none")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def draw_timeline(path: str, profile: MemoryProfile) -> None:
    """Draws memory over the step without a plan, with every block computed again, and planned for what lies between."""
    plans = {name: plan for name, (plan, _) in plans_of(profile).items() if name in ("none", "all")}
    budget = sum(plan.peak_bytes for plan in plans.values()) // 2
    timelines = {name: plan.timeline for name, plan in plans.items()}
    plot_timelines({**timelines, "planned": best_plan(profile, budget).timeline}, path, budget)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="transformer,resnet,unet", help=f"of {', '.join(PLANNED)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail where memory is not as it must be")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one turn, checked")
    parser.add_argument("--picture", help="draws the fronts there")
    parser.add_argument("--timeline", help="draws memory over the step of the first model there")
    parser.add_argument("--date", help="writes results/DATE-memory_planner.json, .md and .svg")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rows, options.turns, options.check = "tiny", 1, True
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    profiles, results, tables = {}, [], []
    for row in options.rows.split(","):
        profiles[row], found = measure(row, options.turns)
        results += found
        tables.append(table_of(row, found))
        print(tables[-1].markdown(), flush=True)
    if options.picture:
        draw(options.picture, profiles, results)
    if options.timeline:
        draw_timeline(options.timeline, next(iter(profiles.values())))
    if options.date:
        save("memory_planner", options.date, __doc__ or "", tables, [asdict(result) for result in results])
        draw(str(RESULTS / f"{options.date}-memory_planner.svg"), profiles, results)
    problems = [problem for row in profiles for problem in check([result for result in results if result.row == row])]
    if options.check and problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
