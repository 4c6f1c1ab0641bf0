"""The gradients of one step as a sample of their noise: from the first backward pass to the updated estimates."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from scale_adascale.estimates import Estimates, EstimatorState, NoiseAverage
from scale_adascale.gain import Moments, moments, moments_of_two
from scale_adascale.measurement.errors import (
    changed_gradients_text,
    leftover_gradients_text,
    no_step_error,
    too_many_error,
)
from scale_adascale.measurement.local_grad_norms import LocalGradNorms
from scale_adascale.measurement.norm_reduction import NormReducer
from scale_adascale.squared_norms import stored_values
from scale_core import compat
from scale_core.comm.work import CollectiveWork
from scale_core.hooks.microbatch_grads import StepSignature
from scale_core.shard import as_local

# Whether gradients are the measured ones is known without a look at most values: a tensor is itself as long as it
# lives, and counts its changes.


class GradVersion(NamedTuple):
    """One gradient as it was."""

    tensor: weakref.ref[Tensor]
    address: int
    version: int  # how many times it was written to

    def matches(self, grad: Tensor) -> bool:
        """Whether a gradient is that one, unchanged."""
        return self.tensor() is grad and (self.address, self.version) == _address_and_version(grad)


# The gradients of the same parameters, in the same order, None where there is none; and the versions they have had.
Grads = Sequence[Tensor | None]
Versions = Sequence[GradVersion | None]


def versions_of(grads: Grads) -> Versions:
    """Gradients as they are now."""
    return [
        None
        if grad is None or grad.layout not in (torch.strided, torch.sparse_coo)
        else GradVersion(weakref.ref(grad), *_address_and_version(grad))
        for grad in grads
    ]


def are_zero(grads: Grads, zeros: Versions = ()) -> bool:
    """Whether all are None, known `zeros`, or zero; waits for the device if values have to be read."""
    pairs = zip_longest(grads, zeros)
    unknown = [grad for grad, zero in pairs if grad is not None and (zero is None or not zero.matches(grad))]
    if not unknown:
        return True
    counts = [torch.count_nonzero(stored_values(grad.detach())).to(unknown[0].device) for grad in unknown]
    (number,) = compat.values_of(torch.stack(counts).sum().double().reshape(1), simulated=[0.0])
    return not number


def were_changed(before: Versions, grads: Grads, *, alone: bool, pass_failed: bool) -> bool:
    """Whether one was changed or cleared; a pass that has failed may have added to some.

    Where this rank is not `alone`, a reducer of gradients may write to them between passes.
    """
    for last, now in zip(before, grads, strict=False):
        if last is None:
            is_changed = pass_failed and now is not None
        else:
            is_changed = now is None or ((alone or pass_failed) and not last.matches(now))
        if is_changed:
            return True
    return False


def has_new(grads: Grads, zeros: Versions, of_step: Versions = ()) -> bool:
    """Whether any is neither one of the zeros that were written nor the gradient of the last step."""
    return any(
        now is not None and not any(snapshot is not None and snapshot.matches(now) for snapshot in (zero, stepped))
        for now, zero, stepped in zip_longest(grads, zeros, of_step)
    )


def _address_and_version(grad: Tensor) -> tuple[int, int]:
    values = grad if grad.layout is torch.strided else grad._values()
    return values.data_ptr(), grad._version


class ConsecutiveGradients:
    """The last step's gradients, kept for the noise of one worker that accumulates nothing.

    One gradient per step does not tell how noisy it is, so the gradients of successive steps are compared. They are
    computed with other weights: the change of the weights in between counts as noise. The other way is
    `batch_size.halves`.
    """

    def __init__(self) -> None:
        self._last: list[Tensor | None] | None = None
        self._new: list[Tensor | None] = []
        self._were_trained: list[bool] = []  # in the last step
        self._are_trained: list[bool] = []

    @property
    def has_last(self) -> bool:
        return self._last is not None

    def update(self, holders: Sequence[Tensor], trained: Sequence[bool]) -> tuple[list[Tensor | None], frozenset[int]]:
        """Copies the gradients that a pass has brought; returns the gradients of the step before.

        Also returns the indices of parameters that were frozen in one of both steps, which are not compared.
        """
        self._new = [None if holder.grad is None else holder.grad.detach().clone() for holder in holders]
        self._are_trained = list(trained)
        if self._last is None:
            return [None] * len(holders), frozenset()
        pairs = enumerate(zip(self._were_trained, trained, strict=True))
        return self._last, frozenset(index for index, (was, now) in pairs if not (was and now))

    def moments(self, measured: Sequence[Sequence[float]], scale: float, loss_scale: float) -> list[Moments | None]:
        """The moments of each group of batches of this scale, or None where there was no step before.

        `measured` has the products of both gradients, |last|^2 and |new|^2, by group. The loss of the new gradient was
        multiplied by `loss_scale`; the older gradient has no such factor.
        """
        rows = zip(*measured, strict=True)
        if self._last is None:
            return [None for _ in rows]
        return [moments_of_two(last, new / loss_scale**2, product / loss_scale, scale) for product, last, new in rows]

    def commit(self, loss_scale: float) -> None:
        """The step was taken: the next one is compared with it."""
        self._last, self._new, self._were_trained = self._new, [], self._are_trained
        if loss_scale != 1.0:
            torch._foreach_div_([grad for grad in self._last if grad is not None], loss_scale)

    def reset(self) -> None:
        self._last = None


@dataclass
class Settings:
    """The user's options; may change between two steps."""

    num_ranks: int  # with other data
    num_gradients: int  # backward passes between two steps
    scale: float  # how many times the batch of a step is as large as that of scale 1
    smoothing: float  # the part of moving averages that stays at each step
    is_scaled_loss: bool  # Losses are divided by `num_gradients`.
    debias: bool  # as in `Average.updated`

    @property
    def num_samples(self) -> int:
        """How many gradients a step averages, each computed alone."""
        return self.num_ranks * self.num_gradients


def default_smoothing(num_samples: int) -> float:
    """The smoothing for steps of so many gradients; the more there are, the less has to be averaged."""
    return max(1 - num_samples / 1000, 0.0)


@dataclass
class _GeometryChange:
    """The noise average when settings were first changed after a step, so that several changes are one."""

    noise_before: NoiseAverage
    noise_after: NoiseAverage  # as it is now; another one is there once a step was taken
    scale_per_pass: float  # by which the variance of the small batch goes
    is_small_batch_kept: bool


class StepStatistics:
    """Measures the gradients of a step, and turns that into estimates."""

    def __init__(self, reducer: NormReducer, settings: Settings, state: EstimatorState) -> None:
        self.is_hooked = True  # It measures.
        self._pending: CollectiveWork | None = None  # the sum over all ranks, from the end of the last pass on
        self._rows: list[list[float]] = []  # its values, when it was waited for
        self.reducer, self._settings, self._state = reducer, settings, state
        self.passes = 0  # that have ended since the last step; of a pipeline's step, its micro-batches
        self.is_divided = False  # The gradients were divided by their number, where losses were not.
        self._by_moments = self._has_warned = False
        self.consecutive = ConsecutiveGradients()
        self._geometry: _GeometryChange | None = None
        self._versions: Versions = ()  # of gradients after the last pass of a step, or of zeros that were written
        self._step_versions: Versions = ()  # of those that the last step was made with
        self._squared_weights = 0.0  # of the samples so far, each relative to that of samples of the same size
        self._refused: str | None = None  # why no more passes of this step can come
        self._unmeasured: str | None = None  # why the passes since the last step are not measured
        self._is_late = False  # The last pass was found by the averages of others.
        self.local = LocalGradNorms(self._begin_pass, self._end_pass, self._terms)

    def __del__(self) -> None:
        if self._pending is not None:  # With the optimizer goes who would wait for it.
            self._pending.cancel()

    # A backward pass.

    def register_hooks(self) -> None:
        """Measures the gradients of all parameters that train now, unless hooks were removed."""
        if self.is_hooked:
            self.reducer.refresh()
            with as_local():
                self.local.register_hooks(self.reducer.info.params)

    def _begin_pass(self) -> None:
        """A backward pass brings its first gradient."""
        number = self._settings.num_gradients
        self.reducer.refresh()
        if self.passes >= number:
            if any(holder.grad is not None for holder in self.reducer.info.holders):
                raise too_many_error(number, None if self.local.step is not None else self.passes + 1)
            self.reset()  # The step was left out, as a scaler does, and the gradients were cleared.
        self._unmeasured = None
        if not self.passes and self.local.step is None and not self.local.left_partial_grads:
            # Nothing is wrong as long as no step is taken, as where the loss of another model goes through this one.
            self._unmeasured = self._refusal()
            return
        if self._refused is None:
            self._refused = self._refusal()
        if self._refused is not None:
            raise RuntimeError(self._refused)

    def _refusal(self) -> str | None:
        """The mistake in gradients to which a pass is about to add: the first, or another one of a step."""
        grads, pass_failed = self._grads(), self.local.left_partial_grads
        if not self.passes:
            return None if are_zero(grads, self._versions) else leftover_gradients_text(pass_failed=pass_failed)
        alone = self._settings.num_ranks == 1
        if self.local.grads_restored or not were_changed(self._versions, grads, alone=alone, pass_failed=pass_failed):
            return None
        return changed_gradients_text(self.passes, self._settings.num_gradients, pass_failed=pass_failed)

    def _grads(self) -> list[Tensor | None]:
        """Of full parameters; sharded ones may be anywhere between passes."""
        return self.local.grads_of(self.reducer.info.holders)

    def _terms(self) -> StepSignature:
        """The values that must be equal on ranks of a pipeline that add up measurements when a step ends."""
        number = len(self._state.estimates.groups)
        groups = f"{number} parameter group{'s' if number > 1 else ''}"
        as_adam = ", as Adam uses them" if self.reducer.preconditioned and self._state.estimates.has_begun else ""
        passes = f"{self.passes} of {self._settings.num_gradients} passes{as_adam}"
        return StepSignature(self.reducer.model.ranks, f"{groups} after {passes}")

    def _end_pass(self, weights: Sequence[float]) -> None:
        """The averaged gradients of one more pass are there, with the weight of each sample in their mean."""
        if self._unmeasured is not None:
            return
        came = self.passes + len(weights)
        if came > self._settings.num_gradients:
            self.local.failed = True
            raise too_many_error(self._settings.num_gradients, came)
        self.local.add_pass()
        self._squared_weights += sum((len(weights) * weight) ** 2 for weight in weights)
        self.passes = came
        if came < self._settings.num_gradients:
            self._versions = versions_of(self._grads())
            return
        try:
            self.local.check_reduced(self.reducer.info.holders)
            self._pending = self._start_reduction()
        except BaseException:  # Nothing was sent: there is no step to take.
            self.passes = came - len(weights)
            self.local.failed = self.local.left_partial_grads = True
            raise

    def _start_reduction(self) -> CollectiveWork:
        """Starts to add up the measurements of all ranks."""
        uncounted = self.local.counted_elsewhere
        if self._settings.num_samples > 1:
            self._by_moments = self.reducer.preconditioned and self._state.estimates.has_begun
            squares = self.local.squared_norms.values()
            return self.reducer.start(squares, by_moments=self._by_moments, uncounted=uncounted)
        # A step before has given Adam its moments; both gradients are divided by the present ones.
        self._by_moments = self.reducer.preconditioned and self.consecutive.has_last
        trained = [param.requires_grad for param in self.reducer.info.params]
        last, not_in_both = self.consecutive.update(self.reducer.info.holders, trained)
        return self.reducer.start_consecutive(last, by_moments=self._by_moments, uncounted=uncounted | not_in_both)

    # The step.

    def check_measured(self) -> None:
        """Raises RuntimeError if a pass has added to gradients that were there before the first one."""
        if self._unmeasured is not None:
            raise RuntimeError(self._unmeasured)

    def count_zero_gradient_pass(self) -> None:
        """Counts a pass that brought gradients on other ranks alone, which have averaged them with zeros here.

        So it is where a batch leaves out all layers whose gradients are measured: no hook is called then.
        """
        if self.passes or not self._may_count_late or self.local.in_backward or self.local.failed:
            return
        with as_local():
            self.reducer.refresh()
            if has_new(self._grads(), self._versions, self._step_versions):
                self.local.drop_pass()
                self._end_pass((1.0,))
                self._is_late = True

    @property
    def _may_count_late(self) -> bool:
        # Of a step with several passes one could still be to come.
        return self._settings.num_ranks > 1 and self._settings.num_gradients == 1

    def estimates(self, loss_scale: float, *, is_step: bool = False) -> Estimates:
        """The estimates with the step whose gradients are there, if any; their losses had this factor.

        Where the step is taken it warns of gradients that are no numbers; a scaler takes no such step.
        """
        if self._pending is not None:
            self._rows, self._pending = self.reducer.read(self._pending), None
        if not self._rows:
            return self._state.estimates
        settings = self._settings
        sample: Sequence[Moments | None]
        if settings.num_samples == 1:
            sample = self.consecutive.moments(self._rows, settings.scale, loss_scale)
        else:
            local_squares, total_squares = self._rows
            if self._is_late and not any(local_squares) and any(total_squares):  # On no rank there was any.
                raise no_step_error(0, settings.num_gradients, self.local)
            # The mean of n gradients: either each was divided by n already, or their sum is still to be.
            local = loss_scale**-2 * (settings.num_gradients**2 if settings.is_scaled_loss else 1)
            total = loss_scale**-2 / (1 if settings.is_scaled_loss else settings.num_gradients**2)
            # Weighted samples of other sizes tell as much as this number of samples of one size.
            number = settings.num_samples * settings.num_gradients / self._squared_weights
            local *= (number / settings.num_samples) ** 2
            rows = zip(local_squares, total_squares, strict=True)
            sample = [moments(local * one, total * other, number, settings.scale) for one, other in rows]
        overlap = 2 if settings.num_samples == 1 else 1
        finite = self._drop_nonfinite(sample, warn=is_step)
        return self._state.estimates.updated(
            finite, settings.smoothing, debias=settings.debias, preconditioned=self._by_moments, overlap=overlap
        )

    def _drop_nonfinite(self, sample: Sequence[Moments | None], *, warn: bool) -> list[Moments | None]:
        """Drops moments that are no numbers, and moments of gradients that are all zero."""
        nonzero = [row if row is not None and any(row) else None for row in sample]
        finite = [row if row is not None and all(map(math.isfinite, row)) else None for row in nonzero]
        if warn and finite != nonzero and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "AdaScale has measured gradients that are inf or NaN; the gain stays what it was. Where losses are "
                "scaled, step by scaler.step(optimizer), which leaves such a step out",
                stacklevel=4,
            )
        return finite

    def commit_step(self, loss_scale: float) -> None:
        """The step whose gradients are there counts."""
        with as_local():
            if self._settings.num_samples == 1:
                self.consecutive.commit(loss_scale)
            self.reset()
            if self._may_count_late:
                self._step_versions = versions_of(self._grads())

    def reset(self) -> None:
        """Drops the measurements since the last step."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        self._rows, self.passes, self.is_divided, self._by_moments = [], 0, False, False
        self._squared_weights, self._refused, self._unmeasured, self._is_late = 0.0, None, None, False
        self._versions = ()
        self.local.reset()

    # Between two steps.

    def on_zero_grad(self, *, to_zeros: bool) -> None:
        """Gradients were just cleared: whether they are zeros need not be read."""
        if to_zeros:
            with as_local():
                self._versions = versions_of(self._grads())
        else:
            self._step_versions = ()

    def set_batch_geometry(
        self, *, scale: float | None = None, num_gradients: int | None = None, is_small_batch_kept: bool | None = None
    ) -> None:
        """Changes the settings, and the noise average to the average for the batch that has scale 1 from now on.

        A pass is taken to have as many samples as before; then the small batch is the batch of a step over the scale,
        unless `is_small_batch_kept` for one of the changes between two steps. None leaves each unchanged.
        """
        settings, estimates = self._settings, self._state.estimates
        if self._geometry is None or self._geometry.noise_after is not estimates.noise:
            scale_per_pass = settings.scale / settings.num_gradients
            self._geometry = _GeometryChange(estimates.noise, estimates.noise, scale_per_pass, False)
        change = self._geometry
        settings.scale = settings.scale if scale is None else scale
        settings.num_gradients = settings.num_gradients if num_gradients is None else num_gradients
        change.is_small_batch_kept = change.is_small_batch_kept if is_small_batch_kept is None else is_small_batch_kept
        factor = 1.0 if change.is_small_batch_kept else settings.scale / settings.num_gradients / change.scale_per_pass
        change.noise_after = change.noise_before.with_variance_scaled(factor)
        self._state.store(replace(estimates, noise=change.noise_after))

    def remove_hooks(self) -> None:
        """Stops to measure, and drops gradients."""
        self.is_hooked = False
        self.local.remove_hooks()
        self.reset()
        self.consecutive.reset()
