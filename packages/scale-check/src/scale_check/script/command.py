"""`scale-check run script.py`: on several ranks, on one, and once more on one for its rounding; then compared.

Recordings have sums of large tensors. If such a tensor is the first that differs, the script runs once more and keeps
this tensor as it is, so that the report has an index and two values.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scale_check import noise
from scale_check.comparison import Report, compare
from scale_check.recording import Recording, with_joined_calls
from scale_check.script.data import Samples, SamplesError
from scale_check.script.rank import ScriptResult, ScriptTask
from scale_core.launch.rendezvous import open_store

_POLL_SECONDS = 0.05
_QUOTED_LINES = 30


class ScriptError(RuntimeError):
    """The script itself failed, or did nothing that can be compared."""


def run_script(
    arguments: Sequence[str],
    num_ranks: int = 2,
    *,
    steps: int = 3,
    is_module: bool = False,
    limit_seconds: float = 600.0,
) -> Report:
    """Runs a training script on several ranks and on one, on the same samples, and compares what its modules compute.

    The ranks run first, and what their loaders give, together, is what the one process gets. Dropout is off in both,
    and random generators are seeded before the script begins. After some steps of the optimizer the script is ended.

    Args:
        arguments: The script, or the name of a module, and its arguments.
        num_ranks: How many ranks.
        steps: How many steps of the optimizer are compared.
        is_module: Whether `arguments` begins with a module's name, as after `python -m`.
        limit_seconds: For each of the runs.

    Raises:
        ScriptError: The script failed, or has no step of an optimizer of a model.
    """
    with tempfile.TemporaryDirectory(prefix="scale-check-") as temp_dir:
        folder = Path(temp_dir)
        task = ScriptTask(tuple(arguments), is_module, steps, None, 0, folder)
        report = _compare_runs(task, num_ranks, folder / "first", limit_seconds)
        key = report.first_key
        if report.first is None or key is None or None not in report.first.index:
            return report
        task = replace(task, steps=key.step, whole=frozenset([key.of_all_calls()]))
        detailed = _compare_runs(task, num_ranks, folder / "second", limit_seconds)
    return replace(report, first=detailed.first) if detailed.first_key == key else report


def _compare_runs(task: ScriptTask, num_ranks: int, folder: Path, limit_seconds: float) -> Report:
    """Runs the script on the ranks, and twice in one process on their samples, and compares."""
    folder.mkdir()
    script = task.arguments[0]
    ranks = _run([task] * num_ranks, folder / "ranks", limit_seconds)
    if not any(result.recording.tensors for result in ranks):
        raise ScriptError(f"{script}: no module ran with gradients; is it a training script?")
    samples_of_ranks = [result.samples for result in ranks]
    if (padded := Samples.of_one_length(samples_of_ranks)) is not None:
        samples_of_ranks = padded
        ranks = _run([replace(task, samples=samples) for samples in padded], folder / "padded", limit_seconds)
    try:
        samples = Samples.together(samples_of_ranks)
    except SamplesError as error:
        raise ScriptError(f"{script}: {error}") from error
    recordings = [result.recording for result in ranks]
    alone = replace(task, num_forwards=recordings[0].num_forwards.get(1, 0))
    plain, perturbed = _run_alone(replace(alone, samples=samples), folder / "one", limit_seconds)
    if not plain.num_steps:  # It makes more forwards in its first step: the micro-batches of all ranks, it seems.
        in_turn = replace(task, samples=Samples.in_turn(samples_of_ranks))
        runs = _run_alone(in_turn, folder / "one in turn", limit_seconds)
        plain, perturbed = (with_joined_calls(recording, num_ranks, task.whole) for recording in runs)
    _check_same_course(script, plain, recordings)
    return compare(plain, recordings, noise.measure(plain, [perturbed]))


def _run_alone(task: ScriptTask, folder: Path, limit_seconds: float) -> list[Recording]:
    """Runs the script in one process, and beside it with weights that differ in their last place."""
    folder.mkdir()
    with ThreadPoolExecutor(2) as executor:  # Each of the two has one process.
        runs = [
            executor.submit(_run, [replace(task, perturbation=seed)], folder / name, limit_seconds)
            for seed, name in enumerate(("plain", "noise"))
        ]
        return [run.result()[0].recording for run in runs]


def _check_same_course(script: str, plain: Recording, ranks: Sequence[Recording]) -> None:
    """Refuses what can't be compared: another number of steps or of micro-batches, and random numbers."""
    if plain.draws:
        raise ScriptError(
            f"{script}: '{plain.draws[0]}' draws random numbers in its forward, which are others on each rank: run the "
            "script without them"
        )
    for rank, recording in enumerate(ranks):
        if recording.num_calls(1) != plain.num_calls(1):
            raise ScriptError(
                f"{script}: the one process calls its model {plain.num_calls(1)} times in a step, and rank {rank} "
                f"{recording.num_calls(1)} times: let the number of micro-batches not depend on the number of ranks"
            )
        if recording.num_steps != plain.num_steps:
            raise ScriptError(
                f"{script}: the one process makes {plain.num_steps} steps of its optimizer, and rank {rank} makes "
                f"{recording.num_steps}: something in the script depends on the number of ranks"
            )


def _run(tasks: Sequence[ScriptTask], folder: Path, limit_seconds: float) -> list[ScriptResult]:
    """Runs the script on a rank for each task, as torchrun does; returns what each has recorded."""
    folder.mkdir()
    num_ranks = len(tasks)
    store = open_store("127.0.0.1", 0, serve=True, timeout=limit_seconds)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, task in enumerate(tasks):
            task_of_rank = replace(task, result=folder / f"result-{rank}")
            (folder / f"task-{rank}").write_bytes(pickle.dumps(task_of_rank))
            with (folder / f"output-{rank}").open("wb") as output:
                command = [sys.executable, "-m", "scale_check.script", str(folder / f"task-{rank}")]
                environment = {**os.environ, **_variables(rank, num_ranks, store.port)}
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        _wait(processes, folder, num_ranks, limit_seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, num_ranks: int, limit_seconds: float) -> None:
    until = time.monotonic() + limit_seconds
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed or time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    codes = [process.poll() for process in processes]
    failed = [rank for rank, code in enumerate(codes) if code]
    late = [rank for rank, code in enumerate(codes) if code is None]
    if failed or late:
        rank = (failed or late)[0]
        how = f"ended with code {codes[rank]}" if failed else f"still ran after {limit_seconds:g} s"
        with suppress(OSError):
            lines = (folder / f"output-{rank}").read_text(errors="replace").splitlines()[-_QUOTED_LINES:]
            raise ScriptError(f"rank {rank} of {num_ranks} {how}. It said last:\n" + "\n".join(lines))


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """As torchrun sets them; the store is this program's."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "scale-check",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
