"""Optimizers that step inside of a pipeline's step, as soon as gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.optim import Optimizer

Optimizers = Optimizer | Mapping[int, Optimizer]
"""One for all stages of a rank, or one for each."""


def stepper(optimizer: Optimizers | None, stages: Sequence[int]) -> Callable[[int], tuple[int, ...]] | None:
    """Returns what steps a stage, and says which stages were stepped; one optimizer for all steps with the last.

    Args:
        optimizer: What was given; None steps nothing.
        stages: Of this rank.

    Raises:
        TypeError: It is no optimizer.
        ValueError: It is for a stage that is not here.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        by_stage = dict(optimizer)
        for stage, one in by_stage.items():
            if stage not in stages:
                raise ValueError(
                    f"an optimizer was given for stage {stage!r}, but this rank holds the stages {list(stages)}: write "
                    "optimizer={index: ... for index in pipe.stages}"
                )
            _check(one)

        def step_one(stage: int) -> tuple[int, ...]:
            if stage not in by_stage:
                return ()
            by_stage[stage].step()
            return (stage,)

        return step_one
    _check(optimizer)
    waiting = set(stages)

    def step(stage: int) -> tuple[int, ...]:
        waiting.discard(stage)
        if waiting:
            return ()
        optimizer.step()
        return tuple(stages)

    return step


def _check(optimizer: object) -> None:
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError(f"expected an optimizer, or a dict of them by stage, but got {type(optimizer).__name__}")
