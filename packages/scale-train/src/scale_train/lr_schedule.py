"""Learning rate schedule: a pure function of the step, so that a resumed run needs the step alone.

Linear warm-up and half a cosine: Loshchilov and Hutter, arXiv 1608.03983, eq. 5, with one period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer


@dataclass(frozen=True)
class LRSchedule:
    """Warm-up to a peak, then half a cosine down to a floor.

    Example:
        >>> schedule = LRSchedule(peak=1.0, warmup=2, steps=6, floor=0.1)
        >>> [round(schedule.at(step), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """

    peak: float
    warmup: int  # steps until the peak; 0 for none
    steps: int
    floor: float = 0.1  # the last learning rate, as a fraction of the peak

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        passed = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, passed)))
        return self.peak * (self.floor + (1 - self.floor) * cosine)

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Sets the learning rate of all parameter groups, and returns it."""
        rate = self.at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate
