"""`scale-train lm` on the ranks of a group, from reading the text to the summary."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from scale_core.comm.collectives import exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.errors import ContractError, ScaleDistributedError
from scale_train.configuration.derived import model_shape
from scale_train.configuration.problems import OptionsError
from scale_train.configuration.resolve import check_options, options_without_effect
from scale_train.configuration.toml_file import to_toml
from scale_train.data.text import Text, check_length, read_data
from scale_train.data.tokenizer import BYTE, tokenizer_of
from scale_train.errors import InputError, RanksLost, reason_of
from scale_train.huggingface.model import export_model
from scale_train.model.gpt import generate
from scale_train.options import Options
from scale_train.training.checkpoint import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    RunPaths,
    check_export,
    load,
    refusing_lost_saves,
    resolve_paths,
    save,
    torchrun_run,
)
from scale_train.training.memory import (
    count_active_parameters,
    count_parameters,
    format_bytes,
    held_bytes,
    peak_bytes,
    replicated_bytes,
)
from scale_train.training.reports.plot import plot_loss
from scale_train.training.reports.reporters import begin_metrics, make_reporter
from scale_train.training.run_lock import RunLock
from scale_train.training.state import TrainState, build_state
from scale_train.training.trainer import train

GENERATION_TEMPERATURE = 0.8


@dataclass(frozen=True)
class RunSummary:
    """Results of a training.

        summary = train(Options())
        print(summary.steps, summary.held_out_bits_per_byte)

    See also: [the guide to the training program](../guides/scale-train.md).
    """

    steps: int  # steps done
    held_out_bits_per_byte: float  # of the held-out text
    parallel: str  # "fsdp", "sharded-ddp", "oss", "ddp" or "none"
    held_memory_bytes: tuple[int, ...]  # parameters, gradients and optimizer state of each rank
    ddp_memory_bytes: int  # the same for one rank of DDP, which holds all of it
    peak_memory_bytes: tuple[int, ...]  # the most memory that each rank had
    device: str  # "cpu" or "cuda"
    sample: str  # text that the model wrote; empty if none was asked for
    checkpoint: str  # the last one
    plot: str  # the picture; empty if it could not be written
    export: str = ""  # the folder for other programs; empty without --export

    def lines(self) -> list[str]:
        measured = "tensors on the GPU" if self.device == "cuda" else "whole process, Python and torch included"
        lines = [
            f"held-out loss  {self.held_out_bits_per_byte:.3f} bits per byte after {self.steps} steps",
            "",
            f"memory         rank  parameters + gradients + optimizer  peak ({measured})",
        ]
        for rank, (held_memory, peak) in enumerate(zip(self.held_memory_bytes, self.peak_memory_bytes, strict=True)):
            lines.append(f"               {rank:>4}  {format_bytes(held_memory):>34}  {format_bytes(peak)}")
        lines.append(f"               DDP   {format_bytes(self.ddp_memory_bytes):>34}  would be needed on each rank")
        if self.sample:
            lines += ["", "a sample of generated text:", *(f"  | {line}" for line in self.sample.splitlines())]
        lines += ["", f"checkpoint     {self.checkpoint}"]
        lines += [f"export         {self.export}"] if self.export else []
        return [*lines, f"plot           {self.plot}"] if self.plot else lines


def train_language_model(options: Options, group: Group) -> RunSummary:
    """Trains a language model on the ranks of a group; raises the errors of `scale_train.errors`."""
    check_options(options, group.size)
    text = _read_text_on_all_ranks(options, group)
    lock = RunLock()
    try:
        paths = _resolve_paths_on_rank0(options, group, lock)
        return _train_in_folder(options, text, paths, group)
    finally:
        lock.release()


def _train_in_folder(options: Options, text: Text, paths: RunPaths, group: Group) -> RunSummary:
    """Trains in a folder that is locked."""
    training = build_state(options, text, group)
    if paths.resume_from is not None:
        load(training, paths.resume_from)
    _begin_reports(training, paths)
    try:
        _log_start(training, paths)
        checkpoints = paths.folder / CHECKPOINTS
        with refusing_lost_saves(training, checkpoints):
            held_out = train(training, lambda state: save(state, checkpoints))
        summary = summarize(training, held_out, paths.folder)
        if options.run.export is not None:
            tokenizer, source = training.text.tokenizer, options.model.model
            export_model(training.engine.raw_model, options.run.export, tokenizer, source, group)
        training.reporter.end(summary.lines(), asdict(summary))
    except ContractError:
        raise  # the ranks do different things, a bug of the program: with its traceback
    except ScaleDistributedError as error:
        cause = str(error).partition("\n")[0]
        raise RanksLost(
            f"lost the other ranks after step {training.step} ({cause}); {training.resume_hint()}"
        ) from error
    finally:
        training.reporter.close()
    return summary


def summarize(training: TrainState, held_out: float, folder: Path) -> RunSummary:
    """Returns the summary: a sample of text, the plot, and the memory of all ranks."""
    options, group = training.options, training.group
    params = training.engine.params()
    held_memory = held_bytes(params, training.engine.params_with_gradients(), training.optimizer)
    rows = exchange(
        [held_memory, peak_bytes(training.engine.device), replicated_bytes(params, training.optimizer)], group
    )
    replicated = rows[group.rank][2]
    if training.engine.pipeline is not None:  # Each of its stages has its own parameters; elsewhere a rank has all.
        replicated = sum(row[2] for row in rows) // training.engine.dims.size("batch", "tp")
    sample = ""
    if options.run.sample_length:
        tokenizer = training.text.tokenizer
        (prompt,) = tokenizer.encode([os.fsencode(options.run.prompt)])
        tokens = torch.tensor(prompt or tokenizer.separator or (0,), device=training.engine.device)
        with training.engine.autocast():
            written = generate(
                training.engine.raw_model,
                tokens,
                options.run.sample_length,
                context=options.data.sequence,
                seed=options.run.seed,
                temperature=GENERATION_TEMPERATURE,
            )
        sample = tokenizer.decode(written.tolist())
    plot_path = str(folder / "loss.png")
    if group.rank == 0:
        try:
            plot_loss(folder / METRICS, Path(plot_path))
        except OSError as error:
            training.reporter.note(f"cannot write {plot_path}: {reason_of(error)}; the training itself is saved")
            plot_path = ""
    return RunSummary(
        steps=training.step,
        held_out_bits_per_byte=held_out,
        parallel=options.parallel.parallel,
        held_memory_bytes=tuple(row[0] for row in rows),
        ddp_memory_bytes=replicated,
        peak_memory_bytes=tuple(row[1] for row in rows),
        device=training.engine.device.type,
        sample=sample,
        checkpoint=str(training.checkpoint),
        plot=plot_path,
        export=str(options.run.export or ""),
    )


def _begin_reports(training: TrainState, paths: RunPaths) -> None:
    """Makes the reporter of rank 0; an InputError on all ranks where that cannot be."""
    problem = ""
    if training.group.rank == 0:
        try:
            training.reporter = make_reporter(training.options, training.step, paths.folder)
        except InputError as error:
            problem = str(error)
    if problem := exchange_text(problem, training.group)[0]:
        raise InputError(problem)


def _log_start(training: TrainState, paths: RunPaths) -> None:
    """Reports text, model and run."""
    options, group, reporter = training.options, training.group, training.reporter
    parallel, shape, count = options.parallel, model_shape(options), count_parameters(options)
    active = f" ({count_active_parameters(options) / 1e6:.2f} M of a token)" if options.model.experts else ""
    reporter.note(f"text   {training.text.describe()}")
    reporter.note(
        f"model  {options.model.model or options.model.size}: {shape.layers} layers x {shape.width}, "
        f"{count / 1e6:.2f} M parameters{active}, {parallel.precision}"
    )
    reporter.note(
        f"run    {parallel.parallel} on {group.size} rank{'s' if group.size > 1 else ''} "
        f"({training.engine.device.type}), into {paths.folder}: {options.data.batch} x {options.data.sequence} tokens "
        f"a step, {options.optimizer.steps} steps"
    )
    for line in options_without_effect(options):
        reporter.note(f"warning: {line}")
    if paths.resume_from is not None:
        reporter.note(f"resumed from {paths.resume_from}, after step {training.step}")


def _read_text_on_all_ranks(options: Options, group: Group) -> Text:
    """Reads the text on all ranks; an InputError on all where one cannot, or reads another text."""
    text, problem = None, ""
    # What the first rank of a machine has tokenized the others find on its disk.
    turns = 1 if tokenizer_of(options) == BYTE else 2
    for turn in range(turns):
        if turn == min(int(os.environ.get("LOCAL_RANK", "0")), turns - 1):
            try:
                text = read_data(options)
                check_length(text, options.data.sequence)
            except InputError as error:
                problem = str(error)
        problem = next(filter(None, exchange_text(problem, group)), "")
    if problem or text is None:
        raise InputError(problem)
    prints = exchange_text(text.fingerprint(), group)
    for rank, other in enumerate(prints):
        if other != prints[0]:
            raise InputError(
                f"--text {text.source}: rank {rank} reads another text than rank 0; every machine needs the same files"
            )
    return text


def write_config(options: Options, num_ranks: int, path: Path) -> None:
    """Writes the file that repeats the run, in a new folder and, without torchrun, on as many ranks."""
    ranks = None if torchrun_run(options) else num_ranks
    reproducible = replace(
        options,
        parallel=replace(options.parallel, ranks=ranks),
        run=replace(options.run, out=None, resume=None, export=None),
    )
    with suppress(OptionsError):  # A text that is no Unicode can be in no such file.
        path.write_text(to_toml(reproducible), encoding="utf-8")


def _resolve_paths_on_rank0(options: Options, group: Group, lock: RunLock) -> RunPaths:
    """Rank 0 decides for all: file systems do not look the same from everywhere at one moment."""
    resumed = problem = point = ""
    if group.rank == 0:
        try:
            check_export(options.run.export)
            paths = resolve_paths(options.run, torchrun_run(options), lock)
            resumed, point = str(paths.folder), str(paths.resume_from or "")
            begin_metrics(paths.folder / METRICS, paths.step)
            write_config(options, group.size, paths.folder / CONFIG)
        except InputError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write into {resumed}: {reason_of(error)}"
    problem, resumed, point = (exchange_text(text, group)[0] for text in (problem, resumed, point))
    if problem:
        raise InputError(problem)
    return RunPaths(Path(resumed), Path(point) if point else None)
