"""A training that is counted in steps of the small batch, whatever the batch is: until the gains sum up to T.

So the number of steps and the schedule of the small batch stay what they are (AdaScale, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.optim.lr_scheduler import LRScheduler

from scale_adascale.adascale import AdaScale

Batch = TypeVar("Batch")


def until_steps(
    batches: Iterable[Batch], optimizer: AdaScale, steps: float, *, first_turn: int | None = None
) -> Iterator[Batch]:
    """Yields batches, all of them again and again, until the training is worth so many steps of the small batch.

        for batch in until_steps(loader, optimizer, steps=10_000):
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    A loader's sampler that has `set_epoch` is told the number of each turn. Under accumulation batches are
    micro-batches, and it ends between two steps.

    Args:
        batches: What can be gone through more than once, such as a `DataLoader`.
        optimizer: The AdaScale that steps. Steps that it has taken before count.
        steps: Steps of the small batch.
        first_turn: The number that `set_epoch` is told first. If None it is 0 at the beginning, and where a training
            goes on, a number that no turn with a step in it has had: the steps that it is worth so far.

    Raises:
        ValueError: There are no batches, or none any more; or `steps` is below 0.
    """
    if not steps >= 0:
        raise ValueError(f"expected steps of 0 or more, got {steps}")
    epoch = math.ceil(optimizer.progress) if first_turn is None else first_turn
    while optimizer.progress < steps:
        set_epoch = getattr(getattr(batches, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        yielded = 0
        for batch in batches:
            yielded += 1
            yield batch
            if optimizer.progress >= steps:
                return
        if not yielded:
            raise ValueError(
                f"the batches have come to their end after {optimizer.progress:.1f} of {steps} steps of the small "
                "batch: pass what can be gone through again, such as a DataLoader, and no iterator"
            )
        epoch += 1


class GainScheduler:
    """Has a scheduler step as often as the training has made steps of the small batch.

        >>> import torch
        >>> from scale_adascale import AdaScale, GainScheduler
        >>> optimizer = AdaScale(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1), scale=4)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)  # as for the small batch
        >>> scheduler = GainScheduler(schedule, optimizer)

    Call `step` once after each `optimizer.step()`.

    Args:
        scheduler: Any of `torch.optim.lr_scheduler`, in steps of the small batch.
        optimizer: The AdaScale.
        steps_per_call: How many steps of the small batch there are between two steps of the scheduler: 1, or the
            steps of an epoch for one that counts epochs.

    Raises:
        ValueError: `steps_per_call` is not above 0.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: AdaScale, steps_per_call: float = 1) -> None:
        if not steps_per_call > 0:
            raise ValueError(f"expected steps_per_call above 0, got {steps_per_call}: pass 1, or the steps of an epoch")
        self.scheduler = scheduler
        self._optimizer, self._steps_per_call = optimizer, steps_per_call
        self._count = int(optimizer.progress / steps_per_call)

    def step(self) -> None:
        """Catches up with the optimizer."""
        due = int(self._optimizer.progress / self._steps_per_call)
        for _ in range(due - self._count):
            self.scheduler.step()
        self._count = due

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the small batch."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and how often it has stepped."""
        return {"scheduler": self.scheduler.state_dict(), "count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` has returned."""
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self._count = state_dict["count"]
