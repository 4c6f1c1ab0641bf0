"""What a person, or a program, sees of a training while it runs.

Rank 0 speaks; the others are silent. On a terminal that is a bar; in a log file plain lines; for machines one JSON
object per line. All say the same things, and `Metrics` keeps them on disk.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scale_train.memory import in_words
from scale_train.reporting.metrics import MetricsFile

_SCALARS = (
    *("loss", "learning_rate", "tokens_per_second", "gain", "useful_steps"),
    *("noise_scale", "noise_scale_low", "noise_scale_high", "critical_batch", "suggested_batch"),
)


@dataclass(frozen=True)
class StepRecord:
    """One step, as all ranks together saw it.

    Attributes:
        step: Steps done, this one included.
        steps: Steps of the whole training.
        loss: Nats per token, the mean over the global batch.
        learning_rate: Of this step.
        gradient_norm: Before clipping; None without clipping.
        tokens_per_second: Of all ranks, since the last record.
        peak_memory_bytes: The most memory of each rank so far.
        seconds_left: Until the last step, at the speed of this run so far.
        gain: With --adascale, steps of the smaller batch that this one was worth.
        useful_steps: With it, the sum of all gains.
        noise_scale: With it, that of the gradient, in sequences; None, as are those below, where it is not known.
        noise_scale_low: The lower end of its interval of 95 %.
        noise_scale_high: The upper one, if it is finite.
        critical_batch: Sequences in a batch above which more of them stop to pay.
        suggested_batch: Sequences in the batch with which the training would go forward fastest, if that is known.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens_per_second: float
    peak_memory_bytes: tuple[int, ...]
    seconds_left: float
    gain: float | None = None
    useful_steps: float | None = None
    noise_scale: float | None = None
    noise_scale_low: float | None = None
    noise_scale_high: float | None = None
    critical_batch: int | None = None
    suggested_batch: int | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """The held-out text, judged after a step.

    Attributes:
        step: Steps done.
        held_out_bits_per_byte: Mean over the held-out windows.
    """

    step: int
    held_out_bits_per_byte: float


class Reporter(Protocol):
    """Anyone who wants to hear how the training goes."""

    def note(self, text: str) -> None:
        """Something happened that people should know."""

    def advance(self, step: int) -> None:
        """A step is done; called for every one."""

    def step(self, record: StepRecord) -> None:
        """The numbers of a step; called for some."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """The held-out text was judged."""

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        """The training is over: its report for people, and the same for machines."""

    def close(self) -> None:
        """Nothing more will come, whether the training ended or not."""


class Silent:
    """Hears everything and says nothing: the other ranks."""

    def note(self, text: str) -> None: ...

    def advance(self, step: int) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Plain(Silent):
    """One line per record."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def step(self, record: StepRecord) -> None:
        print(f"step {record.step}/{record.steps}  {_words(record)}", flush=True)

    def evaluation(self, record: EvaluationRecord) -> None:
        print(f"step {record.step}  held out {record.held_out_bits_per_byte:.3f} bits per byte", flush=True)

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        print("\n".join(["", *lines]), flush=True)


class Json(Silent):
    """One JSON object per line, each with an "event"."""

    def note(self, text: str) -> None:
        self._print("note", {"text": text})

    def step(self, record: StepRecord) -> None:
        self._print("step", asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._print("evaluation", asdict(record))

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        self._print("end", facts)

    def _print(self, event: str, facts: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **facts}), flush=True)


class Bar(Silent):
    """A progress bar on a terminal; notes and evaluations scroll by above it."""

    def __init__(self, steps: int, first_step: int, console: Console | None = None) -> None:
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console or Console(highlight=False),
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step)
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def step(self, record: StepRecord) -> None:
        self._progress.update(self._task, description=_words(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.note(f"step {record.step}: held out {record.held_out_bits_per_byte:.3f} bits per byte")

    def end(self, lines: list[str], facts: Mapping[str, Any]) -> None:
        self._progress.stop()
        for line in lines:
            self.note(line)

    def close(self) -> None:
        self._progress.stop()


class Metrics(Silent):
    """Keeps the records in `metrics.jsonl`."""

    def __init__(self, file: MetricsFile) -> None:
        self._file = file

    def step(self, record: StepRecord) -> None:
        self._file.append(asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._file.append(asdict(record))


class TensorBoard(Silent):
    """Scalars for TensorBoard; only where it is installed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency, absent on most machines

        self._writer = SummaryWriter(folder)

    @staticmethod
    def is_installed() -> bool:
        """Whether there is a TensorBoard to write for."""
        return importlib.util.find_spec("tensorboard") is not None

    def step(self, record: StepRecord) -> None:
        for name in _SCALARS:
            if (value := getattr(record, name)) is not None:
                self._writer.add_scalar(name, value, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._writer.add_scalar("held_out_bits_per_byte", record.held_out_bits_per_byte, record.step)

    def close(self) -> None:
        self._writer.close()


class Several:
    """Passes everything on to several reporters."""

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


def on_screen(log_format: str) -> bool:
    """Whether a person looks at bars: in the format "rich", and in "auto" on a terminal."""
    return log_format == "rich" or (log_format == "auto" and sys.stdout.isatty())


def make_reporter(log_format: str, steps: int, first_step: int, folder: Path) -> Reporter:
    """What rank 0 reports to: the screen in the format asked for, the metrics file, and TensorBoard if installed."""
    screen: Reporter
    if on_screen(log_format):
        screen = Bar(steps, first_step)
    else:
        screen = Json() if log_format == "json" else Plain()
    kept: list[Reporter] = [Metrics(MetricsFile(folder / "metrics.jsonl", screen.note))]
    if TensorBoard.is_installed():
        kept.append(TensorBoard(folder / "tensorboard"))
    return Several(screen, *kept)


def _words(record: StepRecord) -> str:
    minutes, seconds = divmod(round(record.seconds_left), 60)
    peak = in_words(max(record.peak_memory_bytes))
    worth = "" if record.gain is None else f"gain {record.gain:.2f}  useful {record.useful_steps:.0f}  "
    if record.critical_batch is not None:
        high = "inf" if record.noise_scale_high is None else f"{record.noise_scale_high:.0f}"
        worth += f"critical batch {record.critical_batch} ({record.noise_scale_low:.0f} to {high})  "
    if record.suggested_batch is not None:
        worth += f"suggested {record.suggested_batch}  "
    return (
        f"loss {record.loss:.3f}  {worth}{record.tokens_per_second:,.0f} tokens/s  peak {peak}/rank  "
        f"{minutes}:{seconds:02d} left"
    )


# A bar for a model that is built on the meta device and given values unit by unit.
#
# Thirteen billion parameters take minutes until the first step. What passes meanwhile is units: each one is given
# memory and values, is sharded and freed, and the bar moves on.

Told = Callable[[int, int, str], None]
"""Called after each unit with the number of units done, that of all, and the unit's name."""


@contextmanager
def initialisation_bar(*, shown: bool = True, console: Console | None = None) -> Iterator[Told]:
    """Shows how far the units of a model have come; gives what `fully_shard_modules` takes as `progress`.

        with torch.device("meta"):
            model = GPT(config)
        with initialisation_bar(shown=rank == 0) as progress:
            fully_shard_modules(model, class_policy(Block), progress=progress)

    Args:
        shown: Whether this rank shows anything; one of them is enough.
        console: Where; None is standard error, so that what a program prints stays its own. Where that is no terminal,
            one line stands there in the end.
    """
    if not shown:
        yield lambda done, total, name: None
        return
    bar = Progress(
        TextColumn("initialising"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console or Console(stderr=True, highlight=False),
    )
    task = bar.add_task("", total=None)

    def tell(done: int, total: int, name: str) -> None:
        bar.update(task, completed=done, total=total, description=name or "the rest")

    with bar:
        yield tell
