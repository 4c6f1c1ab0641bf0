"""The training loop, evaluation on held-out text, and what a signal to stop does."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scale_adascale import AdaScale
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_core.errors import ScaleDistributedError
from scale_core.launch import StopSignal
from scale_train.data.text import slice_of_rank, windows_at
from scale_train.errors import Interrupted, TrainingDiverged
from scale_train.model.gpt import IGNORED
from scale_train.training.adascale import adascale_stats
from scale_train.training.finite import describe_nonfinite
from scale_train.training.first_cause import naming_first_cause
from scale_train.training.memory import peak_bytes
from scale_train.training.parallel.engine import Engine
from scale_train.training.reports.reporters import EvaluationRecord, StepRecord
from scale_train.training.state import StepTimer, TrainState


def train(training: TrainState, save: Callable[[TrainState], object]) -> float:
    """Runs the remaining steps; returns the held-out bits per byte after the last.

    `save` is called on all ranks every `save_every` steps, at the end, and before an interruption.
    """
    run = training.options.run
    training.step_timer = StepTimer()
    with StopSignal(keep_after=ScaleDistributedError) as stop, naming_first_cause(training.group):
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
    options, optimizer, engine, scaler = training.options, training.optimizer, training.engine, training.scaler
    # Tensor-parallel ranks compute the same between sharded layers, and need the same dropout.
    seed_step(options.run.seed, training.step, engine.dropout_rank)
    loss = forward_backward(training)
    norm, scale = None, scaler.get_scale()
    if options.optimizer.clip:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(engine.raw_model.parameters(), options.optimizer.clip)
    rate = training.schedule.at(training.schedule_step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if scaler.get_scale() < scale:  # Some gradient was not finite, and nothing has changed.
        training.skipped_steps += 1
        norm = None
    training.loss, training.norm = loss, norm
    training.step += 1
    training.step_timer.steps += 1
    training.reporter.advance(training.schedule_step)
    if training.step % options.run.log_every == 0 or training.is_over:
        log_step(training, loss, rate, norm)


def forward_backward(training: TrainState) -> Tensor:
    """Computes gradients of the global batch's mean loss; returns this rank's part of the loss, a scalar."""
    data, engine = training.options.data, training.engine
    parallel, starts = training.options.parallel, training.sampler.starts(data.batch)
    accumulate = parallel.accumulate if engine.pipeline is None else parallel.chunks
    micro_batches = slice_of_rank(starts, engine.batch_group.rank, engine.batch_group.size, accumulate)
    training.balance.scale_losses(training.scaler.get_scale(), data.batch // engine.batch_group.size)
    if engine.pipeline is not None:
        with engine.autocast():
            batch = windows_at(training.text.train, torch.cat(micro_batches), data.sequence)
            return engine.pipeline.step(*batch, training.scaler)
    total = torch.zeros((), device=engine.device)
    for index, starts in enumerate(micro_batches):
        if training.options.optimizer.adascale:
            training.microbatch_timer.record_start(index)
        batch, positions = engine.part_of(*windows_at(training.text.train, starts, data.sequence))
        with engine.gradient_sync(last=index == accumulate - 1), engine.attention():
            with engine.autocast():
                loss = engine.loss(*batch, "mean", positions)
            training.scaler.scale(loss / accumulate).backward()
        total += loss.detach() / accumulate
    return total


def log_step(training: TrainState, loss: Tensor, rate: float, norm: Tensor | None) -> None:
    """Reports losses and memory of all ranks; TrainingDiverged on all where the loss is not finite."""
    group, options = training.group, training.options
    mean = sum_over_ranks(loss.item(), group) / group.size
    peaks = exchange([peak_bytes(training.engine.device)], group)
    tokens = options.data.batch * options.data.sequence
    steps_per_second = training.step_timer.steps_per_second()
    left = options.optimizer.steps - training.schedule_step
    stats: dict[str, Any] = training.balance.stats(group)
    if isinstance(training.optimizer, AdaScale):
        seconds = training.microbatch_timer.step_seconds_by_batch(1 / steps_per_second, options.data.batch)
        stats |= adascale_stats(training.optimizer, options.data.batch, seconds)
    if not math.isfinite(mean):
        raise _diverged(training, describe_nonfinite(training) or f"the loss is {mean}")
    training.reporter.step(
        StepRecord(
            step=training.step,
            steps=options.optimizer.steps,
            loss=mean,
            learning_rate=rate,
            gradient_norm=None if norm is None else norm.item(),
            tokens_per_second=tokens * steps_per_second,
            peak_memory_bytes=tuple(row[0] for row in peaks),
            # At the mean progress of the steps so far.
            seconds_left=training.step_timer.seconds_for(round(left * training.step / max(1, training.schedule_step))),
            mfu=training.utilization and training.utilization.mfu(tokens * steps_per_second),
            loss_scale=training.scaler.get_scale() if training.scaler.is_enabled() else None,
            skipped_steps=training.skipped_steps if training.scaler.is_enabled() else None,
            **stats,
        )
    )


def save_if_finite(training: TrainState, save: Callable[[TrainState], object]) -> None:
    """Saves a step that is not saved yet; TrainingDiverged on all ranks where a number of one is not finite.

    The loss is from the weights before the last step.
    """
    if training.saved_step == training.step:
        return
    if nonfinite := describe_nonfinite(training):
        raise _diverged(training, nonfinite)
    save(training)


def _diverged(training: TrainState, what: str) -> TrainingDiverged:
    return TrainingDiverged(
        f"{what} at step {training.step}, which is not saved: take a smaller --lr, a longer --warmup or --clip 1; "
        f"{training.resume_hint()}"
    )


def evaluate(training: TrainState) -> float:
    """Reports and returns the bits per byte of the held-out text."""
    data, group = training.options.data, training.group
    starts = held_out_starts(len(training.text.held_out), data.sequence, data.held_out_tokens)
    micro_batch = data.batch // (training.engine.batch_group.size * training.options.parallel.accumulate)
    loss = held_out_loss(training.engine, training.text.held_out, starts, data.sequence, micro_batch, group)
    bits = loss / math.log(2) * training.text.tokens_per_byte
    training.reporter.evaluation(EvaluationRecord(training.step, bits, loss))
    return bits


def held_out_starts(num_bytes: int, sequence: int, most_tokens: int) -> Tensor:
    """Returns where windows start, `[windows]`, int64: evenly spread, the same in every evaluation."""
    windows = (num_bytes - 1) // sequence
    if most_tokens:
        windows = min(windows, max(1, most_tokens // sequence))
    last = num_bytes - 1 - sequence
    return torch.tensor([last * index // max(1, windows - 1) for index in range(windows)])


@torch.no_grad()
def held_out_loss(engine: Engine, text: Tensor, starts: Tensor, sequence: int, micro_batch: int, group: Group) -> float:
    """Returns the mean loss, in nats per token, of the windows of `text`, `[tokens]`, at `starts`; equal on all ranks.

    Each rank reads its share. Where the windows do not divide, a rank pads its batch with windows that do not count,
    because a forward pass of a sharded model is one of all ranks.
    """
    engine.model.eval()
    rank, size = engine.batch_group.rank, engine.batch_group.size
    rounds = math.ceil(len(starts) / (size * micro_batch))
    nats = 0.0
    for turn in range(rounds):
        first = (turn * size + rank) * micro_batch
        local_starts = starts[first : first + micro_batch]
        padding = starts[:1].expand(micro_batch - len(local_starts))
        tokens, targets = windows_at(text, torch.cat([local_starts, padding]), sequence)
        targets[len(local_starts) :] = IGNORED
        batch, positions = engine.part_of(tokens, targets)
        with engine.attention(), engine.autocast():
            loss = engine.loss(*batch, "sum", positions)
        nats += loss.item()
    engine.model.train()
    return sum_over_ranks(nats if engine.adds_loss else 0.0, group) / (len(starts) * sequence)


def sum_over_ranks(value: float, group: Group) -> float:
    """Returns the sum over ranks, in rank order, so that it is the same to the bit on all."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return math.fsum(struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in exchange([bits], group))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds by step and rank, so that no random state is saved, and a resumed run draws what it would have drawn.

    Ranks draw different numbers. So with dropout, a different number of ranks gives a different result, which is
    equally good.
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)


def _stop_if_signalled(training: TrainState, stop: StopSignal, save: Callable[[TrainState], object]) -> None:
    # On a GPU an exchange makes the host wait for the device; there it is done when it waits anyway.
    every = 1 if training.engine.device.type == "cpu" else training.options.run.log_every
    if training.step % every or training.is_over:
        return
    number = stop.on_any_rank(training.group)
    if number:
        save_if_finite(training, save)
        training.finish_save()
        raise Interrupted(number, f"stopped after step {training.step}, which is saved; {training.resume_hint()}")
