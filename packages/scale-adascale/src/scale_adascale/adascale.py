"""`AdaScale`: an optimizer around another one, which multiplies its learning rates by the gain of the large batch.

Gradients are measured (`optimizer_wrapper`), `gain` and `step` turn that into estimates (`step_statistics`,
`estimates`, `gain`), and the inner optimizer steps.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from scale_adascale.adam_preconditioner import is_adaptive
from scale_adascale.estimates import Estimates
from scale_adascale.gain import check_scale, gain
from scale_adascale.grad_scaler import scale_of, scaler_of_step
from scale_adascale.noise_scale import NoiseScale, noise_scale
from scale_adascale.norm_reduction import Meter
from scale_adascale.optimizer_wrapper import Listening
from scale_adascale.process_groups import data_group_of, model_group_of
from scale_adascale.step_statistics import Settings, default_smoothing
from scale_adascale.validation import (
    check_num_gradients,
    check_numbers,
    check_optimizer,
    check_plain,
    check_rule,
    check_smoothing,
    check_trains,
)
from scale_core.comm.group import GroupLike, check_not_forgotten


class AdaScale(Listening):
    """Large batches with the learning rates of small ones: wraps any optimizer, and is one to schedulers and scalers.

        >>> import torch
        >>> from scale_adascale import AdaScale
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        >>> for sample in ([1.0, 0.0], [0.0, 1.0]):
        ...     (model(torch.tensor(sample)).sum() / 2).backward()
        >>> round(optimizer.gain(), 6)  # These gradients have nothing in common: one step is worth two.
        2.0
        >>> optimizer.step()

    Each backward pass of each rank is one sample of the gradient's noise. Under FSDP, ShardedDataParallel and tensor or
    pipeline parallelism the numbers are those of one process: each rank measures its own gradient before it is reduced.

    Args:
        optimizer: What steps, on parameters, shards or, as OSS, on parts of parameters.
        world_size: FairScale's: the number of data parallel ranks, which is that of `process_group`.
        scale: How many times the batch of a step is as large as the one whose learning rate and schedule are used;
            `world_size * num_gradients_to_accumulate` if None.
        smoothing: The part of moving averages that stays at each step; `1 - world_size * num_gradients_to_accumulate /
            1000` if None, and 0 at least.
        num_gradients_to_accumulate: Backward passes between two steps. With one, and one rank, gradients of
            successive steps are compared (see `scale_adascale.halves` for the other way).
        is_scaled_loss: Losses are divided by that number. Otherwise `scale_grad_by_num_grads_to_accum()` must be called
            before each step.
        debias_ewma: Moving averages are divided by the part of them that was filled, as Adam does; otherwise they begin
            as plain means.
        process_group: The ranks that have other data: all that share the gradients, the default group if None; of a
            `DistributedPipe` over all ranks, this one alone.
        model_parallel_group: The ranks that have other parts of the model for the same data: those of tensor and
            pipeline parallelism. None is the group over which parameters are split beside `process_group`, or that of
            the `DistributedPipe`, if there is one.
        power: Learning rates are multiplied by gain ** power. 1 if None, as for SGD; 0.5 for Adam and AdamW; of others
            that divide gradients by something, such as RMSprop, it must be said.
        preconditioned: Measure gradients as Adam and AdamW use them, divided by the root of the mean second moment of
            their tensor. None is whether they are Adam's or AdamW's.

    Attributes:
        progress: Steps of the small batch that the training is worth so far: the sum of the gains of its steps.

    Raises:
        RuntimeError: A launcher has started several ranks, and torch.distributed is not initialised.
        TypeError: `optimizer` is no optimizer, or an AdaScale, or LBFGS.
        ValueError: A number out of its range, groups that do not fit, or an optimizer whose rule must be said.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        process_group: GroupLike = None,
        *,
        model_parallel_group: GroupLike = None,
        power: float | None = None,
        preconditioned: bool | None = None,
    ) -> None:
        if process_group is None and world_size is None:
            check_not_forgotten()
        check_optimizer(optimizer, AdaScale)
        data = data_group_of(optimizer, process_group)
        check_numbers(data, world_size, num_gradients_to_accumulate, power)
        check_plain(optimizer)
        check_rule(optimizer, data, power, preconditioned)
        check_smoothing(smoothing)
        samples = data.size * num_gradients_to_accumulate
        check_scale(samples if scale is None else scale)
        model = model_group_of(optimizer, data, model_parallel_group)
        check_trains(optimizer, data, model)
        as_adam = is_adaptive(optimizer) if preconditioned is None else preconditioned
        meter = Meter(optimizer, data, model, preconditioned=as_adam)
        settings = Settings(
            num_ranks=data.size,
            num_gradients=num_gradients_to_accumulate,
            scale=float(samples if scale is None else scale),
            smoothing=default_smoothing(samples) if smoothing is None else smoothing,
            is_scaled_loss=is_scaled_loss,
            debias=debias_ewma,
        )
        super().__init__(optimizer, meter, settings)
        self._power = power if power is not None else (0.5 if is_adaptive(optimizer) else 1.0)
        self._scaler: weakref.ref[GradScaler] | None = None

    # The gain.

    def gain(self, pg_idx: int | None = None) -> float:
        """Returns how many steps of the small batch the step is worth whose gradients are there, or else the last one.

        Args:
            pg_idx: The number of a parameter group; None is all of them together.

        Raises:
            IndexError: There is no such group.
        """
        estimates = self._estimates()
        if pg_idx is None:
            return gain(estimates.together(), self._settings.scale)
        if not 0 <= pg_idx < len(estimates.groups):
            raise IndexError(
                f"expected the number of one of {len(estimates.groups)} parameter groups, from 0, got {pg_idx}: leave "
                "it out for all of them together"
            )
        return gain(estimates.groups[pg_idx].moments, self._settings.scale)

    def noise_scale(self, base_batch_size: float, confidence: float = 0.95) -> NoiseScale:
        """Returns the gradient noise scale in samples, about the critical batch size, and how sure that is.

        For Adam it is that of preconditioned gradients, which has no theory behind it.

        Args:
            base_batch_size: How many samples a batch of scale 1 has.
            confidence: How often the interval is to hold the true value.

        Raises:
            ValueError: A number out of its range.
        """
        return noise_scale(self._estimates().noise, base_batch_size, confidence)

    # The step.

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps with the inner optimizer, its learning rates multiplied by the gain of each parameter group.

        Args:
            *args: A closure that runs all backward passes of the step and returns the loss, if anything.
            **kwargs: The same, and what the inner optimizer's `step` takes.

        Returns:
            What the closure, or the inner optimizer, has returned.

        Raises:
            RuntimeError: Not all backward passes have come since the last step, or gradients were not divided.
        """
        closure = args[0] if args else kwargs.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_due():
            self._scaler = scaler_of_step()
            loss_scale = scale_of(self._scaler)
            estimates = self._sampling.estimates(loss_scale, is_step=True)
            self._sampling.step_is_taken(loss_scale)
            worth = gain(estimates.together(), self._settings.scale)
            self._reading.write(estimates.with_progress(worth, scaled=self._scaler is not None))
        elif self._is_unhooked and any(group["lr"] for group in self.param_groups):
            self._reading.write(self._reading.estimates.with_progress(self.gain(), scaled=self._scaler is not None))
        rates = [group["lr"] for group in self.param_groups]
        try:
            for number, group in enumerate(self.param_groups):
                group["lr"] = group["lr"] * self.gain(number) ** self._power
            result = self._optimizer.step(*args[1:], **kwargs)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return result if closure is None else loss

    # What may be changed between steps.

    @property
    def scale(self) -> float:
        """How many times the batch of a step is as large as that of scale 1."""
        return self._settings.scale

    @property
    def smoothing(self) -> float:
        """The part of moving averages that stays at each step."""
        return self._settings.smoothing

    @property
    def progress(self) -> float:
        """Steps of the small batch that the training is worth so far."""
        return self._reading.estimates.progress

    @property
    def num_gradients_to_accumulate(self) -> int:
        """Backward passes between two steps."""
        return self._settings.num_gradients

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Changes the scale.

        Args:
            scale: At least 1.
            update_estimate: Multiply the averaged variance by old / new scale, as FairScale does. Where the batch grows
                and the small batch that it is compared with stays, the variance of that one stays, too: pass False.
                The noise scale is that of the batches as they are: with True, passes are taken to have as many samples
                as before, and the small batch to be the one of a step over `scale`.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
            ValueError: The scale is below 1.
        """
        self._check_at_rest("set_scale", "Don't change scale in backward phase")
        check_scale(scale)
        if update_estimate:
            self._reading.write(self._reading.estimates.at_scale(self._settings.scale, scale))
        self._sampling.batches_change(scale=float(scale), is_small_batch_kept=not update_estimate)

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Changes the number of backward passes between two steps; the scale mostly has to be set, too.

        Args:
            num_gradients_to_accumulate: At least 1.
            update_smoothing: Take the default smoothing for it.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
            ValueError: The number is below 1.
        """
        self._check_at_rest("set_num_gradients_to_accumulate", "Don't change num_grad_to_accum in backward")
        check_num_gradients(num_gradients_to_accumulate)
        self._sampling.batches_change(num_gradients=int(num_gradients_to_accumulate))
        self._sampling.forget_last()  # The next gradient may be that of another batch.
        if update_smoothing:
            self._settings.smoothing = default_smoothing(self._settings.num_samples)

    def _estimates(self) -> Estimates:
        """With the gradients that are there already, if those of a whole step are, and their scale is known."""
        if self._scaler is None and self._reading.estimates.is_scaled:
            return self._reading.estimates  # Loaded: which scaler there is, its first step will tell.
        return self._sampling.estimates(scale_of(self._scaler))


class AdaScaleWrapper(AdaScale):
    """An `AdaScale` around an optimizer that it builds from parameters.

        >>> import torch
        >>> from scale_adascale import AdaScaleWrapper
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdaScaleWrapper(model.parameters(), num_gradients_to_accumulate=4, lr=0.1, momentum=0.9)
        >>> optimizer.scale
        4.0

    Args:
        params: For the optimizer.
        world_size: As in `AdaScale`, and so are those below up to `debias_ewma`.
        scale: As there.
        smoothing: As there.
        num_gradients_to_accumulate: As there.
        debias_ewma: As there.
        optim_cls: The class of the optimizer.
        is_scaled_loss: As in `AdaScale`, and so are those below.
        process_group: As there.
        model_parallel_group: As there.
        power: As there.
        preconditioned: As there.
        **additional_optim_args: For the optimizer.

    Raises:
        TypeError: As in `AdaScale`.
        ValueError: As in `AdaScale`.
    """

    def __init__(
        self,
        params: Any,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        *,
        is_scaled_loss: bool = True,
        process_group: GroupLike = None,
        model_parallel_group: GroupLike = None,
        power: float | None = None,
        preconditioned: bool | None = None,
        **additional_optim_args: Any,
    ) -> None:
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size=world_size,
            scale=scale,
            smoothing=smoothing,
            num_gradients_to_accumulate=num_gradients_to_accumulate,
            is_scaled_loss=is_scaled_loss,
            debias_ewma=debias_ewma,
            process_group=process_group,
            model_parallel_group=model_parallel_group,
            power=power,
            preconditioned=preconditioned,
        )
