"""--adascale: `--steps`, `--warmup` and `--lr` are those of a smaller batch.

AdaScale multiplies the learning rate by its gain, the steps of the smaller batch that a step of the whole batch is
worth. The training is over when the gains sum up to `--steps`.
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


class AdaScaleStats(NamedTuple):
    """Estimates of AdaScale after a step."""

    gain: float  # steps of the smaller batch that the step is worth
    useful_steps: float  # the sum of all gains
    # Of the gradient, in sequences; None where it is not known yet, or infinite, as are the two below.
    noise_scale: float | None
    noise_scale_low: float | None  # the lower end of its interval of 95 %
    noise_scale_high: float | None  # the upper one
    critical_batch: int | None  # sequences in a batch above which more of them stop to pay
    # The batch with which the training would be fastest on these ranks, by measured seconds; None where a step is one
    # micro-batch or one of a pipeline, and where the noise scale is not known.
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


def schedule_steps_done(optimizer: Optimizer, steps: int) -> int:
    """Steps of the schedule that are done: those taken, or with AdaScale the sum of gains."""
    return int(optimizer.progress) if isinstance(optimizer, AdaScale) else steps


def adascale_stats(optimizer: Optimizer, batch: int, seconds: Mapping[int, float]) -> AdaScaleStats | None:
    """Returns the estimates after a step; None without AdaScale. `seconds` of a step are by batch size."""
    if not isinstance(optimizer, AdaScale):
        return None
    base = batch / optimizer.scale
    noise = optimizer.noise_scale(base)
    known = math.isfinite(noise.value)
    best = suggest_batch_size(seconds, noise.value, base).batch_size if known and len(seconds) > 1 else None
    return AdaScaleStats(
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


def is_adascale_option(option: str) -> bool:
    """Whether an option of a parameter group is AdaScale's own."""
    return option.startswith("adascale")
