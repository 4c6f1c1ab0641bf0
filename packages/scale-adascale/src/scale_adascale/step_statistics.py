"""The gradients of one step as a sample of their noise: from the first backward pass to what it adds to estimates."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scale_adascale.estimates import Estimates, Reading
from scale_adascale.gain import Moments, moments, moments_of_two
from scale_adascale.gradient_checks import Marks
from scale_adascale.local_grad_norms import LocalGrads
from scale_adascale.noise_scale import NoiseAverage
from scale_adascale.norm_reduction import Compared, Meter, Sent
from scale_adascale.validation import gradients_were_changed, gradients_were_there, refuse_step, too_many_gradients
from scale_core.microbatch_grads import Terms

# One worker that accumulates nothing: one gradient per step, of which alone nobody knows how noisy it is.
#
# So the gradients of successive steps are compared. They are those of other weights, so what the weights have moved in
# between counts as noise; and the last gradient is kept, as large as the parameters. The other way out is `halves`.


class Successive:
    """The gradient of the last step, and what it says beside that of this one."""

    def __init__(self) -> None:
        self._last: list[Tensor | None] | None = None
        self._new: list[Tensor | None] = []
        self._were_trained: list[bool] = []  # in the last step
        self._are_trained: list[bool] = []

    @property
    def has_last(self) -> bool:
        """Whether there was a step to compare with."""
        return self._last is not None

    def take(self, holders: Sequence[Tensor], trained: Sequence[bool]) -> tuple[list[Tensor | None], frozenset[int]]:
        """Keeps a copy of the gradients that a pass has brought; returns those of the step before it, or none.

        Args:
            holders: What has the gradients of the k parameters.
            trained: Which of these are not frozen.

        Returns:
            The gradients of the step before, and the numbers of what has a gradient in one step alone, since it is
            frozen or was: it is not compared.
        """
        self._new = [None if holder.grad is None else holder.grad.detach().clone() for holder in holders]
        self._are_trained = list(trained)
        if self._last is None:
            return [None] * len(holders), frozenset()
        pairs = enumerate(zip(self._were_trained, trained, strict=True))
        return self._last, frozenset(number for number, (was, now) in pairs if not (was and now))

    def moments(self, measured: Compared, scale: float, loss_scale: float) -> list[Moments | None]:
        """Returns the moments of each group, or None where there was no step before.

        Args:
            measured: Of both gradients, the older one without the scale of its loss.
            scale: Of one batch.
            loss_scale: What the loss of the new one was multiplied by.
        """
        if self._last is None:
            return [None] * len(measured.product)
        return [
            moments_of_two(last, new / loss_scale**2, product / loss_scale, scale)
            for product, last, new in zip(*measured, strict=True)
        ]

    def keep(self, loss_scale: float) -> None:
        """The step was taken: the next one is compared with it."""
        self._last, self._new, self._were_trained = self._new, [], self._are_trained
        if loss_scale != 1.0:
            torch._foreach_div_([grad for grad in self._last if grad is not None], loss_scale)

    def forget(self) -> None:
        """Compares the next gradient with nothing."""
        self._last = None


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


@dataclass
class _Before:
    """What was known of noise when the settings were changed first after a step, so that two changes are one.

    Attributes:
        noise: As it was.
        after: As it is now; another one is there when a step was taken.
        batches_per_pass: Small batches in a pass, scale over passes, by which the variance of the small batch goes.
        is_kept: The small batch stays what it was.
    """

    noise: NoiseAverage
    after: NoiseAverage
    batches_per_pass: float
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
        self._marks = Marks()
        self._squared_weights = 0.0  # of the samples so far, each beside that of samples of the same size
        self._refused: str | None = None  # why no more passes of this step can come
        self._unmeasured: str | None = None  # why the passes since the last step are of none
        self._is_late = False  # The last pass was found by what others have averaged.
        self._sent = Sent()
        weakref.finalize(self, self._sent.abandon)  # Whoever drops an optimizer has nobody left who would wait.
        self.local = LocalGrads(self._pass_begins, self._pass_has_ended, self._terms)

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
            if self._is_late and not any(measured.local) and any(measured.total):  # On no rank there was any.
                refuse_step(0, said.num_gradients, self.local)
            # The mean of n gradients: either each was divided by n already, or their sum is still to be.
            local = loss_scale**-2 * (said.num_gradients**2 if said.is_scaled_loss else 1)
            total = loss_scale**-2 / (1 if said.is_scaled_loss else said.num_gradients**2)
            # Samples of other sizes, of which each counts so much, tell as much as so many of the same size.
            number = said.num_samples * said.num_gradients / self._squared_weights
            local *= (number / said.num_samples) ** 2
            rows = zip(measured.local, measured.total, strict=True)
            sample = [moments(local * one, total * other, number, said.scale) for one, other in rows]
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
        if self._may_count_late:
            self._marks.set_at_step(self._grads())

    def begin_anew(self) -> None:
        """What was measured since the last step counts as nothing, or has counted."""
        self._sent.take()
        self.passes, self.is_divided, self._by_moments = 0, False, False
        self._marks.forget()
        self._squared_weights, self._refused, self._unmeasured, self._is_late = 0.0, None, None, False
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
        factor = 1.0 if before.is_kept else said.scale / said.num_gradients / before.batches_per_pass
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
        self.meter.look_up()
        self.local.listen(params)

    def count_pass_without_gradients(self) -> None:
        """Counts a pass of all ranks that brought gradients on others alone, which have averaged them with zeros here.

        That is so where a batch leaves out all layers whose gradients are measured: no hook is called then. Only where
        a step has one pass can it be told from one that is still to come.
        """
        if not self._may_count_late or self.passes or self.local.is_in_pass or self.local.fails:
            return
        if self._marks.have_come(self._grads()):
            self.local.drop_pass()
            self._pass_has_ended((1.0,))
            self._is_late = True

    def check_measured(self) -> None:
        """Refuses a step with gradients that were not measured.

        Raises:
            RuntimeError: A pass has added to gradients that were there before the first one.
        """
        if self._unmeasured is not None:
            raise RuntimeError(self._unmeasured)

    @property
    def _may_count_late(self) -> bool:
        """Whether a pass that brought no gradient here may be counted when the step comes."""
        return self._settings.num_ranks > 1 and self._settings.num_gradients == 1

    def gradients_are_cleared(self, *, to_zeros: bool) -> None:
        """Whoever has just cleared gradients says so, and nobody has to look whether they are zeros."""
        if to_zeros:
            self._marks.set(self._grads())
        else:
            self._marks.forget_step()

    def _pass_begins(self) -> None:
        """A backward pass brings its first gradient."""
        number = self._settings.num_gradients
        self.meter.look_up()
        if self.passes >= number:
            if any(holder.grad is not None for holder in self.meter.holders):
                raise too_many_gradients(number, None if self.local.is_announced else self.passes + 1)
            self.begin_anew()  # The step was left out, as a scaler does, and the gradients were cleared.
        self._unmeasured = None
        if not self.passes and not self.local.is_announced and not self.local.has_left_parts:
            # Nothing is wrong as long as no step is taken, as where the loss of another model goes through this one.
            self._unmeasured = self._why_refused()
            return
        if self._refused is None:
            self._refused = self._why_refused()
        if self._refused is not None:
            raise RuntimeError(self._refused)

    def _why_refused(self) -> str | None:
        """What is wrong with gradients to which a pass is about to add: the first, or another one of a step."""
        grads, torn = self._grads(), self.local.has_left_parts
        if not self.passes:
            return None if self._marks.are_zero(grads) else gradients_were_there(has_failed=torn)
        alone = self._settings.num_ranks == 1
        if self.local.is_restored or not self._marks.are_changed(grads, alone=alone, is_torn=torn):
            return None
        return gradients_were_changed(self.passes, self._settings.num_gradients, has_failed=torn)

    def _grads(self) -> list[Tensor | None]:
        """Of parameters that are whole here; what is sharded, its owner keeps where it will between passes."""
        return [holder.grad if self.local.hearing.is_hooked(holder) else None for holder in self.meter.holders]

    def _terms(self) -> Terms:
        """What the ranks of a pipeline have to have alike that add up what they measure when a step ends."""
        number = len(self._reading.estimates.groups)
        groups = f"{number} parameter group{'s' if number > 1 else ''}"
        as_adam = ", as Adam uses them" if self.meter.preconditioned and self._reading.estimates.has_begun else ""
        passes = f"{self.passes} of {self._settings.num_gradients} passes{as_adam}"
        return Terms(self.meter.model_ranks, f"{groups} after {passes}")

    def _pass_has_ended(self, weights: Sequence[float]) -> None:
        """The gradients of one more pass are there; after the last one, those of the step are, averaged.

        Args:
            weights: What each sample that came with it counts in their mean: 1, or of each micro-batch of a pipeline.
        """
        if self._unmeasured is not None:
            return
        came = self.passes + len(weights)
        if came > self._settings.num_gradients:
            self.local.fails = True
            raise too_many_gradients(self._settings.num_gradients, came)
        self.local.add_pass()
        self._squared_weights += sum((len(weights) * weight) ** 2 for weight in weights)
        self.passes = came
        try:
            self._send_if_whole()
        except BaseException:  # Nothing was sent: there is no step to take.
            self.passes = came - len(weights)
            self.local.fails = self.local.has_left_parts = True
            raise

    def _send_if_whole(self) -> None:
        """Begins to add up what all ranks have measured, when the last pass has ended."""
        if self.passes < self._settings.num_gradients:
            self._marks.set(self._grads())
            return
        if self._settings.num_samples > 1:
            self._by_moments = self.meter.preconditioned and self._reading.estimates.has_begun
            self._sent.pending = self.meter.send(
                self.local.sums.values(), by_moments=self._by_moments, elsewhere=self.local.elsewhere
            )
        else:
            # A step before has given Adam its moments; both gradients are divided by what these are now.
            self._by_moments = self.meter.preconditioned and self._successive.has_last
            trained = [param.requires_grad for param in self.meter.params]
            others, frozen = self._successive.take(self.meter.holders, trained)
            self._sent.pending = self.meter.send_products(
                others, by_moments=self._by_moments, elsewhere=self.local.elsewhere | frozen
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
