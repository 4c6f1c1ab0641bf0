"""`scale-train lm` on the ranks of a group, from reading the text to the report."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from scale_core.comm.control_plane import exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_core.consistency.contract import ContractError, ScaleDistributedError
from scale_train.checkpoint import CHECKPOINTS, METRICS, Place, choose_place, load, save
from scale_train.config.options import Options
from scale_train.config.validate import check, without_effect
from scale_train.data.text import SEPARATOR, Text, check_length, read_text
from scale_train.errors import InputError, RanksLost, reason_of
from scale_train.memory import held_bytes, peak_bytes, replicated_bytes
from scale_train.model import GPT, generate, num_parameters
from scale_train.reporting.metrics import begin_metrics
from scale_train.reporting.plot import plot_loss
from scale_train.reporting.reporters import make_reporter
from scale_train.reporting.summary import Report, readable
from scale_train.state import Training, build
from scale_train.trainer import train

GENERATION_TEMPERATURE = 0.8


def language_model(options: Options, group: Group) -> Report:
    """Trains a language model on the ranks of a group; returns what it came to.

    Raises:
        InputError: What was asked for cannot be done, or the disk is full.
        TrainingDiverged: The loss became no number.
        Interrupted: A signal asked to stop; the state was saved.
        RanksLost: Another rank ended, or cannot be reached.
    """
    check(options, group.size)
    text = _read_together(options, group)
    place = _agree_on_place(options, group)
    training = build(options, text, group)
    if place.point is not None:
        load(training, place.point)
    if group.rank == 0:
        training.reporter = make_reporter(options.run.log_format, options.optimizer.steps, training.step, place.folder)
    try:
        _introduce(training, place)
        held_out = train(training, lambda now: save(now, place.folder / CHECKPOINTS))
        report = conclude(training, held_out, place.folder)
        training.reporter.end(report.lines(), report.facts())
    except ContractError:
        raise  # the ranks are there and do different things: a fault of the program, to be seen whole
    except (ScaleDistributedError, TransferError) as error:
        cause = str(error).partition("\n")[0]
        raise RanksLost(f"lost the other ranks after step {training.step} ({cause}); {training.way_on()}") from error
    finally:
        training.reporter.close()
    return report


def conclude(training: Training, held_out: float, folder: Path) -> Report:
    """The end of a training: a sample, the picture, and the memory of all ranks."""
    options, group = training.options, training.group
    params = training.engine.params()
    held = held_bytes(params, training.engine.with_gradients(), training.optimizer)
    rows = exchange([held, peak_bytes(training.engine.device), replicated_bytes(params, training.optimizer)], group)
    replicated, pipeline = rows[group.rank][2], training.engine.pipeline
    if pipeline is not None:  # Each stage of a pipeline knows its own parameters alone; elsewhere a rank knows all.
        replicated = sum(row[2] for row in rows) // pipeline.num_replicas
    prompt = os.fsencode(options.run.prompt) or SEPARATOR
    sample = b""
    if options.run.sample_length:
        tokens = torch.tensor(list(prompt), device=training.engine.device)
        with training.engine.computing():
            written = generate(
                training.engine.plain,
                tokens,
                options.run.sample_length,
                context=options.data.sequence,
                seed=options.run.seed,
                temperature=GENERATION_TEMPERATURE,
            )
        sample = bytes(written.tolist())
    picture = str(folder / "loss.png")
    if group.rank == 0:
        try:
            plot_loss(folder / METRICS, Path(picture))
        except OSError as error:
            training.reporter.note(f"cannot write {picture}: {reason_of(error)}; the training itself is saved")
            picture = ""
    return Report(
        steps=training.step,
        held_out_bits_per_byte=held_out,
        parallel=options.parallel.parallel,
        held_memory_bytes=tuple(row[0] for row in rows),
        ddp_memory_bytes=replicated,
        peak_memory_bytes=tuple(row[1] for row in rows),
        device=training.engine.device.type,
        sample=readable(sample),
        checkpoint=str(training.checkpoint),
        plot=picture,
    )


def _introduce(training: Training, place: Place) -> None:
    """Says what is about to happen."""
    options, group, reporter = training.options, training.group, training.reporter
    config, parallel = training.engine.plain.config, options.parallel
    with torch.device("meta"):
        count = num_parameters(GPT(config))
    reporter.note(f"text   {training.text.describe()}")
    reporter.note(
        f"model  {options.model.size}: {config.layers} layers x {config.width}, {count / 1e6:.2f} M parameters, "
        f"{parallel.precision}"
    )
    reporter.note(
        f"run    {parallel.parallel} on {group.size} rank{'s' if group.size > 1 else ''} "
        f"({training.engine.device.type}), into {place.folder}: "
        f"{options.data.batch} x {options.data.sequence} tokens a step, {options.optimizer.steps} steps"
    )
    for line in without_effect(options):
        reporter.note(f"warning: {line}")
    if place.point is not None:
        reporter.note(f"resumed from {place.point}, after step {training.step}")


def _read_together(options: Options, group: Group) -> Text:
    """The text, if all ranks can read it and it is the same; otherwise all say what one of them found."""
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


def _agree_on_place(options: Options, group: Group) -> Place:
    """Rank 0 looks and decides, because file systems do not look the same from everywhere at one moment."""
    found = problem = point = ""
    if group.rank == 0:
        try:
            place = choose_place(options.run)
            found, point = str(place.folder), str(place.point or "")
            begin_metrics(place.folder / METRICS, place.step)
        except InputError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write {Path(found) / METRICS}: {reason_of(error)}"
    problem, found, point = (exchange_text(words, group)[0] for words in (problem, found, point))
    if problem:
        raise InputError(problem)
    return Place(Path(found), Path(point) if point else None)
