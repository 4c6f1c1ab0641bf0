"""Checkpoints of a training: all that a run needs to go on as if it had never stopped.

The tensors (model and optimizer) are sharded snapshots of scale-core, which any number of ranks can read. The rest is a
few numbers: the step, from which the learning rate and the random state follow, and the data position.

    scale-runs/lm-1/                 one run
        checkpoints/step-00000100/   one complete checkpoint; written to another name, and renamed at the end
        metrics.jsonl  loss.png  config.toml
        torchrun-run                 whose it is, where torchrun has started the ranks
        run.lock                     while the run goes on
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

import scale_snapshot
from scale_core.consistency.all_ranks import CollectiveCall, Progress
from scale_core.shard import full_shape
from scale_snapshot import DamagedSnapshotError, SnapshotError, latest_snapshot
from scale_snapshot.foreign import recognize
from scale_snapshot.format.metadata import JSON, read_manifest
from scale_snapshot.format.state_codec import decode_extra
from scale_train.errors import InputError, reason_of
from scale_train.huggingface.model import config_facts
from scale_train.model.config import ModelConfig
from scale_train.options import Options, RunOptions
from scale_train.training.finite import describe_nonfinite
from scale_train.training.parallel.pipeline_gpt import PipelineEngine
from scale_train.training.run_lock import RunLock
from scale_train.training.state import TrainState

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
CONFIG = "config.toml"
TORCHRUN_RUN = "torchrun-run"
DEFAULT_FOLDER = Path("scale-runs")
PROGRAM = "scale-train lm"
# These must be equal on resume; dropout and options that save memory may change.
MODEL_FIELDS = ("layers", "width", "heads", "vocabulary", "tied", "experts", "top_k", "shared_experts")


def save(training: TrainState, folder: Path) -> Path:
    """Writes a checkpoint into a new directory of `folder`; called on all ranks, and an InputError is raised on all.

    With --async-save it is written in the background, unless the training is over.
    """
    objects = {"model": _saved_model(training), "optim": training.optimizer}
    with refusing_lost_saves(training, folder):
        training.finish_save()
        group, extra = training.group, checkpoint_metadata(training)
        if training.options.run.async_save and not training.is_over:
            training.saving = scale_snapshot.async_save(
                folder, training.step, objects, process_group=group, extra=extra
            )
            path = training.saving.path
        else:
            path = scale_snapshot.save(folder, training.step, objects, process_group=group, extra=extra)
            training.checkpoint = path
    training.saved_step = training.step
    return path


@contextmanager
def refusing_lost_saves(training: TrainState, folder: Path) -> Iterator[None]:
    """Makes of a save that has failed, here or in the background, an InputError that names the checkpoint before it."""
    try:
        yield
    except SnapshotError as error:
        cause = error.__cause__
        last = training.checkpoint or "none yet"
        reason = reason_of(cause) if isinstance(cause, OSError) else str(cause or error)
        step = training.step if training.saving is None else _step_of(training.saving.path)
        raise InputError(
            f"cannot save step {step} in {folder}: {reason}; the last complete checkpoint stays: {last}"
        ) from error


def checkpoint_metadata(training: TrainState) -> dict[str, Any]:
    """Returns what a checkpoint holds besides tensors, as JSON."""
    source = training.options.model.model
    return {
        "program": PROGRAM,
        "step": training.step,
        "model": model_facts(training.engine.raw_model),
        "model_source": "" if source is None else str(source.absolute()),
        "tokenizer": training.text.tokenizer.place,
        "tokenizer_sha256": training.text.tokenizer.sha256,
        "parameters": parameter_shapes(training.engine.raw_model),
        "schedule": asdict(training.schedule),
        "data": training.sampler.state(),
        "text": training.text.fingerprint(),
        "scaler": training.scaler.state_dict(),
        "random": {"seed": training.options.run.seed, "step": training.step},
    }


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Returns what defines the model, as JSON: the numbers of the GPT, or a config of transformers."""
    config: Any = model.config
    return asdict(config) if isinstance(config, ModelConfig) else config_facts(model)


def parameter_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Returns the full shapes of the parameters by name, in the model's order."""
    if isinstance(model, PipelineEngine):
        return model.shapes
    return {name: list(full_shape(param)) for name, param in model.named_parameters()}


def load(training: TrainState, point: Path) -> None:
    """Loads a checkpoint; called on all ranks, and an InputError is raised on all.

    Learning rate and weight decay are from the command line; the model and the order of the data must be the same.
    """
    optimizer = training.optimizer
    group_options = [
        {key: value for key, value in group.items() if key != "params" and not key.startswith("adascale")}
        for group in optimizer.param_groups
    ]
    objects = {"model": _saved_model(training), "optim": optimizer}
    try:
        check_is_of_this_training(training, point)
        loaded = scale_snapshot.load(point.parent, objects, step=_step_of(point), process_group=training.group)
    except SnapshotError as error:
        cause = error.__cause__
        reason = error if cause is None or isinstance(error, DamagedSnapshotError) else cause
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            reason = error  # It says, too, that it can be read later.
        raise reason if isinstance(reason, InputError) else InputError(f"--resume {point}: {reason}") from error
    for group, options in zip(optimizer.param_groups, group_options, strict=True):
        group.update(options)
    extra: Any = loaded.extra
    training.sampler.load_state(extra["data"])
    if training.scaler.is_enabled() and extra.get("scaler"):
        training.scaler.load_state_dict(extra["scaler"])
    training.step = training.saved_step = loaded.step
    training.checkpoint = loaded.path
    if nonfinite := describe_nonfinite(training):
        raise InputError(f"--resume {point}: {nonfinite}; {_last_finite(training, point)}")


def _last_finite(training: TrainState, point: Path) -> str:
    """Says which checkpoint of a folder has finite numbers alone, where this one has others."""

    def look(progress: Progress) -> Path | None:
        if training.group.rank > 0:
            return None
        with suppress(OSError, ValueError):  # Nobody may read it.
            print(f"scale-train: {point} has others than finite numbers; looking for one without", file=sys.stderr)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # They name what is passed over.
            return latest_snapshot(point.parent, finite=True, progress=progress)

    looking = CollectiveCall(training.group, f"looking for a finite checkpoint in {point.parent}", SnapshotError)
    path = looking.all_ranks_with_progress(look)[0]
    if path is None:
        return "no checkpoint there has finite numbers alone"
    return f"the last one that has finite numbers alone is {path.name}: --resume {path} --out a new folder"


def check_is_of_this_training(training: TrainState, point: Path) -> None:
    """Compares what a checkpoint says of itself with the training, before anything of it is loaded."""

    def said(progress: Progress) -> None:
        if training.group.rank == 0:
            with suppress(DamagedSnapshotError):  # Loading it says what is damaged, and which other one is whole.
                check_said(training, point, decode_extra(read_manifest(point, progress).extra))

    CollectiveCall(training.group, f"comparing {point}", SnapshotError).all_ranks_with_progress(said)


def check_said(training: TrainState, point: Path, said: JSON) -> None:
    """Refuses what another program says, or one with another model or text."""
    if not isinstance(said, dict) or said.get("program") != PROGRAM:
        raise InputError(f"--resume {point}: a checkpoint of another program than {PROGRAM}")
    model, parameters = training.engine.raw_model, said.get("parameters")
    check_same_model(parameters if isinstance(parameters, dict) else {}, parameter_shapes(model), point)
    check_same_fields(said.get("model"), model_facts(model), point)
    if said.get("text") != training.text.fingerprint():
        raise InputError(f"--resume {point}: it was trained on another text than {training.text.source}")


def _saved_model(training: TrainState) -> nn.Module:
    """The module with the names of the whole model."""
    pipeline = training.engine.pipeline
    return training.engine.raw_model if pipeline is None else pipeline.pipe


def _step_of(point: Path) -> int:
    return int(point.name.removeprefix("step-"))


def check_same_model(saved: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> None:
    """Compares names and shapes, in order; an InputError names the first difference."""
    for name, shape in own.items():
        if name not in saved:
            raise InputError(f"--resume {path}: a checkpoint of another model: it has no {name}, which is {shape} here")
        if saved[name] != shape:
            raise InputError(
                f"--resume {path}: a checkpoint of another model: {name} is {saved[name]} there, {shape} here"
            )
    for name, shape in saved.items():
        if name not in own:
            raise InputError(
                f"--resume {path}: a checkpoint of another model: it has {name} {shape}, which is not here"
            )


def check_same_fields(saved: Any, own: Mapping[str, Any], path: Path) -> None:
    """Compares fields that shapes do not show, as the number of heads."""
    saved = saved if isinstance(saved, dict) else {}
    # Another version of transformers has more fields of a config, or fewer.
    names = [name for name in own if name in saved] if "model_type" in own and "model_type" in saved else MODEL_FIELDS
    for name in names:
        # A checkpoint from before there was such a number is of a model with the default.
        saved_value, current_value = saved.get(name, getattr(ModelConfig, name, None)), own.get(name)
        if saved_value != current_value:
            raise InputError(
                f"--resume {path}: a checkpoint of another model: {name} is {saved_value} there, {current_value} here"
            )


@dataclass(frozen=True)
class RunPaths:
    """The folder of a run, and the checkpoint that it resumes."""

    folder: Path
    resume_from: Path | None

    @property
    def step(self) -> int:
        return 0 if self.resume_from is None else _step_of(self.resume_from)


def torchrun_run(options: Options) -> str:
    """Names what torchrun runs: its id, or its process where it was given none, and the options; "" without torchrun.

    torchrun's restart count does not tell to which run a folder belongs. Ranks that find the folder of a different run
    are started again as well. And an agent that restarts ranks because an agent joined or left does not count that.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":
        run_id = f"agent {os.getppid()} on {socket.gethostname()}"
    return "" if run_id is None else f"{run_id}\n{options}\n"


def check_export(folder: Path | None) -> None:
    """Refuses a folder that has something in it, before the training and not after it."""
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--export {folder}: exists; name a new folder")


def resolve_paths(run: RunOptions, torchrun_run: str = "", lock: RunLock | None = None) -> RunPaths:
    """Finds the checkpoint to resume and the folder of this run, which is made; an InputError where they don't fit.

    Where `torchrun_run` (see the function) stands in the folder, torchrun has started the ranks again: the folder is
    their own, and its last checkpoint is resumed. `lock` locks the folder, before anything in it is changed.
    """
    paths = _find_paths(run, torchrun_run)
    try:
        if lock is not None and lock.take(paths.folder):
            paths = _find_paths(run, torchrun_run)  # The run that had it may have saved meanwhile.
        if torchrun_run:
            (paths.folder / TORCHRUN_RUN).write_text(torchrun_run)
    except OSError as error:
        raise _cannot_write(run, error) from error
    return paths


def _find_paths(run: RunOptions, torchrun_run: str) -> RunPaths:
    try:
        continued = _folder_before_restart(run, torchrun_run)
        newest = (
            latest_snapshot(continued / CHECKPOINTS)
            if continued is not None and (continued / CHECKPOINTS).is_dir()
            else None
        )
        if continued is not None and newest is not None:
            return RunPaths(continued, newest)
        point = _resume_point(run.resume) if run.resume is not None else None
    except OSError as error:
        raise InputError(f"--resume {run.resume}: cannot be read ({error.strerror})") from error
    except SnapshotError as error:  # A newer version of scale-core wrote it.
        raise InputError(f"--resume {run.resume}: {error}") from error
    try:
        return RunPaths(continued or _choose_folder(run, point), point)
    except OSError as error:
        raise _cannot_write(run, error) from error


def _cannot_write(run: RunOptions, error: OSError) -> InputError:
    return InputError(f"--out {run.out or DEFAULT_FOLDER}: cannot be written ({reason_of(error)})")


def _folder_before_restart(run: RunOptions, torchrun_run: str) -> Path | None:
    """The folder of ranks that the same torchrun has started before these; None where there were none."""
    folder = run.out
    if folder is None and run.resume is not None:
        folder = run.resume if (run.resume / CHECKPOINTS).is_dir() else run.resume.parent.parent
    name = None if folder is None else folder / TORCHRUN_RUN
    is_own = torchrun_run != "" and name is not None and name.exists() and name.read_text() == torchrun_run
    return folder if is_own else None


def _choose_folder(run: RunOptions, point: Path | None) -> Path:
    out, old = run.out, None
    if run.resume is not None and point is not None:  # The run that it, or the checkpoint that it is, belongs to.
        old = run.resume if point != run.resume else run.resume.parent.parent
        if out is None or out.resolve() == old.resolve():
            if point == run.resume:
                _check_is_newest(point)
            return old
    if out is None:
        return _next_folder()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        instead = f"continue it with --resume {out}" if old is None else f"leave --out away to go on in {old}"
        raise InputError(f"--out {out}: exists; name a new folder, or {instead}")
    out.mkdir(parents=True, exist_ok=True)
    if old is not None and (old / METRICS).exists():
        shutil.copyfile(old / METRICS, out / METRICS)
    return out


def _check_is_newest(point: Path) -> None:
    """Refuses to go on in a folder from an older checkpoint, whose later ones would be in the way."""
    try:
        newest = latest_snapshot(point.parent, verify=True)
    except SnapshotError as error:
        raise InputError(f"--resume {point}: {error}") from error
    except OSError as error:
        raise InputError(
            f"--resume {point}: a newer checkpoint in its folder can't be read now ({error.strerror}): "
            "name a new folder with --out"
        ) from error
    if newest is not None and newest.name != point.name:
        raise InputError(f"--resume {point}: {newest.name} is newer and stays; name a new folder with --out")


def _resume_point(path: Path) -> Path:
    """The checkpoint of `--resume path`: that one, or the last complete one of a run's folder."""
    if not path.exists():
        raise InputError(f"--resume {path}: no such folder")
    if not (path / CHECKPOINTS).is_dir():
        if path.is_dir() and path.name.removeprefix("step-").isdecimal():
            return path
        snapshot_format = recognize(path)
        if snapshot_format is not None and snapshot_format.is_foreign:
            raise InputError(f"--resume {path}: {snapshot_format.advice()}")
        raise InputError(f"--resume {path}: neither a run (it has no {CHECKPOINTS}) nor a checkpoint (step-N)")
    try:
        point = latest_snapshot(path / CHECKPOINTS, verify=True)  # A damaged one is passed over, with a warning.
    except OSError as error:
        raise InputError(
            f"--resume {path}: its newest checkpoint can't be read now ({error.strerror}): start again when the file "
            f"system answers, or go on from an older one in a new folder: --resume {path / CHECKPOINTS}/step-N --out "
            "FOLDER"
        ) from error
    if point is None:
        raise InputError(f"--resume {path}: there is no complete checkpoint in it")
    return point


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
