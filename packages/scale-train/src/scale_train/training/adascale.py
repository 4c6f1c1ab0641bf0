"""--adascale: `--steps`, `--warmup` and `--lr` are for a smaller batch.

AdaScale multiplies the learning rate by its gain, the steps of the smaller batch that a step of the whole batch is
worth. The training is over when the gains sum up to `--steps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from scale_adascale import AdaScale, AdaScaleOptions, suggest_batch_size
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_pipe.microbatch import micro_batch_sizes
from scale_train.options import Options
from scale_train.training.parallel.engine import Engine


def with_adascale(engine: Engine, options: Options, scaler: ShardedGradScaler) -> Optimizer:
    """The engine's optimizer, with AdaScale around it if that was asked for."""
    if not options.optimizer.adascale:
        return engine.optimizer
    pipeline, number, dims = engine.pipeline, options.parallel.accumulate, engine.dims
    if pipeline is not None:  # Of few sequences there are fewer micro-batches than chunks.
        number = len(micro_batch_sizes(options.data.batch // dims.size("batch"), options.parallel.chunks))
    return AdaScale(
        engine.optimizer,
        scale=options.optimizer.adascale_scale or None,
        num_gradients_to_accumulate=number,
        process_group=dims,
        model_parallel_group=None if pipeline is None else pipeline.group,
        options=AdaScaleOptions(grad_scaler=scaler),
    )


def adascale_stats(optimizer: AdaScale, batch: int, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Returns the fields of a `StepRecord` that AdaScale estimates; `seconds` of a step are by batch size."""
    base = batch / optimizer.scale
    noise = optimizer.noise_scale(base)
    is_finite = math.isfinite(noise.value)
    best = suggest_batch_size(seconds, noise.value, base).batch_size if is_finite and len(seconds) > 1 else None
    return {
        "gain": optimizer.gain(),
        "useful_steps": optimizer.progress,
        "noise_scale": noise.value if is_finite else None,
        "noise_scale_low": noise.low if is_finite else None,
        "noise_scale_high": noise.high if math.isfinite(noise.high) else None,
        "critical_batch": max(1, round(noise.critical_batch_size)) if is_finite else None,
        "suggested_batch": best,
    }
