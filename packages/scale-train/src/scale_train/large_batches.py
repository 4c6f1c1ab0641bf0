"""--adascale: a training that is counted in steps of a smaller batch, whose learning rate and schedule it has.

AdaScale multiplies the learning rate by what a step of the whole batch is worth. So `--steps` and `--warmup` are steps
of the smaller batch, and the training is over when what its steps were worth sums up to them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.optim import Optimizer

from scale_adascale import AdaScale
from scale_train.errors import InputError
from scale_train.options import Options
from scale_train.parallel import Engine


class Worth(NamedTuple):
    """What AdaScale knows after a step.

    Attributes:
        gain: Steps of the smaller batch that the step was worth.
        useful_steps: The sum of all gains.
        noise_scale: Sequences in a batch above which more of them stop to pay; None where it is not known yet.
    """

    gain: float
    useful_steps: float
    noise_scale: float | None


def check_adascale(options: Options) -> None:
    """Finds what is wrong with --adascale.

    Raises:
        InputError: It can't be measured, or the scale is no scale.
    """
    scale, parallel = options.optimizer.adascale_scale, options.parallel
    if scale and not options.optimizer.adascale:
        raise InputError(f"--adascale-scale {scale:g} has no effect without --adascale")
    if scale and not 1 <= scale < math.inf:
        raise InputError(f"--adascale-scale {scale:g}: at least 1 is needed")
    if options.optimizer.adascale and parallel.parallel == "pipe":
        raise InputError("--adascale: a rank of a pipeline may have several stages; take another --parallel, as fsdp")


def with_adascale(engine: Engine, options: Options) -> Optimizer:
    """The engine's optimizer, with AdaScale around it if that was asked for."""
    if not options.optimizer.adascale:
        return engine.optimizer
    return AdaScale(
        engine.optimizer,
        scale=options.optimizer.adascale_scale or None,
        num_gradients_to_accumulate=options.parallel.accumulate,
        process_group=engine.axes.data,
    )


def steps_done(optimizer: Optimizer, steps: int) -> int:
    """Steps of the schedule that are done: as many as were taken, or with AdaScale as they were worth."""
    return int(optimizer.progress) if isinstance(optimizer, AdaScale) else steps


def worth_of(optimizer: Optimizer, batch: int) -> Worth | None:
    """What AdaScale knows, if it is there.

    Args:
        optimizer: What steps.
        batch: Sequences of a step of all ranks.
    """
    if not isinstance(optimizer, AdaScale):
        return None
    noise = optimizer.noise_scale(batch / optimizer.scale).value
    return Worth(optimizer.gain(), optimizer.progress, noise if math.isfinite(noise) else None)


def is_of_adascale(option: str) -> bool:
    """Whether an option of a parameter group is what AdaScale keeps there, and no word of the command line."""
    return option.startswith("adascale")
