"""`scale-check run script.py`: on several ranks, on one, and once more on one for its rounding; then compared.

Where something differs, the one process runs once more, to see whether the script casts to less precise dtypes itself.
If it does, that rounding is measured, too.

Each rank has a `ForkServer`, and the servers of the first two ranks also run the script in one process. Recordings
have sums of large tensors. If such a tensor is the first that differs, the script runs once more and keeps all of this
tensor, so that the report has an index and two values.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from scale_check import noise
from scale_check.comparison import Report, compare, with_samples_compared
from scale_check.recording import FLAT_PARAMS, Key, Phase, Recording, with_joined_calls
from scale_check.script.data import Samples, SamplesError
from scale_check.script.fork_server import ForkServer
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

    The ranks run first. The one process gets the joined batches of their loaders. Dropout is off in both, and random
    generators are seeded before the script begins. We end the script after `steps` optimizer steps.

    Args:
        arguments: The script, or the name of a module, and its arguments.
        num_ranks: How many ranks.
        steps: How many steps of the optimizer are compared.
        is_module: Whether `arguments` begins with a module's name, as after `python -m`.
        limit_seconds: For each of the runs.

    Raises:
        ScriptError: The script failed, or has no step of an optimizer of a model.
    """
    with tempfile.TemporaryDirectory(prefix="scale-check-") as temp_dir, ExitStack() as stack:
        folder = Path(temp_dir)
        script = () if is_module else tuple(arguments)
        servers = [stack.enter_context(ForkServer(folder / f"server-{rank}", script)) for rank in range(num_ranks)]
        runner = _Runner(servers, limit_seconds)
        task = ScriptTask(tuple(arguments), is_module, steps, None, 0, folder)
        report = _compare_runs(task, runner, folder / "first")
        first = report.first
        if first is None or None not in first.index:
            return report
        tensor = (first.step, first.phase, first.name)
        task = replace(task, steps=first.step, whole=frozenset([Key(first.step, Phase(first.phase), first.name)]))
        detailed = _compare_runs(task, runner, folder / "second")
    of_tensor = [other for other in detailed.differences if (other.step, other.phase, other.name) == tensor]
    return replace(report, first=of_tensor[0]) if of_tensor else report


@dataclass(frozen=True)
class _Runner:
    """Runs the script, on ranks or in one process, for a limited time.

    Attributes:
        servers: Of each rank.
        limit_seconds: For each of the runs.
    """

    servers: Sequence[ForkServer]
    limit_seconds: float

    def run_alone(self, task: ScriptTask, folder: Path) -> list[Recording]:
        """Runs the script in one process, and again with weights that differ in their last place."""
        folder.mkdir()
        with ThreadPoolExecutor(2) as executor:  # Each of the two has one process.
            runs = [
                executor.submit(self.run, [replace(task, perturbation=seed)], folder / name, first_server=seed)
                for seed, name in enumerate(("plain", "noise"))
            ]
            return [run.result()[0].recording for run in runs]

    def run_with_noise_of_casts(self, task: ScriptTask, folder: Path) -> tuple[Recording, float] | None:
        """Runs the script in one process with weights changed by the rounding of its casts, and returns both.

        None without such casts, or if the script fails while they are looked for.
        """
        folder.mkdir()
        try:
            (found,) = self.run([replace(task, finds_casts=True)], folder / "casts")
            if not found.cast_eps:
                return None
            (perturbed,) = self.run([replace(task, perturbation=1, cast_eps=found.cast_eps)], folder / "noise")
        except ScriptError:  # The report of the difference is worth more than this error.
            return None
        return perturbed.recording, found.cast_eps

    def run(self, tasks: Sequence[ScriptTask], folder: Path, *, first_server: int = 0) -> list[ScriptResult]:
        """Runs the script on a rank for each task, as torchrun does; returns what each has recorded."""
        folder.mkdir()
        servers = self.servers[first_server : first_server + len(tasks)]
        store = open_store("127.0.0.1", 0, serve=True, timeout=self.limit_seconds)
        for rank, (server, task) in enumerate(zip(servers, tasks, strict=True)):
            server.start(task, _variables(rank, len(tasks), store.port), folder, str(rank))
        self._wait(servers)
        return [pickle.loads(server.result()) for server in servers]

    def _wait(self, servers: Sequence[ForkServer]) -> None:
        until = time.monotonic() + self.limit_seconds
        codes = [server.poll() for server in servers]
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            codes = [server.poll() for server in servers]
        failed = [rank for rank, code in enumerate(codes) if code]
        late = [rank for rank, code in enumerate(codes) if code is None]
        if failed or late:
            rank = (failed or late)[0]
            how = f"ended with code {codes[rank]}" if failed else f"still ran after {self.limit_seconds:g} s"
            lines = servers[rank].output().splitlines()[-_QUOTED_LINES:]
            for server in servers:
                server.kill()
            raise ScriptError(f"rank {rank} of {len(servers)} {how}. It said last:\n" + "\n".join(lines))


def _compare_runs(task: ScriptTask, runner: _Runner, folder: Path) -> Report:
    """Runs the script on the ranks, and twice in one process on their samples, and compares."""
    folder.mkdir()
    script = task.arguments[0]
    num_ranks = len(runner.servers)
    ranks = runner.run([task] * num_ranks, folder / "ranks")
    if not any(result.recording.tensors for result in ranks):
        raise ScriptError(f"{script}: no module ran with gradients; is it a training script?")
    if any(result.recording.has_flat_params for result in ranks):
        raise ScriptError(f"{script}: {FLAT_PARAMS}")
    samples_of_ranks = [result.samples for result in ranks]
    if (padded := Samples.of_one_length(samples_of_ranks)) is not None:
        samples_of_ranks = padded
        ranks = runner.run([replace(task, samples=samples) for samples in padded], folder / "padded")
    try:
        samples = samples_of_ranks[0] if Samples.are_equal(samples_of_ranks) else Samples.together(samples_of_ranks)
    except SamplesError as error:
        raise ScriptError(f"{script}: {error}") from error
    recordings = [result.recording for result in ranks]
    alone = replace(task, samples=samples, num_forwards=recordings[0].num_forwards.get(1, 0))
    joined_calls = 1
    plain, perturbed = runner.run_alone(alone, folder / "one")
    if not plain.num_steps:  # It makes more forwards in its first step: the micro-batches of all ranks, it seems.
        alone = replace(task, samples=Samples.in_turn(samples_of_ranks))
        joined_calls = num_ranks
        runs = runner.run_alone(alone, folder / "one in turn")
        plain, perturbed = (with_joined_calls(recording, joined_calls, task.whole) for recording in runs)
    _check_same_course(script, plain, recordings)
    report = compare(plain, recordings, noise.measure(plain, [perturbed]))
    if report.first is not None:  # Casts of the script itself may have hidden the change of its weights.
        changed = runner.run_with_noise_of_casts(alone, folder / "casts")
        if changed is not None:
            of_casts, eps = changed
            of_casts = with_joined_calls(of_casts, joined_calls, task.whole) if joined_calls > 1 else of_casts
            report = compare(plain, recordings, noise.measure(plain, [perturbed], [of_casts], eps))
    if report.first is not None and report.first.phase != Phase.START.value and plain.draws_of_loop:
        raise ScriptError(
            f"{script}: {report.first}. But the script draws random numbers between its DataLoader and its model, "
            "which are others on each rank: draw them in the data set, or run the script without them"
        )
    return with_samples_compared(report, recordings) if report.first is None else report


def _check_same_course(script: str, plain: Recording, ranks: Sequence[Recording]) -> None:
    """Refuses what can't be compared: another number of steps or of micro-batches, and random numbers."""
    if plain.draws:
        raise ScriptError(
            f"{script}: '{plain.draws[0]}' draws random numbers in its forward, which are others on each rank: run the "
            "script without them"
        )
    if plain.trains_nothing:
        raise ScriptError(
            f"{script}: the optimizer's steps see no gradient and change no weight, also in one process: is the "
            "optimizer built after the model is wrapped, and are gradients reduced before it steps?"
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
    }
