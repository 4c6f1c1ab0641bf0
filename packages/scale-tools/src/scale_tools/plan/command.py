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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from scale_tools.plan.estimate import count_parameters, estimate, least_bytes
from scale_tools.plan.model import PlannedModel, planned_model
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.rates import attention_tflops
from scale_tools.plan.report import as_json, draw, print_plan
from scale_tools.plan.rows import judge, suggest
from scale_tools.plan.simulated_rank import Estimate
from scale_tools.plan.strategies import Strategy, strategies, with_offload
from scale_train.configuration.checks import expert_problems, number_problem
from scale_train.configuration.resolve import expert_parallel_problem, model_config, parse_bytes
from scale_train.errors import InputError, reported

NOTHING_FITS = 1


def plan(options: PlanOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _plan(options))


def _plan(options: PlanOptions) -> int:
    _check(options)
    planned = planned_model(options)
    num_params = count_parameters(planned)
    candidates = strategies(options, _num_layers(options))
    rows = [judge(planned, found, options) for found in _estimates(planned, candidates, options, num_params)]
    if "offload" in options.activations:
        # Copies cost time: what fits without is planned without.
        left = [row.found.strategy for row in rows if not row.fits and not row.found.problem]
        more = [each for each in map(with_offload, left) if each is not None]
        rows += [judge(planned, found, options) for found in _estimates(planned, more, options, num_params)]
    suggested = suggest(rows)
    if options.json:
        print(json.dumps(as_json(planned, num_params, options, rows, suggested)))
    else:
        print_plan(planned, num_params, options, rows, suggested)
    if options.picture is not None:
        draw(rows, suggested, parse_bytes("--device-memory", options.device_memory), options.picture)
    return 0 if suggested else NOTHING_FITS


def _check(options: PlanOptions) -> None:
    shape = ("layers", "width", "heads", "loss_chunk", "vocabulary", "experts", "top_k")
    names = (*shape, "batch", "sequence", "expert_parallel")
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
        raise InputError(
            "--activations offload: expected a second way to compare it with; take --activations keep offload"
        )
    if options.jobs is not None and options.jobs < 1:
        raise InputError(f"--jobs {options.jobs}: at least 1 is needed")
    if options.ranks_per_host is not None and options.ranks_per_host < 1:
        raise InputError(f"--ranks-per-host {options.ranks_per_host}: at least 1 is needed")
    for flag, rate in (
        ("--tflops", options.tflops),
        ("--attention-tflops", attention_tflops(options)),
        ("--link", options.link),
        ("--host-link", options.host_link),
        ("--memory-bandwidth", options.memory_bandwidth),
        ("--host-bandwidth", options.host_bandwidth),
    ):
        if not 0 < rate < math.inf:
            raise InputError(f"{flag} {rate:g}: a number above 0 is needed")
    _check_experts(options)
    if options.picture is not None:
        _check_picture(options.picture)
    if not 0 <= options.margin < 1:
        raise InputError(f"--margin {options.margin:g}: a part from 0 to below 1 is needed")
    parse_bytes("--device-memory", options.device_memory)
    parse_bytes("--host-memory", options.host_memory)


def _check_picture(path: Path) -> None:
    """Refuses before the estimates, which take long, what can't be written after them."""
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"--picture {path}: a name that ends in .svg or .png is needed")
    if not path.parent.is_dir():
        raise InputError(f"--picture {path}: there is no folder {path.parent}")


def _check_experts(options: PlanOptions) -> None:
    given = [name for name in ("top_k", "expert_parallel") if getattr(options, name) != getattr(PlanOptions, name)]
    problems = expert_problems(options.experts, options.top_k, options.expert_parallel, given)
    if problem := next(problems, ""):
        raise InputError(problem)
    for ranks in options.ranks:
        if ranks % options.expert_parallel:
            raise InputError(expert_parallel_problem(options.expert_parallel, ranks))


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
        if jobs <= 1 and not torch.cuda.is_available():
            for each in left:
                found[each] = estimate(planned, each, options)
                advance()
        elif left:
            spawn = multiprocessing.get_context("spawn")
            with _without_gpus(), ProcessPoolExecutor(max(jobs, 1), spawn) as pool:
                for made in as_completed([pool.submit(estimate_named, each, options) for each in left]):
                    found[made.result().strategy] = made.result()
                    advance()
    return [found[each] for each in candidates]


@contextmanager
def _without_gpus() -> Iterator[None]:
    """A context in which new processes see no GPU, whose place the simulated device takes."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def estimate_named(strategy: Strategy, options: PlanOptions) -> Estimate:
    """Makes the model that the options name, and estimates; in a process of its own."""
    torch.set_num_threads(1)
    return estimate(planned_model(options), strategy, options)


@contextmanager
def _progress(options: PlanOptions, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's standard error; gives what moves it on."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal or options.json) as bar:
        task = bar.add_task("ways to train", total=total)
        yield lambda: bar.advance(task)
