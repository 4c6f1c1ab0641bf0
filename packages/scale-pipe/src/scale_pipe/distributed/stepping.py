"""Optimizers that step inside of a pipeline's step, as soon as gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.optim import Optimizer

Optimizers = Optimizer | Mapping[int, Optimizer]
"""One for all stages of a rank, or one for each."""


def stepper(optimizer: Optimizers | None, stages: list[int]) -> Callable[[int], None] | None:
    """Returns what steps a stage; one optimizer for all of them steps with the last.

    Args:
        optimizer: What was given; None steps nothing.
        stages: Of this rank.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        by_stage = dict(optimizer)

        def step_one(stage: int) -> None:
            if stage in by_stage:
                by_stage[stage].step()

        return step_one
    waiting = set(stages)

    def step(stage: int) -> None:
        waiting.discard(stage)
        if not waiting:
            optimizer.step()

    return step
