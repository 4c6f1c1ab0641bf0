"""The training loop, as one reads it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator

import torch

from scale_core.comm.control_plane import exchange
from scale_train.data.sampler import slice_of_rank, windows_at
from scale_train.errors import Interrupted, TrainingDiverged
from scale_train.evaluate import bits_per_byte, held_out_starts
from scale_train.memory import peak_bytes, state_tensors
from scale_train.parallelize.adascale import worth_of
from scale_train.reporting.reporters import EvaluationRecord, StepRecord
from scale_train.signals import StopSignal
from scale_train.state import Clock, Training


def train(training: Training, save: Callable[[Training], object]) -> float:
    """Runs all steps that are left, and returns the held-out bits per byte after the last.

    Args:
        training: Where to begin.
        save: Called on all ranks, between two steps, every `save_every` steps, at the end, and before an interruption.

    Raises:
        Interrupted: A rank was asked to stop; the state was saved.
        TrainingDiverged: The loss or the weights are no finite numbers; such a state is never saved.
    """
    run = training.options.run
    training.clock = Clock()
    with StopSignal() as stop:
        while not training.is_over:
            one_step(training)
            done = training.step
            with training.clock.paused():
                if run.save_every and done % run.save_every == 0 and not training.is_over:
                    keep(training, save)
                if run.evaluate_every and done % run.evaluate_every == 0 and not training.is_over:
                    evaluate(training)
            _stop_if_asked(training, stop, save)
        keep(training, save)
        return evaluate(training)


def one_step(training: Training) -> None:
    """One optimizer step of all ranks, on one global batch."""
    options, optimizer, engine = training.options, training.optimizer, training.engine
    # Ranks that divide layers compute the same between these, and have to drop the same.
    seed_step(options.run.seed, training.step, engine.axes.data.rank)
    loss = forward_backward(training)
    norm = engine.clip(options.optimizer.clip) if options.optimizer.clip else None
    rate = training.schedule.apply(optimizer, training.position)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    training.loss, training.norm = loss, norm
    training.step += 1
    training.clock.steps += 1
    training.reporter.advance(training.position)
    if training.step % options.run.log_every == 0 or training.is_over:
        log_step(training, loss, rate, norm)


def forward_backward(training: Training) -> torch.Tensor:
    """Gradients of the global batch's mean loss; returns this rank's part of that loss, a scalar."""
    data, engine, group = training.options.data, training.engine, training.engine.axes.data
    if engine.pipeline is not None:
        replica, replicas = engine.pipeline.replica, engine.pipeline.num_replicas
        (starts,) = slice_of_rank(training.sampler.starts(data.batch), replica, replicas, 1)
        batch = windows_at(training.text.train, starts, data.sequence)
        with engine.computing():
            return engine.pipeline.step(batch.tokens, batch.targets)
    accumulate = training.options.parallel.accumulate
    micro_batches = slice_of_rank(training.sampler.starts(data.batch), group.rank, group.size, accumulate)
    total = torch.zeros((), device=engine.device)
    for index, starts in enumerate(micro_batches):
        if training.options.optimizer.adascale:
            training.pass_clock.begin(index)
        batch = windows_at(training.text.train, starts, data.sequence)
        with engine.syncing(last=index == accumulate - 1):
            with engine.computing():
                loss = engine.model(batch.tokens.to(engine.device), batch.targets.to(engine.device))
            (loss / accumulate).backward()
        total += loss.detach() / accumulate
    return total


def log_step(training: Training, loss: torch.Tensor, rate: float, norm: torch.Tensor | None) -> None:
    """Brings the ranks' losses and memory together and reports them.

    Raises:
        TrainingDiverged: The loss is no finite number; on all ranks.
    """
    group, options = training.group, training.options
    (bits,) = struct.unpack("<q", struct.pack("<d", loss.item()))
    rows = exchange([bits, peak_bytes(training.engine.device)], group)
    mean = math.fsum(struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in rows) / group.size
    tokens = options.data.batch * options.data.sequence
    steps_per_second = training.clock.steps_per_second()
    worth = None
    if options.optimizer.adascale:
        seconds = training.pass_clock.seconds_by_batch(1 / steps_per_second, options.data.batch)
        worth = worth_of(training.optimizer, options.data.batch, seconds)
    if not math.isfinite(mean):
        raise _diverged(training, f"the loss is {mean}")
    training.reporter.step(
        StepRecord(
            step=training.step,
            steps=options.optimizer.steps,
            loss=mean,
            learning_rate=rate,
            gradient_norm=None if norm is None else norm.item(),
            tokens_per_second=tokens * steps_per_second,
            peak_memory_bytes=tuple(row[1] for row in rows),
            seconds_left=training.clock.seconds_for(_steps_left(training)),
            **({} if worth is None else worth._asdict()),
        )
    )


def keep(training: Training, save: Callable[[Training], object]) -> None:
    """Saves what is not saved yet, if it is worth keeping; all ranks have to call this.

    Raises:
        TrainingDiverged: It is not: a number on some rank is not finite. On all ranks.
    """
    if training.saved_step == training.step:
        return
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in _what_must_be_finite(training))
    if not all(row[0] for row in exchange([int(finite)], training.group)):
        raise _diverged(training, "the loss or a weight is no finite number")
    save(training)


def _steps_left(training: Training) -> int:
    """How many more steps there will be, at what those so far were worth."""
    left = training.options.optimizer.steps - training.position
    return round(left * training.step / max(1, training.position))


def _what_must_be_finite(training: Training) -> Iterator[torch.Tensor]:
    # The loss is that of the weights before the last step; so the weights themselves are looked at too.
    yield from (number for number in (training.loss, training.norm) if number is not None)
    yield from training.engine.params()
    yield from state_tensors(training.optimizer)


def _diverged(training: Training, what: str) -> TrainingDiverged:
    return TrainingDiverged(
        f"{what} at step {training.step}, which is not saved: take a smaller --lr, a longer --warmup or --clip 1; "
        f"{training.way_on()}"
    )


def evaluate(training: Training) -> float:
    """Judges the held-out text, reports it, and returns the bits per byte."""
    data, group = training.options.data, training.group
    starts = held_out_starts(len(training.text.held_out), data.sequence, data.held_out_tokens)
    pipeline = training.engine.pipeline
    parts = training.engine.axes.data.size if pipeline is None else pipeline.num_replicas
    micro_batch = data.batch // (parts * training.options.parallel.accumulate)
    bits = bits_per_byte(training.engine, training.text.held_out, starts, data.sequence, micro_batch, group)
    training.reporter.evaluation(EvaluationRecord(training.step, bits))
    return bits


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes the random state a function of where the training stands.

    So nothing about it has to be saved, and a resumed run has the state of one that was never stopped. Ranks draw
    different numbers (two ranks' dropout must not be alike); they are those of the rank, so with dropout another
    number of ranks is another, equally good, training.
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)


def _stop_if_asked(training: Training, stop: StopSignal, save: Callable[[Training], object]) -> None:
    # On a GPU the ranks' notes would make the host wait for the device in each step; there they are compared when
    # it waits anyway.
    every = 1 if training.engine.device.type == "cpu" else training.options.run.log_every
    if training.step % every or training.is_over:
        return
    number = stop.agreed(training.group)
    if number:
        keep(training, save)
        raise Interrupted(number, f"stopped after step {training.step}, which is saved; {training.way_on()}")
