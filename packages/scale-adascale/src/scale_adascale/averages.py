"""Moving averages of what each step measures, which is far too noisy to be used as it is.

The average of one parameter group is four numbers, kept as a list so that any checkpoint can hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_adascale.gain import Moments


@dataclass(frozen=True)
class Average:
    """The moving average of the moments of one parameter group.

    Attributes:
        variance: Of what was measured so far; 0 before anything was.
        square: The same; 1 before anything was measured, so that the gain is 1.
        weight: How much of an exponential average has been filled, from 0 towards 1.
        count: How many steps it has seen.
    """

    variance: float = 0.0
    square: float = 1.0
    weight: float = 0.0
    count: float = 0.0

    @property
    def moments(self) -> Moments:
        """The averages."""
        return Moments(self.variance, self.square)

    def after(self, new: Moments, smoothing: float, *, debias: bool) -> Average:
        """Returns the average when one more step was measured.

        Args:
            new: What it has measured.
            smoothing: The part of the old average that stays, from 0 to below 1.
            debias: Divide an exponential average by the part of it that was filled (as Adam does). Otherwise the plain
                mean, until that has seen 1 / (1 - smoothing) steps, and an exponential average from then on (AdaScale,
                appendix B.3).
        """
        weight, count = smoothing * self.weight + (1 - smoothing), self.count + 1
        if debias:
            keep = smoothing * self.weight / weight
        elif count * (1 - smoothing) < 1:
            keep = self.count / count
        else:
            keep = smoothing if self.count else 0.0
        variance, square = (keep * old + (1 - keep) * now for old, now in zip(self.moments, new, strict=True))
        return Average(variance, square, weight, count)

    def at_scale(self, old: float, new: float) -> Average:
        """Returns it with the variance multiplied by old / new, as FairScale does when the scale changes."""
        return Average(self.variance * (old / new), self.square, self.weight, self.count)

    def as_list(self) -> list[float]:
        """The four numbers."""
        return [self.variance, self.square, self.weight, self.count]

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> Average:
        """The inverse of `as_list`."""
        return cls(*(float(number) for number in numbers))
