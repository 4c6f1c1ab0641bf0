"""`AdaScale`: an optimizer around another one, which multiplies its learning rates by the gain of the large batch.

A step, in the order of time: hooks on parameters measure each local gradient (`local_grad_norms`); when the last pass
has ended the squared norms are summed over all ranks (`norm_reduction`); `step` and `gain` turn the sums into
estimates (`step_statistics`, `estimates`, `gain`), and the inner optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from scale_adascale.adam_preconditioner import is_adaptive
from scale_adascale.estimates import GROUP_KEY, Estimates, EstimatorState, without_fairscale
from scale_adascale.gain import check_scale, gain
from scale_adascale.measurement.errors import (
    middle_of_step_error,
    no_step_error,
    not_divisible_error,
    scaled_loss_error,
    undivided_error,
    uneven_inputs_error,
    unknown_scaler_error,
)
from scale_adascale.measurement.norm_reduction import NormReducer
from scale_adascale.measurement.param_info import data_group_of, model_group_of
from scale_adascale.measurement.step_statistics import Settings, StepStatistics, default_smoothing
from scale_adascale.noise_scale import NoiseScale, noise_scale
from scale_adascale.options import AdaScaleOptions
from scale_adascale.validation import (
    check_num_gradients,
    check_numbers,
    check_optimizer,
    check_rule,
    check_trains,
)
from scale_core import uneven_inputs
from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group, GroupLike
from scale_core.errors import renamed_arguments
from scale_core.shard import as_local
from scale_core.state.param_ownership import ParamSlice

_OPTIONS = {field.name: f"options=AdaScaleOptions({field.name}=...)" for field in fields(AdaScaleOptions)}


class AdaScale(Optimizer):
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
    pipeline parallelism the numbers are the same as on one process: each rank measures its own gradient before it is
    reduced.

    Args:
        optimizer: The inner optimizer, of parameters, shards or, as OSS, on parts of parameters.
        world_size: FairScale's: the number of data parallel ranks, which is the size of `process_group`.
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
        process_group: The ranks that have different data and share the gradients. None is the default group, or only
            this rank if all ranks are stages of one `DistributedPipe`. A ParallelDims gives the ranks of `loss`.
        model_parallel_group: The ranks that have other parts of the model for the same data: the ranks of tensor and
            pipeline parallelism. None is the group over which parameters are split in addition to `process_group`, or
            the group of the `DistributedPipe`, if there is one. Of a ParallelDims these are the ranks of `pp` and `tp`.
        options: The power of the gain, how gradients are measured, and the gradient scaler: see `AdaScaleOptions`.

    Attributes:
        grad_scaler: May be set later, before the first backward pass, as where a trainer builds it.
        progress: Steps of the small batch that the training is worth so far: the sum of the gains of its steps.

    Raises:
        RuntimeError: A launcher has started several ranks, and torch.distributed is not initialized.
        TypeError: `optimizer` is not an optimizer, or an AdaScale, or LBFGS, or has DTensors.
        ValueError: A number out of its range, groups that do not fit, or an optimizer whose rule must be said.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """

    listens_to_gradients = True  # OSS refuses a class that has this: no backward brings gradients to its pieces.

    @checked_arguments(own="optimizer scale smoothing num_gradients_to_accumulate")
    @renamed_arguments(**_OPTIONS)
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
        options: AdaScaleOptions | None = None,
    ) -> None:
        if process_group is None and world_size is not None and not dist.is_initialized():
            process_group = Group()  # Somebody else reduces the gradients.
        options = options or AdaScaleOptions()
        power, preconditioned = options.power, options.preconditioned
        check_optimizer(optimizer, AdaScale)
        data = data_group_of(optimizer, process_group)
        check_numbers(data, world_size, num_gradients_to_accumulate, power, smoothing)
        check_rule(optimizer, data, power, preconditioned)
        samples = data.size * num_gradients_to_accumulate
        check_scale(samples if scale is None else scale)
        model = model_group_of(optimizer, data, model_parallel_group)
        check_trains(optimizer, data, model)
        is_adam = is_adaptive(optimizer)
        reducer = NormReducer(
            optimizer, data, model, preconditioned=is_adam if preconditioned is None else preconditioned
        )
        self._optimizer = optimizer
        super().__setstate__({"defaults": optimizer.defaults, **_state_hooks(optimizer)})
        self.grad_scaler = options.grad_scaler
        self._power = power if power is not None else (0.5 if is_adam else 1.0)
        self._settings = Settings(
            num_ranks=data.size,
            num_gradients=num_gradients_to_accumulate,
            scale=float(samples if scale is None else scale),
            smoothing=default_smoothing(samples) if smoothing is None else smoothing,
            is_scaled_loss=is_scaled_loss,
            debias=debias_ewma,
        )
        self._state = EstimatorState(optimizer)
        self._statistics = StepStatistics(reducer, self._settings, self._state)
        self._statistics.register_hooks()

    # The inner optimizer, whose parameter groups, state and other attributes are shown.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the inner optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer."""
        return self._optimizer.state

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer, by which `ShardedDataParallel` finds an OSS."""
        return self._optimizer

    @property
    def construction(self) -> str:
        """The line that builds it, for errors."""
        return f"AdaScale({type(self._optimizer).__name__}(model.parameters(), ...))"

    def sharded_state(self, holding: ParamSlice) -> ParamSlice:
        """This rank's part of a parameter's state, as the inner optimizer says."""
        inner: Callable[[ParamSlice], ParamSlice] | None = getattr(self._optimizer, "sharded_state", None)
        return holding if inner is None else inner(holding)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an AdaScale can't be copied or pickled, because it has hooks on the parameters of this very model. Copy "
            "the model, build AdaScale(...) for it, and load optimizer.state_dict()"
        )

    # The gain.

    def gain(self, pg_idx: int | None = None) -> float:
        """Returns how many steps of the small batch this step is worth, or the last one before the last backward pass.

        Args:
            pg_idx: The number of a parameter group; None is all of them together.

        Raises:
            IndexError: The group does not exist.
        """
        estimates = self._estimates()
        if pg_idx is None:
            return gain(estimates.total(), self._settings.scale)
        if not 0 <= pg_idx < len(estimates.groups):
            raise IndexError(
                f"expected the number of one of {len(estimates.groups)} parameter groups, from 0, got {pg_idx}. "
                "Leave it out for all of them together"
            )
        return gain(estimates.groups[pg_idx].moments, self._settings.scale)

    def noise_scale(self, base_batch_size: float, confidence: float = 0.95) -> NoiseScale:
        """Returns the gradient noise scale in samples, about the critical batch size, and how sure that is.

        For Adam it is the scale of preconditioned gradients, which has no theory behind it.

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
            **kwargs: The same, and arguments of the inner optimizer's `step`.

        Returns:
            The result of the closure, or of the inner optimizer.

        Raises:
            RuntimeError: Not all backward passes have come since the last step, or gradients were not divided.
        """
        closure = args[0] if args else kwargs.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, scale = self._optimizer.param_groups, self._settings.scale
        rates = [group["lr"] for group in groups]
        loss_scale, is_measured = self._loss_scale(), self._has_step()
        estimates = self._statistics.estimates(loss_scale, is_step=is_measured)
        if is_measured:
            self._statistics.commit_step(loss_scale)
        total, moments = estimates.total(), [average.moments for average in estimates.groups]
        factors = [gain(moment, scale) ** self._power for moment in moments]
        if is_measured or (not self._statistics.is_hooked and any(rates)):
            self._state.store(estimates.with_progress(gain(total, scale)))
        try:
            for group, factor in zip(groups, factors, strict=True):
                group["lr"] = group["lr"] * factor
            result = self._optimizer.step(*args[1:], **kwargs)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        return result if closure is None else loss

    def _has_step(self) -> bool:
        """Whether all gradients of a step are there; False where nothing is measured, or nothing can change.

        Raises RuntimeError if a step would be one with the gradients of some passes only, or with others than measured.
        """
        statistics, number = self._statistics, self._settings.num_gradients
        if not statistics.is_hooked or not (
            statistics.passes or any(group["lr"] for group in self._optimizer.param_groups)
        ):
            return False  # torch's checkpoint functions step once with a learning rate of 0, so that there is a state.
        statistics.check_measured()
        statistics.count_zero_gradient_pass()
        if uneven_inputs.active_share is not None:
            raise uneven_inputs_error()
        if statistics.passes != number or statistics.local.in_backward:
            raise no_step_error(statistics.passes, number, statistics.local)
        if number > 1 and not (self._settings.is_scaled_loss or statistics.is_divided):
            raise undivided_error(number)
        return True

    def _estimates(self) -> Estimates:
        """The estimates with the present gradients, if all gradients of a step are there."""
        return self._statistics.estimates(self._loss_scale())

    def _loss_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A scaler asks before each step. No, even if the inner optimizer does: gradients must be unscaled before it.
        if self.grad_scaler is None:
            raise unknown_scaler_error()
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; their measurements count as nothing, unless a step was taken.

        Raises:
            RuntimeError: More backward passes were to come before the next step.
        """
        if not self._statistics.local.failed:
            self._check_between_steps("zero_grad", "Don't zero_grad in backward")
        self._statistics.reset()
        self._optimizer.zero_grad(set_to_none=set_to_none)
        self._statistics.on_zero_grad(to_zeros=not set_to_none)
        self._statistics.register_hooks()  # On unfrozen parameters.

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divides the gradients by the number of those that were added up, where losses were not.

        Raises:
            RuntimeError: Losses are (`is_scaled_loss`); more backward passes are to come; or it was done already.
        """
        statistics, number = self._statistics, self._settings.num_gradients
        if self._settings.is_scaled_loss:
            raise scaled_loss_error()
        if statistics.passes != number or statistics.is_divided:
            raise not_divisible_error(statistics.passes, number, is_divided=statistics.is_divided)
        statistics.is_divided = True
        with as_local():
            grads = [holder.grad for holder in statistics.reducer.info.holders if holder.grad is not None]
            if grads:  # Of small models a rank may have no piece.
                torch._foreach_div_(grads, float(number))

    # Settings that may be changed between steps.

    @property
    def scale(self) -> float:
        """How many times the batch of a step is as large as the batch of scale 1."""
        return self._settings.scale

    @property
    def smoothing(self) -> float:
        """The part of moving averages that stays at each step."""
        return self._settings.smoothing

    @property
    def progress(self) -> float:
        """Steps of the small batch that the training is worth so far."""
        return self._state.estimates.progress

    @property
    def num_gradients_to_accumulate(self) -> int:
        """Backward passes between two steps."""
        return self._settings.num_gradients

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Changes the scale.

        Args:
            scale: At least 1.
            update_estimate: Multiply the averaged variance by old / new scale, as FairScale does. If the batch grows
                and the small batch stays, pass False, because then the variance of the small batch stays. The noise
                scale is measured on the present batches. With True, each pass has the same number of samples as before,
                and the small batch is a step's batch divided by `scale`.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
            ValueError: The scale is below 1.
        """
        self._check_between_steps("set_scale", "Don't change scale in backward phase", before_passes=True)
        check_scale(scale)
        if update_estimate:
            self._state.store(self._state.estimates.at_scale(self._settings.scale, scale))
        self._statistics.set_batch_geometry(scale=float(scale), is_small_batch_kept=not update_estimate)

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Changes the number of backward passes between two steps. You usually have to set the scale, too.

        Args:
            num_gradients_to_accumulate: At least 1.
            update_smoothing: Take the default smoothing for it.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
            ValueError: The number is below 1.
        """
        rule = "Don't change num_grad_to_accum in backward"
        self._check_between_steps("set_num_gradients_to_accumulate", rule, before_passes=True)
        check_num_gradients(num_gradients_to_accumulate)
        self._statistics.set_batch_geometry(num_gradients=int(num_gradients_to_accumulate))
        self._statistics.consecutive.reset()  # The next gradient may be that of another batch.
        if update_smoothing:
            self._settings.smoothing = default_smoothing(self._settings.num_samples)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer; its gain begins at 1.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
        """
        self._check_between_steps("add_param_group", "Can't add parameter group during backward", before_passes=True)
        self._optimizer.add_param_group(param_group)
        self._state.store(self._state.estimates)  # So that each group has some, which checkpoints expect.
        self._statistics.consecutive.reset()
        self._statistics.register_hooks()

    def unhook(self) -> None:
        """Stops measuring until `hook`, and drops kept gradients. Steps continue with the last gain.

        Raises:
            RuntimeError: A step of a pipeline is under way, whose ranks would wait for the measurements of this one.
        """
        if self._statistics.local.step is not None:
            raise RuntimeError(
                "unhook() was called inside a pipeline's step, after gradients of the step were measured, so other "
                "ranks would wait for their sum. Call it after pipe.step(...), or before it on all ranks"
            )
        self._statistics.remove_hooks()

    def hook(self) -> None:
        """Measures again, from the next backward pass on, after `unhook`."""
        self._statistics.is_hooked = True
        self._statistics.register_hooks()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner optimizer's state; AdaScale's averages are in its parameter groups.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
        """
        self._check_between_steps("state_dict", "Don't checkpoint in backward")
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, an inner optimizer's own state, or one of FairScale's AdaScale.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
            ValueError: It has different parameter groups, or averages in a different form. Nothing was loaded.
        """
        self._check_between_steps("load_state_dict", "Don't load checkpoint in backward")
        remainder, averages = without_fairscale(state_dict, len(self.param_groups))
        Estimates.from_groups(remainder["param_groups"])  # Raises before anything is loaded.
        before = [(group, group.pop(GROUP_KEY)) for group in self.param_groups if GROUP_KEY in group]
        try:
            self._optimizer.load_state_dict(remainder)
        except BaseException:
            for group, row in before:
                group[GROUP_KEY] = row
            raise
        if averages is not None:
            self._state.store(replace(self._state.estimates, groups=tuple(averages)))
        self._statistics.reset()
        self._statistics.consecutive.reset()

    def _check_between_steps(self, method: str, what: str, *, before_passes: bool = False) -> None:
        """Raises RuntimeError amid the passes of a step; `what` is FairScale's text for this method.

        With `before_passes`, also when all passes have come and the step has not.
        """
        passes, number = self._statistics.passes, self._settings.num_gradients
        if self._statistics.local.in_backward or 0 < passes < number or (before_passes and passes):
            raise middle_of_step_error(what, method, passes, number)


def _state_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """The hooks of an optimizer's state, by attribute: those that are registered around it are its own."""
    kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return {name: getattr(optimizer, name) for name in (f"_optimizer_{kind}_hooks" for kind in kinds)}
