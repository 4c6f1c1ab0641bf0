"""Trainings that are counted in steps of the small batch, whatever the batch is: until the gains sum up to T.

So the number of steps and the schedule of the small batch stay the same (AdaScale, algorithm 1).
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.optim.lr_scheduler import LRScheduler

from scale_adascale.adascale import AdaScale
from scale_adascale.gain import is_real
from scale_core.arguments import checked_arguments

Batch = TypeVar("Batch")


@checked_arguments(own="optimizer steps")
def until_steps(
    batches: Iterable[Batch], optimizer: AdaScale, steps: float, *, first_epoch: int | None = None
) -> Iterator[Batch]:
    """Yields batches, epoch after epoch, until the training is worth `steps` steps of the small batch.

        for batch in until_steps(loader, optimizer, steps=10_000):
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    `set_epoch` of the loader's sampler, if it has one, is called with the number of each epoch. Under accumulation
    batches are micro-batches, and it ends between two steps.

    Args:
        batches: An iterable that can be iterated more than once, for example a `DataLoader`.
        optimizer: The AdaScale that steps. Steps that it has taken before count.
        steps: Steps of the small batch.
        first_epoch: The first number for `set_epoch`. None is 0 at the start. If training resumes, None is the progress
            so far, in steps, which no epoch with a step has had as its number.

    Raises:
        TypeError: The optimizer is not an AdaScale.
        ValueError: There are no batches, or none any more; or `steps` is below 0.

    Examples:
        >>> import torch
        >>> from scale_adascale import AdaScale, until_steps
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=1)
        >>> for batch in until_steps([torch.randn(16, 8)] * 4, optimizer, steps=6):  # one epoch and a half
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.progress
        6.0

    See also: [the guide to AdaScale](../guides/adascale.md).
    """
    _check_adascale(optimizer)
    if not is_real(steps) or not steps >= 0:
        raise ValueError(f"expected steps of 0 or more, got {steps!r}. Pass the steps of the small batch")
    epoch = math.ceil(optimizer.progress) if first_epoch is None else first_epoch
    while optimizer.progress < steps:
        set_epoch = getattr(getattr(batches, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
            if optimizer.progress >= steps:
                return
        if is_empty:
            raise ValueError(
                f"the batches ended after {optimizer.progress:.1f} of {steps} steps of the small batch, because an "
                "iterator can't begin again. Pass the DataLoader or list itself"
            )
        epoch += 1


class GainScheduler:
    """Steps a learning rate scheduler once per step of the small batch.

        >>> import torch
        >>> from scale_adascale import AdaScale, GainScheduler
        >>> optimizer = AdaScale(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1), scale=4)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)  # as for the small batch
        >>> scheduler = GainScheduler(schedule, optimizer)

    Call `step` once after each `optimizer.step()`. The last of these mostly goes some steps of the small batch beyond
    the end of a training; a schedule that ends there stays at its last learning rate.

    Args:
        scheduler: Any of `torch.optim.lr_scheduler` but `ReduceLROnPlateau`, in steps of the small batch.
        optimizer: The AdaScale.
        steps_per_call: How many steps of the small batch there are between two steps of the scheduler: 1, or the
            steps of an epoch for one that counts epochs.
        total_steps: The number of learning rates of the schedule, which does not step after the last one. Set it if the
            schedule ends, for example a `LambdaLR` with a list of rates. None ends only a `OneCycleLR`, also inside a
            `SequentialLR` or `ChainedScheduler`.

    Raises:
        TypeError: The optimizer is not an AdaScale, or the scheduler's `step` wants a value, as it does in
            `ReduceLROnPlateau`.
        ValueError: `steps_per_call` is not above 0, or `total_steps` below 1.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """

    @checked_arguments(own="steps_per_call")
    def __init__(
        self,
        scheduler: LRScheduler,
        optimizer: AdaScale,
        steps_per_call: float = 1,
        *,
        total_steps: int | None = None,
    ) -> None:
        _check_adascale(optimizer)
        _check_scheduler(scheduler)
        if not is_real(steps_per_call) or not steps_per_call > 0:
            raise ValueError(
                f"expected steps_per_call above 0, got {steps_per_call!r}: pass 1, or the steps of an epoch"
            )
        if total_steps is not None and not (is_real(total_steps) and total_steps >= 1):
            raise ValueError(
                f"expected total_steps of 1 or more, got {total_steps!r}: pass how many learning rates the schedule "
                "has, or leave it out"
            )
        self.scheduler = scheduler
        self._optimizer, self._steps_per_call, self._total_steps = optimizer, steps_per_call, total_steps
        self._count = int(optimizer.progress / steps_per_call)

    def step(self) -> None:
        """Steps the scheduler as often as the optimizer's progress says, up to the end of the schedule."""
        due = int(self._optimizer.progress / self._steps_per_call)
        while self._count < due and (self._total_steps is None or self._count + 1 < self._total_steps):
            if not _has_next(self.scheduler):
                break
            self.scheduler.step()
            self._count += 1

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the small batch."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and how often it has stepped."""
        return {"scheduler": self.scheduler.state_dict(), "count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a result of `state_dict`."""
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self._count = state_dict["count"]


def _has_next(scheduler: Any) -> bool:
    """Whether a scheduler has a learning rate for one more step."""
    # `OneCycleLR` has `total_steps` of them, the first before any step. It takes one step more, beyond the end of its
    # line, and raises at the next.
    members = getattr(scheduler, "_schedulers", None)
    if members is None:
        total = getattr(scheduler, "total_steps", None)
        return not isinstance(total, int) or scheduler.last_epoch + 1 < total
    milestones = getattr(scheduler, "_milestones", None)
    if milestones is None:  # A ChainedScheduler: all of them step together.
        return all(_has_next(member) for member in members)
    coming = scheduler.last_epoch + 1
    if coming in milestones or bisect_right(milestones, coming) < len(milestones):
        return True  # Another one follows; one that ends before its milestone raises, as it does without this.
    return _has_next(members[-1])


def _check_scheduler(scheduler: Any) -> None:
    parameters = inspect.signature(scheduler.step).parameters.values()
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        name = type(scheduler).__name__
        raise TypeError(
            f"expected a scheduler that follows the number of steps, got {name}, whose step({', '.join(required)}) "
            f"follows a measured value. Leave GainScheduler out and call {name}.step({', '.join(required)}) itself, "
            "after each evaluation"
        )


def _check_adascale(optimizer: Any) -> None:
    if not isinstance(optimizer, AdaScale):
        raise TypeError(
            f"expected the AdaScale that steps, which counts steps of the small batch, got {type(optimizer).__name__}. "
            "Write optimizer = AdaScale(optimizer), and pass that one"
        )
