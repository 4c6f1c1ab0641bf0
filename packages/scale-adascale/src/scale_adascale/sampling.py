"""The gradients of one step as a sample of their noise: from the first backward pass to what it adds to estimates."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scale_adascale.checks import too_many_gradients
from scale_adascale.estimates import Estimates, Reading
from scale_adascale.gain import Moments, moments
from scale_adascale.local_grads import LocalGrads
from scale_adascale.measuring import Meter, Sent
from scale_adascale.noise import NoiseAverage
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


def _state_of(grad: Tensor | None) -> tuple[int, int] | None:
    """What changes when a gradient is changed or replaced, without a look at its values; None where that is unknown."""
    return None if grad is None or grad.layout is not torch.strided else (grad.data_ptr(), grad._version)


@dataclass
class _Before:
    """What was known of noise when the settings were changed first after a step, so that two changes are one.

    Attributes:
        noise: As it was.
        after: As it is now; another one is there when a step was taken.
        passes_per_batch: Scale over passes, by which the variance of the small batch goes.
        is_kept: The small batch stays what it was.
    """

    noise: NoiseAverage
    after: NoiseAverage
    passes_per_batch: float
    is_kept: bool


class Sampling:
    """Measures the gradients of a step.

    Args:
        meter: Adds up what ranks have measured.
        settings: Read whenever they are needed.
        reading: The estimates of the steps so far.

    Attributes:
        passes: Samples of backward passes that have ended since the last step: one of each, or the micro-batches of a
            pipeline's step.
        is_divided: The gradients were divided by their number, where losses were not.
        local: What listens to them.
    """

    def __init__(self, meter: Meter, settings: Settings, reading: Reading) -> None:
        self.meter, self._settings, self._reading = meter, settings, reading
        self.passes, self.is_divided = 0, False
        self._by_moments = self._has_warned = False
        self._successive = Successive()
        self._before: _Before | None = None
        self._between: list[tuple[int, int] | None] = []
        self._sent = Sent()
        weakref.finalize(self, self._sent.abandon)  # Whoever drops an optimizer has nobody left who would wait.
        self.local = LocalGrads(self._pass_begins, self._pass_has_ended)

    def estimates(self, loss_scale: float, *, is_step: bool = False) -> Estimates:
        """Returns the estimates after the step whose gradients are there; as they are, where there are none.

        Args:
            loss_scale: What a scaler has multiplied the losses by.
            is_step: The step is taken; it warns of gradients that are no numbers, of which a scaler takes none.
        """
        before = self._reading.estimates
        if self._sent.pending is None:
            return before
        said = self._settings
        sample: Sequence[Moments | None]
        if said.num_samples == 1:
            compared = self.meter.read_compared(self._sent.pending)
            sample = self._successive.moments(compared, said.scale, loss_scale)
        else:
            measured = self.meter.read(self._sent.pending)
            # The mean of n gradients: either each was divided by n already, or their sum is still to be.
            local = loss_scale**-2 * (said.num_gradients**2 if said.is_scaled_loss else 1)
            total = loss_scale**-2 / (1 if said.is_scaled_loss else said.num_gradients**2)
            rows = zip(measured.local, measured.total, strict=True)
            sample = [moments(local * one, total * other, said.num_samples, said.scale) for one, other in rows]
        believed = self._believed(sample, warns=is_step)
        overlap = 2 if said.num_samples == 1 else 1
        return before.after(
            believed, said.smoothing, debias=said.debias, preconditioned=self._by_moments, overlap=overlap
        )

    def step_is_taken(self, loss_scale: float) -> None:
        """The step whose gradients are there counts."""
        if self._settings.num_samples == 1:
            self._successive.keep(loss_scale)
        self.begin_anew()

    def begin_anew(self) -> None:
        """What was measured since the last step counts as nothing, or has counted."""
        self._sent.take()
        self.passes, self.is_divided, self._by_moments = 0, False, False
        self._between = []
        self.local.forget()

    def batches_change(
        self, *, scale: float | None = None, num_gradients: int | None = None, is_small_batch_kept: bool | None = None
    ) -> None:
        """Changes the settings, and what is known of noise to that of the batch which has scale 1 from now on.

        A pass is taken to have as many samples as before; then the small batch is that of a step over the scale.

        Args:
            scale: The new one; None if it stays.
            num_gradients: The same.
            is_small_batch_kept: It is the one that it was, whatever else changes until the next step; None if that was
                not said now.
        """
        said, estimates = self._settings, self._reading.estimates
        if self._before is None or self._before.after is not estimates.noise:
            self._before = _Before(estimates.noise, estimates.noise, said.scale / said.num_gradients, is_kept=False)
        before = self._before
        said.scale = said.scale if scale is None else scale
        said.num_gradients = said.num_gradients if num_gradients is None else num_gradients
        before.is_kept = before.is_kept if is_small_batch_kept is None else is_small_batch_kept
        factor = 1.0 if before.is_kept else said.scale / said.num_gradients / before.passes_per_batch
        before.after = before.noise.times(factor)
        self._reading.write(estimates.with_noise(before.after))

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
        self._check_untouched()
        if self.passes >= self._settings.num_gradients:
            if any(holder.grad is not None for holder in self.meter.holders):
                raise too_many_gradients(self._settings.num_gradients)
            self.begin_anew()  # The step was left out, as a scaler does, and the gradients were cleared.
        self.local.fails = False

    def _check_untouched(self) -> None:
        """Refuses gradients that somebody has changed or cleared between two passes of a step."""
        if not 0 < self.passes < self._settings.num_gradients or self.local.fails:
            return
        alone = self._settings.num_ranks == 1  # Otherwise what averages gradients may write to them between passes.
        for before, grad in zip(self._between, self._grads(), strict=False):
            if before is not None and (before != _state_of(grad) if alone else grad is None):
                raise RuntimeError(
                    f"gradients were changed or cleared after {self.passes} of {self._settings.num_gradients} backward "
                    "passes of a step, so that their mean is not that of what was measured: clip them and call "
                    "model.zero_grad() after the last pass only, call optimizer.zero_grad() where a failed pass is "
                    "left out, or build AdaScale(..., num_gradients_to_accumulate=1)"
                )

    def _grads(self) -> list[Tensor | None]:
        """Of parameters that are whole here; what is sharded, its owner keeps where it will between passes."""
        return [holder.grad if self.local.is_hooked(holder) else None for holder in self.meter.holders]

    def _pass_has_ended(self, num_samples: int) -> None:
        """The gradients of one more pass are there; after the last one, those of the step are, averaged.

        Args:
            num_samples: How many came with it: 1, or the micro-batches of a pipeline's step.
        """
        if self.passes + num_samples > self._settings.num_gradients:
            self.local.fails = True
            raise too_many_gradients(self._settings.num_gradients, self.passes + num_samples)
        self.passes += num_samples
        self.local.add_pass()
        if self.passes < self._settings.num_gradients:
            self._between = [_state_of(grad) for grad in self._grads()]
            return
        if self._settings.num_samples > 1:
            self._by_moments = self.meter.preconditioned and self._reading.estimates.has_begun
            self._sent.pending = self.meter.send(
                self.local.sums.values(), by_moments=self._by_moments, elsewhere=self.local.elsewhere
            )
        else:
            # A step before has given Adam its moments; both gradients are divided by what these are now.
            self._by_moments = self.meter.preconditioned and self._successive.has_last
            others = self._successive.take(self.meter.holders)
            self._sent.pending = self.meter.send_products(
                others, by_moments=self._by_moments, elsewhere=self.local.elsewhere
            )

    def _believed(self, sample: Sequence[Moments | None], *, warns: bool) -> list[Moments | None]:
        """Without what is no number, and what says nothing: gradients that are all zero."""
        numbers = [None if each is None or not any(each) else each for each in sample]
        if all(each is None or all(map(math.isfinite, each)) for each in numbers):
            return numbers
        if warns and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "AdaScale has measured gradients that are inf or NaN; the gain stays what it was. Where losses are "
                "scaled, step by scaler.step(optimizer), which leaves such a step out",
                stacklevel=4,
            )
        return [each if each is not None and all(map(math.isfinite, each)) else None for each in numbers]
