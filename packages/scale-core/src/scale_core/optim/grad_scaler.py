"""Gradient scaling with one decision on inf and NaN for all ranks.

A scaled loss keeps small fp16 gradients from vanishing; where the scale was too large, some gradient is inf and the
step is skipped. Ranks that hold different gradients see different ones overflow: if each decided alone, some would step
and others not, and from then on their scales would differ. So the ranks agree.

bf16 has the exponents of fp32 and needs no scaler: `enabled=False` makes one that does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import all_reduce, torch_group
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.optim.error_feedback import ErrorFeedback, set_loss_scale
from scale_core.optim.step_checks import owners_with_error_feedback
from scale_core.shard import on_local_tensors, shard_of


class ShardedGradScaler(GradScaler):
    """torch's `GradScaler` for sharded gradients: if one rank finds inf or NaN, all ranks skip the step.

    It is used as torch's is. Gradients may be fp16, bf16, fp32 or fp64, on any device. A rank may have empty shards, or
    no gradient. In a world of one it needs no torch.distributed. All ranks of the group call `unscale_` and `step`
    together, for the same optimizers in the same order.

        >>> import torch
        >>> from scale_core import ShardedGradScaler
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = ShardedGradScaler(init_scale=1024.0)
        >>> scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
        >>> scaler.step(optimizer)  # Skipped.
        >>> scaler.update()
        >>> scaler.get_scale()
        512.0

    Args:
        device: The device of the scale. None is the device of the first loss. So is an accelerator that this machine
            lacks, for example "cuda" in a program that also runs on a CPU.
        init_scale: The first factor of losses.
        growth_factor: The factor of growth of the scale after `growth_interval` steps in a row without inf or NaN.
        backoff_factor: The factor of the scale after a step that was skipped.
        growth_interval: Number of steps.
        enabled: With False, no method has an effect.
        process_group: The ranks that agree: at least all that share a parameter. None is the default group (looked up
            when it is needed), or a world of one where torch.distributed is not initialized.

    Raises:
        ValueError: A number out of its range, or a `process_group` that this rank is not a member of.
        TypeError: `process_group` is not a process group, or `device` is not a device.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    @checked_arguments(own="device")
    def __init__(
        self,
        device: torch.device | str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: GroupLike = None,
    ) -> None:
        if device is not None and not isinstance(device, torch.device | str):
            raise TypeError(
                f"ShardedGradScaler takes a device first, as torch.amp.GradScaler does, but got {device!r}: write "
                f"ShardedGradScaler(init_scale={device!r})"
            )
        if enabled:
            _check("init_scale", init_scale, "a finite number above 0", lambda x: 0 < x < math.inf)
            _check("growth_factor", growth_factor, "a finite number above 1", lambda x: 1 < x < math.inf)
            _check("backoff_factor", backoff_factor, "a number between 0 and 1", lambda x: 0 < x < 1)
            _check("growth_interval", growth_interval, "1 or more", lambda x: x >= 1)
            group_of(process_group)
        # torch turns a scaler "of cuda" off, with a warning, where there is no CUDA; the scale is on any device.
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._process_group = process_group
        self._scale_device = None if device is None else compat.available_device(device)
        self._covered: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def scale(self, outputs: Any) -> Any:
        """Returns a tensor, or those in containers, multiplied by the scale."""
        scaled = super().scale(outputs)
        if self._enabled:
            set_loss_scale(self._scale)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, in place; all ranks learn whether any of them is inf or NaN.

        Call it to clip gradients or look at them before `step`, which else does it.

        Raises:
            RuntimeError: It was called already since the last `update`.
            TransferError: A rank did not take part.
            ValueError: A parameter is shared with ranks that are not in the scaler's group.
        """
        if self._enabled:
            self._begin(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps, unless a gradient on any rank of the group is inf or NaN.

        Raises:
            RuntimeError: A closure; no rank has scaled a loss, or ranks have different scales; or the optimizer has
                stepped since the last `update`.
            TransferError: As in `unscale_`.
            ValueError: As in `unscale_`; gradients that are sent with `error_feedback`, of a loss that this scaler has
                not scaled, on any rank.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if any(map(callable, args)) or kwargs.get("closure") is not None:
            raise RuntimeError(
                "a closure computes the gradients inside of step(), where a scaler can't check them first: write "
                "scaler.scale(closure()).backward(), then scaler.step(optimizer) without it"
            )
        self._begin(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        unscales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if state["stage"] is OptState.READY and not unscales_itself:
            self.unscale_(optimizer)
        if state["stage"] is OptState.UNSCALED:
            self._check_agreement(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Grows or shrinks the scale after the steps of an iteration, equally on all ranks.

        Args:
            new_scale: A number or a tensor of one element, the same on all ranks, which replaces the scale.

        Raises:
            ValueError: `new_scale` is not one finite number above 0.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            if isinstance(new_scale, Tensor):
                if new_scale.numel() != 1:
                    raise ValueError(f"expected a new_scale of one element, got shape {tuple(new_scale.shape)}")
                new_scale = compat.values_of(new_scale.reshape(1), simulated=[self._init_scale])[0]
            new_scale = float(new_scale)
            _check("new_scale", new_scale, "a finite number above 0", lambda x: 0 < x < math.inf)
        skipped: dict[ErrorFeedback, bool] = {}
        for state in self._per_optimizer_states.values():
            for feedback in state.get("error_feedback", ()):
                skipped[feedback] = skipped.get(feedback, False) or state.get("skips", True)
        super().update(new_scale)
        for feedback, skips in skipped.items():
            feedback.on_scaler_update(skipped=skips)
        set_loss_scale(None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_covered": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_covered": WeakKeyDictionary()})

    # From here on: called by torch's methods.

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(self._scale_device or dev)

    @on_local_tensors
    def _begin(self, optimizer: Optimizer) -> None:
        """Makes the scale on a rank that computes no loss, as a stage of a pipeline does."""
        self._per_optimizer_states[id(optimizer)].setdefault("scaled", self._scale is not None)
        if self._scale is None:
            device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
            self._lazy_init_scale_growth_tracker(device or torch.device("cpu"))

    @on_local_tensors
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's method, for fp16 too, followed by the agreement of all ranks in place of the devices' own."""
        group = group_of(self._process_group)
        self._check_covers(optimizer, group)
        having = _with_gradients(optimizer)
        if any(_has_gradient_on_host(param) for group in having.param_groups for param in group["params"]):
            # torch copies them to the host without waiting, and there divides before they have come.
            inv_scale, found_inf = inv_scale.to("cpu"), found_inf.to("cpu")
        found_by_device = super()._unscale_grads_(having, inv_scale, found_inf, True)
        scale, state = cast(Tensor, self._scale), self._per_optimizer_states[id(optimizer)]
        infinite = torch.stack([tensor.to(scale.device) for tensor in (found_inf, *found_by_device.values())]).amax()
        state["error_feedback"], state["fault"] = self._error_feedback(optimizer)
        flags = [torch.full_like(scale, float(flag)) for flag in (state["scaled"], state["fault"] is not None)]
        local_flags = torch.stack([infinite, *flags, scale, -scale])
        state["agreed"] = self._largest(local_flags, group)
        # Exactly 1 where any rank has found one: fused optimizers compare with that.
        return {scale.device: state["agreed"][0].clone()}

    def _largest(self, mine: Tensor, group: Group) -> Tensor:
        """The maximum over the ranks of each number, on the device of `mine`."""
        if group.size == 1:
            return mine
        where = compat.control_device(torch_group(group), mine.device)
        return all_reduce(mine.to(where), group, op="max").wait().to(mine.device)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        found_by_device = super()._check_inf_per_device(optimizer)
        self._check_agreement(optimizer)
        return found_by_device

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # As `_check_agreement` has read it: to ask the device again would be a second wait.
        return None if optimizer_state["skips"] else optimizer.step(*args, **kwargs)

    def _check_agreement(self, optimizer: Optimizer) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        found_inf, scaled, at_fault, most, least = compat.values_of(
            state["agreed"], simulated=[0.0, 1.0, 0.0, 1.0, -1.0]
        )
        if at_fault:
            elsewhere = "on another rank gradients are sent with error_feedback=True, and their loss was not scaled by "
            raise ValueError(state["fault"] or f"{elsewhere}this scaler there: that rank's error says what to write")
        if not scaled:
            raise RuntimeError(
                "gradients can't be unscaled, because no rank has multiplied a loss by the scale: call "
                "scaler.scale(loss).backward() before scaler.step(optimizer)"
            )
        if most != -least:
            raise RuntimeError(
                f"the ranks have scaled their losses differently, by {-least:g} to {most:g}: call "
                "scaler.load_state_dict(state) and scaler.update(new_scale) on all ranks, with the same numbers"
            )
        state["skips"] = bool(found_inf)

    def _error_feedback(self, optimizer: Optimizer) -> tuple[list[ErrorFeedback], str | None]:
        """Waiting parts of an optimizer's gradients, which a skipped step leaves; or why the step raises."""
        params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
        feedbacks: list[ErrorFeedback] = []
        for owner in owners_with_error_feedback(params):
            for feedback in owner.error_feedback:
                if not feedback.was_scaled_by(cast(Tensor, self._scale)):
                    return [], (
                        f"the gradients of '{owner.names[0]}' are sent with error_feedback=True, and their loss "
                        "was not scaled by this scaler on this rank: what rounding took would count in another unit. "
                        "Write scaler.scale(loss).backward() on each rank, then scaler.step(optimizer) and "
                        "scaler.update() before another loss is scaled, or leave error_feedback out of the "
                        "CommunicationPolicy"
                    )
                feedbacks.append(feedback)
        return feedbacks, None

    @on_local_tensors
    def _check_covers(self, optimizer: Optimizer, group: Group) -> None:
        """Checks that the scaler's group has all ranks that share a parameter."""
        params = [param for param_group in _with_gradients(optimizer).param_groups for param in param_group["params"]]
        if self._covered.get(optimizer) == len(params):
            return
        for shard in filter(None, map(shard_of, params)):
            for axis in shard.axes:
                if axis.group.size > 1 and not set(axis.group.ranks) <= set(group.ranks):
                    raise ValueError(
                        f"{shard.title} is shared by the ranks {list(axis.group.ranks)}, but the scaler asks only the "
                        f"ranks {list(group.ranks)}: leave process_group out, or pass ShardedGradScaler a group of all "
                        "ranks that share a parameter"
                    )
        self._covered[optimizer] = len(params)


def _has_gradient_on_host(param: Tensor) -> bool:
    return param.grad is not None and param.grad.device.type == "cpu"


def _with_gradients(optimizer: Any) -> Any:
    """The optimizer; or, where gradients are kept elsewhere, the tensors that have them."""
    # Whoever keeps reduced gradients in parts of the parameters says so by an attribute `params_with_gradients`.
    params = getattr(optimizer, "params_with_gradients", None)
    return optimizer if params is None else SimpleNamespace(param_groups=[{"params": list(params)}])


def _check(name: str, value: float, expected: str, holds: Callable[[float], bool]) -> None:
    if not holds(value):
        raise ValueError(f"expected {name} to be {expected}, got {value}")
