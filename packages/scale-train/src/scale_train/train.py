"""`scale-train lm` on the ranks of a group, from reading the text to the summary."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from scale_core.comm.collectives import exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_core.consistency.contract import ContractError, ScaleDistributedError
from scale_train.checkpoint import CHECKPOINTS, METRICS, RunPaths, load, resolve_paths, save
from scale_train.config.options import Options
from scale_train.config.validate import check_options, options_without_effect
from scale_train.data.text import SEPARATOR, Text, check_length, read_text
from scale_train.errors import InputError, RanksLost, reason_of
from scale_train.memory import held_bytes, peak_bytes, replicated_bytes
from scale_train.model import GPT, generate, num_parameters
from scale_train.reporting.metrics import begin_metrics
from scale_train.reporting.plot import plot_loss
from scale_train.reporting.reporters import make_reporter
from scale_train.reporting.summary import RunSummary, readable
from scale_train.state import TrainState, build_state
from scale_train.trainer import train

GENERATION_TEMPERATURE = 0.8


def train_language_model(options: Options, group: Group) -> RunSummary:
    """Trains a language model on the ranks of a group; raises the errors of `scale_train.errors`."""
    check_options(options, group.size)
    text = _read_text_on_all_ranks(options, group)
    paths = _resolve_paths_on_rank0(options, group)
    training = build_state(options, text, group)
    if paths.resume_from is not None:
        load(training, paths.resume_from)
    if group.rank == 0:
        training.reporter = make_reporter(options.run.log_format, options.optimizer.steps, training.step, paths.folder)
    try:
        _log_start(training, paths)
        held_out = train(training, lambda state: save(state, paths.folder / CHECKPOINTS))
        summary = summarize(training, held_out, paths.folder)
        training.reporter.end(summary.lines(), summary.as_dict())
    except ContractError:
        raise  # the ranks do different things, a bug of the program: with its traceback
    except (ScaleDistributedError, TransferError) as error:
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
    held = held_bytes(params, training.engine.params_with_gradients(), training.optimizer)
    rows = exchange([held, peak_bytes(training.engine.device), replicated_bytes(params, training.optimizer)], group)
    replicated, pipeline = rows[group.rank][2], training.engine.pipeline
    if pipeline is not None:  # Each stage of a pipeline has its own parameters alone; elsewhere a rank has all.
        replicated = sum(row[2] for row in rows) // pipeline.num_replicas
    prompt = os.fsencode(options.run.prompt) or SEPARATOR
    sample = b""
    if options.run.sample_length:
        tokens = torch.tensor(list(prompt), device=training.engine.device)
        with training.engine.autocast():
            written = generate(
                training.engine.raw_model,
                tokens,
                options.run.sample_length,
                context=options.data.sequence,
                seed=options.run.seed,
                temperature=GENERATION_TEMPERATURE,
            )
        sample = bytes(written.tolist())
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
        sample=readable(sample),
        checkpoint=str(training.checkpoint),
        plot=plot_path,
    )


def _log_start(training: TrainState, paths: RunPaths) -> None:
    """Reports text, model and run."""
    options, group, reporter = training.options, training.group, training.reporter
    config, parallel = training.engine.raw_model.config, options.parallel
    with torch.device("meta"):
        count = num_parameters(GPT(config))
    reporter.note(f"text   {training.text.describe()}")
    reporter.note(
        f"model  {options.model.size}: {config.layers} layers x {config.width}, {count / 1e6:.2f} M parameters, "
        f"{parallel.precision}"
    )
    reporter.note(
        f"run    {parallel.parallel} on {group.size} rank{'s' if group.size > 1 else ''} "
        f"({training.engine.device.type}), into {paths.folder}: "
        f"{options.data.batch} x {options.data.sequence} tokens a step, {options.optimizer.steps} steps"
    )
    for line in options_without_effect(options):
        reporter.note(f"warning: {line}")
    if paths.resume_from is not None:
        reporter.note(f"resumed from {paths.resume_from}, after step {training.step}")


def _read_text_on_all_ranks(options: Options, group: Group) -> Text:
    """Reads the text on all ranks; an InputError on all where one cannot, or reads another text."""
    text, problem = None, ""
    try:
        text = read_text(options.data.text)
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


def _resolve_paths_on_rank0(options: Options, group: Group) -> RunPaths:
    """Rank 0 decides for all: file systems do not look the same from everywhere at one moment."""
    found = problem = point = ""
    if group.rank == 0:
        try:
            paths = resolve_paths(options.run)
            found, point = str(paths.folder), str(paths.resume_from or "")
            begin_metrics(paths.folder / METRICS, paths.step)
        except InputError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write {Path(found) / METRICS}: {reason_of(error)}"
    problem, found, point = (exchange_text(each, group)[0] for each in (problem, found, point))
    if problem:
        raise InputError(problem)
    return RunPaths(Path(found), Path(point) if point else None)
