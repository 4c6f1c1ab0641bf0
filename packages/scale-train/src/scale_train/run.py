"""`scale-train lm` on the ranks of a group, from reading the text to the report."""

from __future__ import annotations

from pathlib import Path

import torch

from scale_core.collectives import exchange, exchange_text
from scale_core.group import Group
from scale_core.shard import full_shape
from scale_train.checkpoint import CHECKPOINTS, METRICS, Place, choose_place, load, save
from scale_train.errors import InputError
from scale_train.loop import train
from scale_train.memory import peak_bytes
from scale_train.model import generate
from scale_train.options import Options, check
from scale_train.plot import plot_loss
from scale_train.progress import make_reporter
from scale_train.report import Report, readable
from scale_train.text import SEPARATOR, Text, check_length, read_text
from scale_train.training import Training, build

GENERATION_TEMPERATURE = 0.8


def language_model(options: Options, group: Group) -> Report:
    """Trains a language model on the ranks of a group; returns what it came to.

    Raises:
        InputError: What was asked for cannot be done, or the disk is full.
        TrainingDiverged: The loss became no number.
        Interrupted: A signal asked to stop; the state was saved.
    """
    check(options, group.size)
    text = read_text(options.data.text)
    check_length(text, options.data.sequence)
    _check_same_text(text, group)
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
    finally:
        training.reporter.close()
    return report


def conclude(training: Training, held_out: float, folder: Path) -> Report:
    """The end of a training: a sample, the picture, and the memory of all ranks."""
    options, group = training.options, training.group
    held, replicated = training.memory
    rows = exchange([held, peak_bytes(training.engine.device)], group)
    prompt = options.run.prompt.encode() or SEPARATOR
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
    picture = folder / "loss.png"
    if group.rank == 0:
        plot_loss(folder / METRICS, picture)
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
        plot=str(picture),
    )


def _introduce(training: Training, place: Place) -> None:
    """Says what is about to happen."""
    options, group, reporter = training.options, training.group, training.reporter
    config, parallel = training.engine.plain.config, options.parallel
    count = sum(full_shape(param).numel() for param in training.engine.plain.parameters())
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
    if place.point is not None:
        reporter.note(f"resumed from {place.point}, after step {training.step}")


def _check_same_text(text: Text, group: Group) -> None:
    prints = exchange_text(text.fingerprint(), group)
    for rank, other in enumerate(prints):
        if other != prints[0]:
            raise InputError(
                f"--text {text.source}: rank {rank} reads another text than rank 0; every machine needs the same files"
            )


def _agree_on_place(options: Options, group: Group) -> Place:
    """Rank 0 looks and decides, because file systems do not look the same from everywhere at one moment."""
    found = problem = point = ""
    if group.rank == 0:
        try:
            place = choose_place(options.run)
            found, point = str(place.folder), str(place.point or "")
        except InputError as error:
            problem = str(error)
    problem, found, point = (exchange_text(words, group)[0] for words in (problem, found, point))
    if problem:
        raise InputError(problem)
    return Place(Path(found), Path(point) if point else None)
