"""A training on disk: all that a run needs to go on as if it had never stopped.

The tensors (model and optimizer) are sharded snapshots of scale-core, which any number of ranks can read. The rest is a
few numbers: the step, from which the learning rate and the random state follow, and the data position.

    scale-runs/lm-1/                 one run
        checkpoints/step-00000100/   one whole checkpoint; written beside, and renamed when it is whole
        metrics.jsonl  loss.png
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scale_core.restore import StateMismatch, load_sharded_state_dict
from scale_core.shard import full_shape
from scale_core.snapshot import latest_snapshot, load_snapshot, save_snapshot
from scale_core.state import sharded_state_dict
from torch import nn

from scale_train.errors import InputError
from scale_train.training import Training
from scale_train.options import RunOptions

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
DEFAULT_FOLDER = Path("scale-runs")
PROGRAM = "scale-train lm"


def save(training: Training, folder: Path) -> Path:
    """Writes a checkpoint into a new directory of `folder`; all ranks have to call this.

    Raises:
        InputError: The disk is full or cannot be written to; the checkpoints before it stay as they are. On all ranks.
    """
    state = sharded_state_dict(training.engine.plain, training.optimizer)
    try:
        path = save_snapshot(folder, training.step, state, training.group, describe(training))
    except OSError as error:
        last = training.checkpoint or "none yet"
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise InputError(
            f"cannot save step {training.step} in {folder}: {reason}; the last whole checkpoint stays: {last}"
        ) from error
    training.checkpoint, training.saved_step = path, training.step
    return path


def describe(training: Training) -> dict[str, Any]:
    """What a checkpoint holds beside tensors, ready for JSON."""
    return {
        "program": PROGRAM,
        "step": training.step,
        "model": asdict(training.engine.plain.config),
        "parameters": shapes(training.engine.plain),
        "schedule": asdict(training.schedule),
        "data": training.sampler.state(),
        "text": training.text.fingerprint(),
        "random": {"seed": training.options.run.seed, "step": training.step},
    }


def shapes(model: nn.Module) -> dict[str, list[int]]:
    """The names of the parameters in the model's order, with the shapes that they have when they are whole."""
    return {name: list(full_shape(param)) for name, param in model.named_parameters()}


def load(training: Training, path: Path) -> None:
    """Takes everything from a checkpoint; all ranks have to call this.

    Raises:
        InputError: It is no checkpoint of this program, or one of another model or another text.
    """
    ...


def check_same_model(saved: dict[str, list[int]], mine: dict[str, list[int]], path: Path) -> None:
    """Compares names and shapes, in order.

    Raises:
        InputError: They differ; it names the first parameter that does.
    """
    for name, shape in mine.items():
        if name not in saved:
            raise InputError(f"--resume {path}: a checkpoint of another model: it has no {name}, which is {shape} here")
        if saved[name] != shape:
            raise InputError(
                f"--resume {path}: a checkpoint of another model: {name} is {saved[name]} there, {shape} here"
            )
    for name, shape in saved.items():
        if name not in mine:
            raise InputError(
                f"--resume {path}: a checkpoint of another model: it has {name} {shape}, which is not here"
            )


def choose_folder(run: RunOptions) -> Path:
    """The folder of this run, made if it was not there.

    Raises:
        InputError: It holds something already that is not to be continued, or it cannot be made.
    """
    try:
        if run.out is None:
            return _folder_of(run.resume) if run.resume is not None else _next_folder()
        same = run.resume is not None and run.out.resolve() == _folder_of(run.resume).resolve()
        if not same and run.out.exists() and (not run.out.is_dir() or any(run.out.iterdir())):
            raise InputError(
                f"--out {run.out}: exists already; name a new folder, or continue it with --resume {run.out}"
            )
        run.out.mkdir(parents=True, exist_ok=True)
        if run.resume is not None and not same and (_folder_of(run.resume) / METRICS).exists():
            shutil.copyfile(_folder_of(run.resume) / METRICS, run.out / METRICS)
    except OSError as error:
        raise InputError(f"--out {run.out or DEFAULT_FOLDER}: cannot be written ({error.strerror})") from error
    return run.out


def resume_point(path: Path) -> Path:
    """The checkpoint that `--resume path` means: that one, or the last whole one of a run's folder.

    Raises:
        InputError: There is none.
    """
    if not path.is_dir():
        raise InputError(f"--resume {path}: no such folder")
    if not (path / CHECKPOINTS).is_dir():
        if path.name.startswith("step-"):
            return path
        raise InputError(f"--resume {path}: neither a run (it has no {CHECKPOINTS}) nor a checkpoint (step-N)")
    point = latest_snapshot(path / CHECKPOINTS)
    if point is None:
        raise InputError(f"--resume {path}: there is no whole checkpoint in it")
    return point


def _folder_of(resume: Path) -> Path:
    """The run that a path to it, or to one of its checkpoints, belongs to."""
    if resume.parent.name == CHECKPOINTS and not (resume / CHECKPOINTS).is_dir():
        return resume.parent.parent
    return resume


def _next_folder() -> Path:
    DEFAULT_FOLDER.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = DEFAULT_FOLDER / f"lm-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
