"""The gradients of one step as a sample of their noise: from the first backward pass to what it adds to estimates."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from scale_adascale.checks import too_many_gradients
from scale_adascale.estimates import Estimates, Reading
from scale_adascale.gain import Moments, moments
from scale_adascale.local_grads import LocalGrads
from scale_adascale.measuring import Meter, Sent
from scale_adascale.single import Successive


@dataclass
class Settings:
    """What the user has said; it may change between two steps.

    Attributes:
        num_ranks: Those that have other data.
        num_gradients: Backward passes between two steps.
        scale: How many times the batch of a step is as large as that of scale 1.
        smoothing: The part of moving averages that stays at each step.
        is_scaled_loss: Losses are divided by `num_gradients`.
        debias: See `Average.after`.
    """

    num_ranks: int
    num_gradients: int
    scale: float
    smoothing: float
    is_scaled_loss: bool
    debias: bool

    @property
    def num_samples(self) -> int:
        """How many gradients a step averages, each computed alone."""
        return self.num_ranks * self.num_gradients


def default_smoothing(num_samples: int) -> float:
    """Returns the smoothing for steps of so many gradients; the more there are, the less has to be averaged."""
    return max(1 - num_samples / 1000, 0.0)


class Sampling:
    """Measures the gradients of a step.

    Args:
        meter: Adds up what ranks have measured.
        settings: Read whenever they are needed.
        reading: The estimates of the steps so far.

    Attributes:
        passes: Backward passes that have ended since the last step.
        is_divided: The gradients were divided by their number, where losses were not.
        local: What listens to them.
    """

    def __init__(self, meter: Meter, settings: Settings, reading: Reading) -> None:
        self.meter, self._settings, self._reading = meter, settings, reading
        self.passes, self.is_divided = 0, False
        self._by_moments = self._has_warned = False
        self._successive = Successive()
        self._sent = Sent()
        weakref.finalize(self, self._sent.abandon)  # Whoever drops an optimizer has nobody left who would wait.
        self.local = LocalGrads(self._pass_begins, self._pass_has_ended)

    def estimates(self, loss_scale: float) -> Estimates:
        """Returns the estimates after the step whose gradients are there; as they are, where there are none.

        Args:
            loss_scale: What a scaler has multiplied the losses by.
        """
        before = self._reading.estimates
        if self._sent.pending is None:
            return before
        measured, said = self.meter.read(self._sent.pending), self._settings
        sample: Sequence[Moments | None]
        if said.num_samples == 1:
            sample = self._successive.moments(measured, said.scale, loss_scale)
        else:
            # The mean of n gradients: either each was divided by n already, or their sum is still to be.
            local = loss_scale**-2 * (said.num_gradients**2 if said.is_scaled_loss else 1)
            total = loss_scale**-2 / (1 if said.is_scaled_loss else said.num_gradients**2)
            rows = zip(measured.local, measured.total, strict=True)
            sample = [moments(local * one, total * other, said.num_samples, said.scale) for one, other in rows]
        believed = self._believed(sample)
        return before.after(believed, said.smoothing, debias=said.debias, preconditioned=self._by_moments)

    def step_is_taken(self, loss_scale: float) -> None:
        """The step whose gradients are there counts."""
        if self._settings.num_samples == 1:
            self._successive.keep(loss_scale)
        self.begin_anew()

    def begin_anew(self) -> None:
        """What was measured since the last step counts as nothing, or has counted."""
        self._sent.take()
        self.passes, self.is_divided, self._by_moments = 0, False, False
        self.local.forget()

    def forget_last(self) -> None:
        """The next gradients are others than those of the last step."""
        self._successive.forget()

    def unhook(self) -> None:
        """Stops to listen, and lets go of gradients."""
        self.local.unhook()
        self.begin_anew()
        self.forget_last()

    def listen(self, params: Sequence[Tensor]) -> None:
        """Listens to the gradients of these parameters, those of the optimizer in its order."""
        self.meter.check()
        self.local.listen(params)

    def _pass_begins(self) -> None:
        """A backward pass brings its first gradient."""
        if self.passes >= self._settings.num_gradients:
            if any(holder.grad is not None for holder in self.meter.holders):
                raise too_many_gradients(self._settings.num_gradients)
            self.begin_anew()  # The step was left out, as a scaler does, and the gradients were cleared.
        self.local.fails = False

    def _pass_has_ended(self) -> None:
        """The gradients of one more pass are there; after the last one, those of the step are, averaged."""
        self.passes += 1
        if self.passes < self._settings.num_gradients:
            return
        if self._settings.num_samples > 1:
            self._by_moments = self.meter.preconditioned and self._reading.estimates.has_begun
            self._sent.pending = self.meter.send(self.local.sums.values(), by_moments=self._by_moments)
        else:
            self._sent.pending = self.meter.send_products(self._successive.take(self.meter.holders))

    def _believed(self, sample: Sequence[Moments | None]) -> list[Moments | None]:
        """Without what is no number, and what says nothing: gradients that are all zero."""
        numbers = [None if each is None or not any(each) else each for each in sample]
        if all(each is None or all(map(math.isfinite, each)) for each in numbers):
            return numbers
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "AdaScale has measured gradients that are inf or NaN; the gain stays what it was. Where losses are "
                "scaled, step by scaler.step(optimizer), which leaves such a step out",
                stacklevel=4,
            )
        return [each if each is not None and all(map(math.isfinite, each)) else None for each in numbers]
