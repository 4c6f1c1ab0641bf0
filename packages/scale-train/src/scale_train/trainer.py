"""The training loop."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator

import torch

from scale_core.comm.collectives import exchange
from scale_train.data.sampler import slice_of_rank, windows_at
from scale_train.errors import Interrupted, TrainingDiverged
from scale_train.evaluate import bits_per_byte, held_out_starts
from scale_train.memory import peak_bytes, state_tensors
from scale_train.parallelize.adascale import adascale_stats
from scale_train.reporting.reporters import EvaluationRecord, StepRecord
from scale_train.signals import StopSignal
from scale_train.state import StepTimer, TrainState


def train(training: TrainState, save: Callable[[TrainState], object]) -> float:
    """Runs the remaining steps; returns the held-out bits per byte after the last.

    `save` is called on all ranks every `save_every` steps, at the end, and before an interruption.
    """
    run = training.options.run
    training.step_timer = StepTimer()
    with StopSignal() as stop:
        while not training.is_over:
            train_step(training)
            done = training.step
            with training.step_timer.paused():
                if run.save_every and done % run.save_every == 0 and not training.is_over:
                    save_if_finite(training, save)
                if run.evaluate_every and done % run.evaluate_every == 0 and not training.is_over:
                    evaluate(training)
            _stop_if_signalled(training, stop, save)
        save_if_finite(training, save)
        return evaluate(training)


def train_step(training: TrainState) -> None:
    """One optimizer step of all ranks, on one global batch."""
    options, optimizer, engine = training.options, training.optimizer, training.engine
    # Tensor-parallel ranks compute the same between sharded layers, and need the same dropout.
    seed_step(options.run.seed, training.step, engine.axes.data.rank)
    loss = forward_backward(training)
    norm = engine.clip(options.optimizer.clip) if options.optimizer.clip else None
    rate = training.schedule.apply(optimizer, training.schedule_step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    training.loss, training.norm = loss, norm
    training.step += 1
    training.step_timer.steps += 1
    training.reporter.advance(training.schedule_step)
    if training.step % options.run.log_every == 0 or training.is_over:
        log_step(training, loss, rate, norm)


def forward_backward(training: TrainState) -> torch.Tensor:
    """Computes gradients of the global batch's mean loss; returns this rank's part of the loss, a scalar."""
    data, engine, group = training.options.data, training.engine, training.engine.axes.data
    if engine.pipeline is not None:
        replica, replicas = engine.pipeline.replica, engine.pipeline.num_replicas
        (starts,) = slice_of_rank(training.sampler.starts(data.batch), replica, replicas, 1)
        batch = windows_at(training.text.train, starts, data.sequence)
        with engine.autocast():
            return engine.pipeline.step(batch.tokens, batch.targets)
    accumulate = training.options.parallel.accumulate
    micro_batches = slice_of_rank(training.sampler.starts(data.batch), group.rank, group.size, accumulate)
    total = torch.zeros((), device=engine.device)
    for index, starts in enumerate(micro_batches):
        if training.options.optimizer.adascale:
            training.microbatch_timer.record_start(index)
        batch = windows_at(training.text.train, starts, data.sequence)
        with engine.gradient_sync(last=index == accumulate - 1):
            with engine.autocast():
                loss = engine.model(batch.tokens.to(engine.device), batch.targets.to(engine.device))
            (loss / accumulate).backward()
        total += loss.detach() / accumulate
    return total


def log_step(training: TrainState, loss: torch.Tensor, rate: float, norm: torch.Tensor | None) -> None:
    """Reports losses and memory of all ranks; TrainingDiverged on all where the loss is not finite."""
    group, options = training.group, training.options
    (bits,) = struct.unpack("<q", struct.pack("<d", loss.item()))
    rows = exchange([bits, peak_bytes(training.engine.device)], group)
    mean = math.fsum(struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in rows) / group.size
    tokens = options.data.batch * options.data.sequence
    steps_per_second = training.step_timer.steps_per_second()
    stats = None
    if options.optimizer.adascale:
        seconds = training.microbatch_timer.step_seconds_by_batch(1 / steps_per_second, options.data.batch)
        stats = adascale_stats(training.optimizer, options.data.batch, seconds)
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
            seconds_left=training.step_timer.seconds_for(_steps_left(training)),
            **({} if stats is None else stats._asdict()),
        )
    )


def save_if_finite(training: TrainState, save: Callable[[TrainState], object]) -> None:
    """Saves a step that is not saved yet; TrainingDiverged on all ranks where a number of one is not finite."""
    if training.saved_step == training.step:
        return
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in _tensors_to_check(training))
    if not all(row[0] for row in exchange([int(finite)], training.group)):
        raise _diverged(training, "the loss or a weight is no finite number")
    save(training)


def _steps_left(training: TrainState) -> int:
    """Predicted remaining steps, at the mean progress of those so far."""
    left = training.options.optimizer.steps - training.schedule_step
    return round(left * training.step / max(1, training.schedule_step))


def _tensors_to_check(training: TrainState) -> Iterator[torch.Tensor]:
    # The loss is that of the weights before the last step.
    yield from (number for number in (training.loss, training.norm) if number is not None)
    yield from training.engine.params()
    yield from state_tensors(training.optimizer)


def _diverged(training: TrainState, what: str) -> TrainingDiverged:
    return TrainingDiverged(
        f"{what} at step {training.step}, which is not saved: take a smaller --lr, a longer --warmup or --clip 1; "
        f"{training.resume_hint()}"
    )


def evaluate(training: TrainState) -> float:
    """Reports and returns the bits per byte of the held-out text."""
    data, group = training.options.data, training.group
    starts = held_out_starts(len(training.text.held_out), data.sequence, data.held_out_tokens)
    pipeline = training.engine.pipeline
    parts = training.engine.axes.data.size if pipeline is None else pipeline.num_replicas
    micro_batch = data.batch // (parts * training.options.parallel.accumulate)
    bits = bits_per_byte(training.engine, training.text.held_out, starts, data.sequence, micro_batch, group)
    training.reporter.evaluation(EvaluationRecord(training.step, bits))
    return bits


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds by step and rank, so that no random state is saved, and a resumed run draws what it would have drawn.

    Ranks draw different numbers, so with dropout another number of ranks is another, equally good, training.
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)


def _stop_if_signalled(training: TrainState, stop: StopSignal, save: Callable[[TrainState], object]) -> None:
    # On a GPU an exchange makes the host wait for the device; there it is done when it waits anyway.
    every = 1 if training.engine.device.type == "cpu" else training.options.run.log_every
    if training.step % every or training.is_over:
        return
    number = stop.received_by_any_rank(training.group)
    if number:
        save_if_finite(training, save)
        raise Interrupted(number, f"stopped after step {training.step}, which is saved; {training.resume_hint()}")
