"""Reporters of a training on rank 0: progress bar, lines, JSON lines, `metrics.jsonl`, TensorBoard, Weights & Biases.

`metrics.jsonl` has one JSON object per line, for the plot and for a resumed run. A disk that is full when a run begins
is an error; one that fills up later costs lines of this file and nothing else.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from scale_train.errors import InputError, reason_of
from scale_train.options import Options
from scale_train.training.memory import format_bytes
from scale_train.training.reports.output import Output

# More than the first lines of metrics need: a full disk may still allow an empty file.
_ROOM_BYTES = 4096
_SCALARS = (
    *("loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "loss_scale", "gain", "useful_steps"),
    *("noise_scale", "noise_scale_low", "noise_scale_high", "critical_batch", "suggested_batch"),
    *("expert_imbalance", "dropped_tokens"),
)


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one step, over all ranks."""

    step: int  # steps done, this one included
    steps: int  # steps of the whole training
    loss: float  # nats per token, the mean over the global batch
    learning_rate: float  # of this step
    gradient_norm: float | None  # before clipping; None without clipping
    tokens_per_second: float  # of all ranks, since the last record
    peak_memory_bytes: tuple[int, ...]  # the most memory of each rank so far
    seconds_left: float  # until the last step, at the speed of this run so far
    mfu: float | None = None  # the part of the devices' peak, by `mfu.py`; None where that is not known
    loss_scale: float | None = None  # with --precision fp16, that of the next step
    skipped_steps: int | None = None  # with it, how many were skipped since this run began
    gain: float | None = None  # with --adascale, steps of the smaller batch that this one was worth
    useful_steps: float | None = None  # with it, the sum of all gains
    # With it, that of the gradient, in sequences; None, as are those below, where it is not known.
    noise_scale: float | None = None
    noise_scale_low: float | None = None  # the lower end of its interval of 95 %
    noise_scale_high: float | None = None  # the upper one, if it is finite
    critical_batch: int | None = None  # sequences in a batch above which more of them stop to pay
    # Sequences in the batch with which the training would go forward fastest, if that is known.
    suggested_batch: int | None = None
    # With --experts, since the last record: tokens of the busiest expert over the mean, in the layer with the most.
    expert_imbalance: float | None = None
    dropped_tokens: float | None = None  # with it, the part of the tokens' choices for which an expert had no room


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation of the held-out text."""

    step: int  # steps done
    held_out_bits_per_byte: float  # mean over the held-out windows
    held_out_loss: float  # the same in nats per token, whose exponential is the perplexity


class Reporter:
    """Receives what happens in a training, and reports nothing itself: the one of all ranks but 0."""

    def note(self, text: str) -> None:
        """A line for people."""

    def advance(self, step: int) -> None:
        """Called after every step."""

    def step(self, record: StepRecord) -> None:
        """Called every `log_every` steps."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Called after an evaluation."""

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        """Called at the end with the summary, as lines for people and as JSON."""

    def close(self) -> None:
        """Called last, after an error as well."""


class PlainReporter(Reporter):
    """Prints one line per record."""

    def __init__(self, output: Output | None = None) -> None:
        self._output = output or Output()

    def note(self, text: str) -> None:
        print(text, file=self._output, flush=True)

    def step(self, record: StepRecord) -> None:
        self.note(f"step {record.step}/{record.steps}  {_format_step(record)}")

    def evaluation(self, record: EvaluationRecord) -> None:
        self.note(f"step {record.step}  held out {record.held_out_bits_per_byte:.3f} bits per byte")

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        self.note("\n".join(["", *lines]))

    def close(self) -> None:
        self._output.end()


class JsonReporter(Reporter):
    """Prints one JSON object per line, each with an "event"."""

    def __init__(self, output: Output | None = None) -> None:
        self._output = output or Output()

    def note(self, text: str) -> None:
        self._print("note", {"text": text})

    def step(self, record: StepRecord) -> None:
        self._print("step", asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._print("evaluation", asdict(record))

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        self._print("end", facts)

    def close(self) -> None:
        self._output.end()

    def _print(self, event: str, facts: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **facts}), file=self._output, flush=True)


class ProgressBarReporter(Reporter):
    """A progress bar on a terminal, with notes and evaluations above it."""

    def __init__(self, steps: int, first_step: int, console: Console | None = None) -> None:
        self._output = Output()
        stream: Any = self._output
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console or Console(highlight=False, file=stream),
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step)
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def step(self, record: StepRecord) -> None:
        self._progress.update(self._task, description=_format_step(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.note(f"step {record.step}: held out {record.held_out_bits_per_byte:.3f} bits per byte")

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        self._progress.stop()
        for line in lines:
            self.note(line)

    def close(self) -> None:
        self._progress.stop()
        self._output.end()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the entries, oldest first; without lines that are none, as a last one that a killed run has begun."""
    return _read_entries(path)[0]


def _read_entries(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The entries of a file, and how many other lines it has."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.exists() else []
    entries = []
    for line in lines:
        with suppress(ValueError):  # It is no JSON, or no text.
            entry = json.loads(line)
            if isinstance(entry, dict) and type(entry.get("step")) is int:
                entries.append(entry)
    return entries, len(lines) - len(entries)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the path of a file to write; it takes the place of `path` at the end, and after an OSError is gone."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def begin_metrics(path: Path, first_step: int) -> None:
    """Writes the file of a run that begins after `first_step` steps, without later entries; atomically.

    Warns of lines that are no entries, which it leaves out.
    """
    entries, num_others = _read_entries(path)
    if num_others:
        warnings.warn(
            f"{path}: left out {num_others} lines that are no entries, as of a run that was killed", stacklevel=2
        )
    earlier_entries = [entry for entry in entries if entry["step"] <= first_step]
    with replacing(path) as partial:
        partial.write_text(" " * _ROOM_BYTES)
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in earlier_entries))


class MetricsReporter(Reporter):
    """Appends records to `metrics.jsonl`, each once; calls `tell` once if it cannot, and tries again at the next."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._failed = self._incomplete = False
        self._written = {_entry_key(entry) for entry in read_metrics(path)}

    def step(self, record: StepRecord) -> None:
        self._append(asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._append(asdict(record))

    def _append(self, entry: Mapping[str, Any]) -> None:
        if _entry_key(entry) in self._written:  # by the run that this one resumes
            return
        try:
            with self._path.open("a") as file:
                # An incomplete line must not spoil the next one.
                file.write(("\n" if self._incomplete else "") + json.dumps(entry) + "\n")
        except OSError as error:
            self._incomplete = True
            if not self._failed:
                self._failed = True
                self._tell(f"cannot write {self._path}: {reason_of(error)}; training goes on")
        else:
            self._incomplete = False
            self._written.add(_entry_key(entry))


def _entry_key(entry: Mapping[str, Any]) -> tuple[int, bool]:
    """The step, and whether it is an evaluation."""
    return entry["step"], "held_out_bits_per_byte" in entry


class TensorBoardReporter(Reporter):
    """Scalars for TensorBoard; what a run that this one resumes has logged of later steps is passed over."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency, absent on most machines

        self._writer = SummaryWriter(folder, purge_step=first_step + 1)

    def step(self, record: StepRecord) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class WandbReporter(Reporter):
    """Scalars for Weights & Biases, one run there for each folder; the summary at the end."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]  # an optional dependency

        run_folder = folder / "wandb-run"  # The id, by which a resumed run goes on in the same one there.
        if not run_folder.exists():
            run_folder.write_text(secrets.token_hex(8))
        about: dict[str, Any] = {"name": folder.name, "config": dict(config)}
        self._run: Any = wandb.init(dir=str(folder), id=run_folder.read_text(), resume="allow", **about)

    def step(self, record: StepRecord) -> None:
        self._run.log(_scalars(record), step=record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._run.log(_scalars(record), step=record.step)

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        self._run.summary.update(facts)

    def close(self) -> None:
        self._run.finish()


def _scalars(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    names = _SCALARS if isinstance(record, StepRecord) else ("held_out_bits_per_byte", "held_out_loss")
    return {name: value for name in names if (value := getattr(record, name)) is not None}


class MultiReporter(Reporter):
    """Calls several reporters."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def note(self, text: str) -> None:
        for reporter in self._reporters:
            reporter.note(text)

    def advance(self, step: int) -> None:
        for reporter in self._reporters:
            reporter.advance(step)

    def step(self, record: StepRecord) -> None:
        for reporter in self._reporters:
            reporter.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        for reporter in self._reporters:
            reporter.evaluation(record)

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.end(lines, facts)

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()


def uses_progress_bar(log_format: str) -> bool:
    """Whether the format is "rich", or "auto" on a terminal."""
    return log_format == "rich" or (log_format == "auto" and sys.stdout is not None and sys.stdout.isatty())


def make_reporter(options: Options, first_step: int, folder: Path) -> Reporter:
    """Returns the reporter of rank 0: the screen, the metrics file, and what `--log-to` names.

    An InputError where one of those cannot begin, as without a key.
    """
    screen: Reporter
    if uses_progress_bar(options.run.log_format):
        screen = ProgressBarReporter(options.optimizer.steps, first_step)
    else:
        screen = JsonReporter() if options.run.log_format == "json" else PlainReporter()
    reporters: list[Reporter] = [screen, MetricsReporter(folder / "metrics.jsonl", screen.note)]
    for name in dict.fromkeys(options.run.log_to):
        try:
            if name == "tensorboard":
                reporters.append(TensorBoardReporter(folder / "tensorboard", first_step))
            else:
                reporters.append(WandbReporter(folder, json.loads(json.dumps(asdict(options), default=str))))
        except Exception as error:  # Each library has its own.
            MultiReporter(*reporters).close()
            raise InputError(f"--log-to {name}: cannot begin: {type(error).__name__}: {error}") from error
    return MultiReporter(*reporters)


def _format_step(record: StepRecord) -> str:
    minutes, seconds = divmod(round(record.seconds_left), 60)
    peak = format_bytes(max(record.peak_memory_bytes))
    gain = "" if record.gain is None else f"gain {record.gain:.2f}  useful {record.useful_steps:.0f}  "
    if record.critical_batch is not None:
        high = "inf" if record.noise_scale_high is None else f"{record.noise_scale_high:.0f}"
        gain += f"critical batch {record.critical_batch} ({record.noise_scale_low:.0f} to {high})  "
    if record.suggested_batch is not None:
        gain += f"suggested {record.suggested_batch}  "
    if record.expert_imbalance is not None:
        gain += f"imbalance {record.expert_imbalance:.2f}  "
    gain += f"dropped {record.dropped_tokens:.1%}  " if record.dropped_tokens else ""
    used = "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    return (
        f"loss {record.loss:.3f}  {gain}{record.tokens_per_second:,.0f} tokens/s  {used}peak {peak}/rank  "
        f"{minutes}:{seconds:02d} left"
    )


ProgressCallback = Callable[[int, int, str], None]
"""Called after each unit with the number of units done, the number of all units, and the unit's name."""


@contextmanager
def initialization_bar(*, shown: bool = True, console: Console | None = None) -> Iterator[ProgressCallback]:
    """Shows how far the units of a model have come; gives what `fully_shard_modules` takes as `progress`.

        with torch.device("meta"):
            model = GPT(config)
        with initialization_bar(shown=rank == 0) as progress:
            fully_shard_modules(model, class_policy(Block), progress=progress)

    Args:
        shown: Whether this rank shows anything; one of them is enough.
        console: Where; None is standard error, so that what a program prints stays its own. If it is not a terminal,
            one line stands there in the end.

    Examples:
        >>> import torch
        >>> from scale_fsdp import class_policy, fully_shard_modules
        >>> from scale_train import initialization_bar
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> with initialization_bar(shown=False) as progress:  # shown=rank == 0
        ...     model = fully_shard_modules(model, class_policy(torch.nn.Linear), progress=progress)

    See also: [the guide to the training program](../guides/scale-train.md).
    """
    if not shown:
        yield lambda done, total, name: None
        return
    columns = (TextColumn("initializing"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    where = console or Console(stderr=True, highlight=False)
    bar = Progress(*columns, TextColumn("{task.description}", markup=False), console=where)
    task = bar.add_task("", total=None)

    def update(done: int, total: int, name: str) -> None:
        bar.update(task, completed=done, total=total, description=name or "the rest")

    with bar:
        yield update


@contextmanager
def loading_bar(*, shown: bool = True, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Shows how many bytes of a folder of weights this rank has read; gives what `load_pretrained` takes as `progress`.

        with loading_bar(shown=rank == 0) as progress:
            load_pretrained(model, folder, progress=progress)

    Args:
        shown: Whether this rank shows anything; one of them is enough.
        console: As in `initialization_bar`.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import load_pretrained, save_pretrained
        >>> from scale_train import loading_bar
        >>> model = torch.nn.Linear(4, 3)
        >>> folder = save_pretrained(model, tempfile.mkdtemp())
        >>> with loading_bar(shown=False) as progress:
        ...     load_pretrained(model, folder, progress=progress)

    See also: [the guide to the training program](../guides/scale-train.md).
    """
    if not shown:
        yield lambda done, total: None
        return
    columns = (TextColumn("loading"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True, highlight=False)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
