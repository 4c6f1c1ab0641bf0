"""--adascale: a training that is counted in steps of a smaller batch, whose learning rate and schedule it has.

AdaScale multiplies the learning rate by what a step of the whole batch is worth. So `--steps` and `--warmup` are steps
of the smaller batch, and the training is over when what its steps were worth sums up to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch.optim import Optimizer

from scale_adascale import AdaScale, suggest_batch_size
from scale_pipe.microbatch import micro_batch_sizes
from scale_train.config.options import Options
from scale_train.parallelize.engine import Engine


class Worth(NamedTuple):
    """What AdaScale knows after a step.

    Attributes:
        gain: Steps of the smaller batch that the step was worth.
        useful_steps: The sum of all gains.
        noise_scale: Of the gradient, in sequences; None where it is not known yet, or infinite, as are the two below.
        noise_scale_low: The lower end of its interval of 95 %.
        noise_scale_high: The upper one.
        critical_batch: Sequences in a batch above which more of them stop to pay.
        suggested_batch: Those of the batch with which the training would go forward fastest on these ranks, by the
            seconds of a pass and of a step; None where a step is one pass or one of a pipeline, and where the noise
            scale is not known.
    """

    gain: float
    useful_steps: float
    noise_scale: float | None
    noise_scale_low: float | None
    noise_scale_high: float | None
    critical_batch: int | None
    suggested_batch: int | None


def with_adascale(engine: Engine, options: Options) -> Optimizer:
    """The engine's optimizer, with AdaScale around it if that was asked for."""
    if not options.optimizer.adascale:
        return engine.optimizer
    pipeline, number = engine.pipeline, options.parallel.accumulate
    if pipeline is not None:  # Of few sequences there are fewer micro-batches than chunks.
        number = len(micro_batch_sizes(options.data.batch // pipeline.num_replicas, options.parallel.chunks))
    return AdaScale(
        engine.optimizer,
        scale=options.optimizer.adascale_scale or None,
        num_gradients_to_accumulate=number,
        process_group=engine.axes.data if pipeline is None else pipeline.replicas,
        model_parallel_group=None if pipeline is None else pipeline.group,
    )


def steps_done(optimizer: Optimizer, steps: int) -> int:
    """Steps of the schedule that are done: as many as were taken, or with AdaScale as they were worth."""
    return int(optimizer.progress) if isinstance(optimizer, AdaScale) else steps


def worth_of(optimizer: Optimizer, batch: int, seconds: Mapping[int, float]) -> Worth | None:
    """What AdaScale knows, if it is there.

    Args:
        optimizer: What steps.
        batch: Sequences of a step of all ranks.
        seconds: Measured seconds of a step by batch, of two sizes at least; or nothing.
    """
    if not isinstance(optimizer, AdaScale):
        return None
    base = batch / optimizer.scale
    noise = optimizer.noise_scale(base)
    known = math.isfinite(noise.value)
    best = suggest_batch_size(seconds, noise.value, base).batch_size if known and len(seconds) > 1 else None
    return Worth(
        gain=optimizer.gain(),
        useful_steps=optimizer.progress,
        noise_scale=_if_finite(noise.value),
        noise_scale_low=noise.low if known else None,
        noise_scale_high=_if_finite(noise.high),
        critical_batch=max(1, round(noise.critical_batch_size)) if known else None,
        suggested_batch=best,
    )


def _if_finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def is_of_adascale(option: str) -> bool:
    """Whether an option of a parameter group is what AdaScale keeps there, and no word of the command line."""
    return option.startswith("adascale")
