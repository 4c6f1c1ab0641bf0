"""`AdaScale` and `AdaScaleWrapper`: FairScale's arguments on scale-adascale's optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

import scale_adascale
from fairscale._warnings import warn_once
from scale_core.comm.collectives import all_gather


class AdaScale(scale_adascale.AdaScale):
    """An optimizer around another one, which multiplies its learning rates by the gain of the large batch.

    In new code: `scale_adascale.AdaScale(optimizer)`.

    Args:
        optimizer: As in FairScale.
        world_size: As in FairScale.
        scale: As in FairScale.
        smoothing: As in FairScale.
        num_gradients_to_accumulate: As in FairScale.
        is_scaled_loss: As in FairScale.
        debias_ewma: As in FairScale.

    Raises:
        RuntimeError: One rank, and one gradient in a step.
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
    ) -> None:
        ranks = world_size if world_size is not None else (dist.get_world_size() if dist.is_initialized() else 1)
        if ranks * num_gradients_to_accumulate == 1:
            raise RuntimeError(
                "AdaScale does not support a single worker without grad accumulation: give "
                "num_gradients_to_accumulate=2, or use scale_adascale.AdaScale, which compares successive steps there"
            )
        super().__init__(
            optimizer, world_size, scale, smoothing, num_gradients_to_accumulate, is_scaled_loss, debias_ewma
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps with the inner optimizer, its learning rates multiplied by the gain of each parameter group.

        As in FairScale gradients may be averaged by hand after the last backward pass, if no closure runs that pass.
        Nothing is measured then: such a step has the last gain, and a warning says so once.

        Args:
            *args: As for `scale_adascale.AdaScale`.
            **kwargs: As for `scale_adascale.AdaScale`.

        Returns:
            What the closure, or the inner optimizer, has returned.

        Raises:
            RuntimeError: Gradients are other ones on other ranks.
        """
        if self._was_averaged_by_hand():
            warn_once(
                "AdaScale.step()",
                "these gradients were averaged after backward(), where AdaScale does not measure them, so that the "
                "gain stays what it was; run the last backward() outside of no_sync(), under DistributedDataParallel, "
                "or call optimizer.unhook() if that is meant",
            )
            self.unhook()
            try:
                return super().step(*args, **kwargs)
            finally:
                self.hook()
        return super().step(*args, **kwargs)

    def _was_averaged_by_hand(self) -> bool:
        """Whether ranks had other gradients when the last backward pass ended, and have the same ones now.

        Raises:
            RuntimeError: They have other ones still.
        """
        statistics = self._statistics
        if statistics._pending is None:
            return False
        try:
            self._estimates()
            return False
        except RuntimeError as error:  # On all ranks, by the sum of checksums; others are of communication.
            if type(error) is not RuntimeError or statistics._pending is None:
                raise
        statistics._pending = statistics._start_reduction()
        self._estimates()
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer.

        As in FairScale its averages take part in all steps so far without `debias_ewma`, as if they had measured
        nothing; with it they begin at its own first step.
        """
        super().add_param_group(param_group)
        estimates = self._state.estimates
        *old, added = estimates.groups
        count = max(state.count for state in old)
        if self._settings.debias or not count:
            return
        is_mean = (count + 1) * (1 - self.smoothing) < 1  # A mean begins with zeros, and an average with the gain 1.
        added = replace(added, square=0.0 if is_mean else 1.0, count=count)
        self._state.store(replace(estimates, groups=(*old, added)))

    @property
    def _smoothing(self) -> float:
        return self.smoothing

    @property
    def _hook_handles(self) -> list[RemovableHandle]:
        return list(self._statistics.local._handles.values())

    def _gather_flat_grad(self) -> Tensor:
        """Returns all gradients in one vector; of a parameter without one, zeros."""
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        return torch.cat([(grad if grad.layout is torch.strided else grad.to_dense()).reshape(-1) for grad in grads])

    def _compute_intra_grad_corr_mean(self) -> Tensor:
        """Returns the mean correlation between the gradients of any two ranks; under `no_sync()`, all ranks together.

        Raises:
            AssertionError: There is one rank.
        """
        group = self._statistics.reducer._data
        assert group.size > 1, "Only for distributed training: the gradients of several ranks are compared"
        grad = self._gather_flat_grad().float()
        by_rank = grad.new_empty(group.size * grad.numel())
        all_gather(by_rank, grad, group).wait()
        correlations = by_rank.view(group.size, -1).corrcoef()
        return correlations[torch.triu(torch.ones_like(correlations), diagonal=1) == 1].mean()


class AdaScaleWrapper(AdaScale):
    """An `AdaScale` that makes its inner optimizer.

    Args:
        params: For the inner optimizer.
        world_size: As for `AdaScale`.
        scale: As for `AdaScale`.
        smoothing: As for `AdaScale`.
        num_gradients_to_accumulate: As for `AdaScale`.
        debias_ewma: As for `AdaScale`; FairScale took it for `is_scaled_loss`.
        optim_cls: The class of the inner optimizer.
        **additional_optim_args: Its arguments.
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
        **additional_optim_args: Any,
    ) -> None:
        inner = optim_cls(params, **additional_optim_args)
        super().__init__(inner, world_size, scale, smoothing, num_gradients_to_accumulate, debias_ewma=debias_ewma)


__all__ = ["AdaScale", "AdaScaleWrapper"]
