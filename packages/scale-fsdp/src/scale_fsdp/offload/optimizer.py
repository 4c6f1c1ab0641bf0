"""`OffloadOptimizer`: any elementwise torch optimizer, with a fraction of its state on the host.

Adam keeps two numbers per parameter, twice the memory of the parameters themselves, and reads them once per step. So
they can be on the host: gradients are copied there, new values back, and the host updates its part while the device
updates the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.device.streams import on_host
from scale_core.optim.clip_grad import check_max_norm, clip_factor, grad_norm
from scale_core.shard import on_local_tensors, shard_of, title_of
from scale_fsdp.offload.backward import ConsumedGradient, GradientPrefetch, GradReadyHooks, OptimizerInBackward
from scale_fsdp.offload.host_kernel import FUSED_MULTIPLE, host_options
from scale_fsdp.offload.host_update import OffloadUpdate
from scale_fsdp.offload.placement import OffloadPlacement, PlacedState, Split, StatePart, host_counts, resolve_split


class DeferredClipping:
    """The factor by which the next update multiplies its gradients."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._measured: list[tuple[TensorWeakRef, int] | None] | None = None

    def measure(self, params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Measures the norm of all gradients, and keeps the factor that clips them."""
        check_max_norm(max_norm)
        measured = zip(_grads(params), self._measured or [], strict=self._measured is not None)
        if not any(grad is not None and mark is not None and mark[0]() is grad for grad, mark in measured):
            self.reset()  # None of those that were measured before is left, as after `model.zero_grad()`.
        before = self.factor(params)
        norm = grad_norm(params, norm_type) * before
        (factor,) = compat.values_of(clip_factor(norm, max_norm).reshape(1), simulated=[0.5])
        self._factor = factor * before
        self._measured = [None if grad is None else (TensorWeakRef(grad), grad._version) for grad in _grads(params)]
        return norm

    def factor(self, params: Sequence[Tensor]) -> float:
        """The factor for the present gradients."""
        if all(grad is None for grad in _grads(params)):
            return 1.0  # They were dropped.
        for grad, mark in zip(_grads(params), self._measured or [], strict=self._measured is not None):
            if (grad is None) != (mark is None) or (mark and (mark[0]() is not grad or grad._version != mark[1])):
                raise RuntimeError(
                    "gradients have changed since OffloadOptimizer.clip_grad_norm_ has measured them: call it last, "
                    "right before step(). If you drop measured gradients, call optimizer.zero_grad(), or clip again"
                )
        return self._factor

    def reset(self) -> None:
        """Forgets the factor: the gradients were used, or are gone."""
        self._factor, self._measured = 1.0, None


def _grads(params: Iterable[Tensor]) -> list[Tensor | None]:
    return [param.grad for param in params]


class OffloadOptimizer(Optimizer):
    """A torch optimizer with a fraction of its state on the host, the rest on the parameters' device.

    It computes the same steps, to the bit on CPU. You use it in the same way, with parameter groups and schedulers. The
    plain optimizer loads its `state_dict`, and vice versa. Parameters may be local shards. Gradients may be clipped and
    unscaled in any way before `step()`.

        >>> import torch
        >>> from scale_fsdp import OffloadOptimizer
        >>> model = torch.nn.Linear(100, 100)
        >>> optimizer = OffloadOptimizer(torch.optim.AdamW, model.parameters(), host_fraction=0.5, lr=1e-3)
        >>> model(torch.ones(1, 100)).sum().backward()
        >>> norm = optimizer.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> optimizer.placement()
        OffloadPlacement(host_elements=5028, device_elements=5072, host_bytes=40232, device_bytes=40580)

    The host has the state of the last parameters. The parameter at the boundary is split, with its first part on the
    host. If torch's fused kernel runs on the host, the split is at a multiple of 64 elements, so that it changes no
    bit. The host updates with torch's fused kernel where the optimizer has one, unless `fused` or `foreach` is given.

    Args:
        optim_cls: A class, for example `torch.optim.AdamW`.
        params: Parameters, or groups of them, as for `optim_cls`.
        host_fraction: The fraction of all elements whose state is on the host, from 0 to 1.
        overlap_step: Update during the backward pass, bucket by bucket, and keep no gradients. It allows one backward
            pass per step, and nothing that needs gradients between the two, as clipping or a gradient scaler. A pass
            that fails may have updated some of the parameters.
        overlap_copies: Copy gradients to the host during the backward pass, into pinned memory of their size. False:
            in the step, through a few megabytes.
        split: Whether parameters can be split ("element") or not ("parameter"); None is known for the classes of
            torch.optim.
        **defaults: The arguments of `optim_cls`.

    Raises:
        TypeError: `optim_cls` is not an optimizer class, a parameter is not a plain tensor, or a setting has a
            different type.
        ValueError: A fraction below 0 or above 1, or an optimizer that can't be divided.

    See also: [the guide to CPU offload](../guides/scale-further.md#initialize-on-the-meta-device).
    """

    @checked_arguments(own="optim_cls host_fraction overlap_step overlap_copies split")
    def __init__(
        self,
        optim_cls: type[Optimizer],
        params: Iterable[Any],
        *,
        host_fraction: float = 1.0,
        overlap_step: bool = False,
        overlap_copies: bool = True,
        split: Split | None = None,
        **defaults: Any,
    ) -> None:
        if isinstance(host_fraction, bool) or not isinstance(host_fraction, int | float):
            raise TypeError(f"expected host_fraction to be a number from 0 to 1, got {host_fraction!r}")
        if not 0 <= host_fraction <= 1:
            raise ValueError(f"expected host_fraction from 0 to 1, got {host_fraction}")
        for name, value in (("overlap_step", overlap_step), ("overlap_copies", overlap_copies)):
            if not isinstance(value, bool):
                raise TypeError(f"expected {name} to be True or False, got {value!r}")
        self._configure(optim_cls, defaults, host_fraction, overlap_step, overlap_copies, split)
        super().__init__(params, self._update.device_optimizer.defaults)

    def _configure(
        self,
        optim_cls: type[Optimizer],
        settings: Mapping[str, Any],
        host_fraction: float,
        overlap_step: bool,
        overlap_copies: bool,
        split: Split | None,
    ) -> None:
        self._arguments = (optim_cls, dict(settings), host_fraction, overlap_step, overlap_copies, split)
        self._split = resolve_split(optim_cls, split)
        self._host_fraction = host_fraction
        self._placed = PlacedState()
        self._update = OffloadUpdate(optim_cls, settings)
        self._prefetch = GradientPrefetch(self._update) if overlap_copies and not overlap_step else None
        self._in_backward = OptimizerInBackward(self._update) if overlap_step else None
        self._clipping = DeferredClipping()
        self._grad_hooks = GradReadyHooks(self._on_grad_ready, at_once=overlap_step)

    @property  # type: ignore[override]
    def state(self) -> PlacedState:
        """The optimizer's state by parameter, as if it were in one place."""
        return self._placed

    @state.setter
    def state(self, values: Mapping[Tensor, dict[str, Any]]) -> None:
        values = dict(values)
        self._placed.clear()
        self._placed.update(values)

    @property
    def construction(self) -> str:
        """A line that builds one like this, for errors."""
        return f"{type(self).__name__}({self._arguments[0].__name__}, model.parameters(), ...)"

    def placement(self) -> OffloadPlacement:
        """Returns how many elements have their state on the host and on the device, and its bytes by now."""
        return self._placed.placement()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's optimizers do; the fraction holds for all parameters together.

        Raises:
            TypeError: As in the constructor.
            ValueError: As in the constructor, or an option that the host can't follow.
        """
        for option in ("capturable", "differentiable"):
            if {**self.defaults, **param_group}.get(option):
                raise ValueError(f"{option}=True can't be kept where the host does a part of the step: leave it out")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                self._check_param(param)
        except BaseException:
            self.param_groups.pop()
            raise
        self._place_group(group)
        self._register_hooks()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips all gradients together in the next step; returns their norm, a scalar, the same on all ranks.

        Until then they are unchanged: the update multiplies them as it reads them, and copies on the host stay valid.
        Call it last before `step()`, after which gradients must not be used again.

        Args:
            max_norm: The largest norm allowed.
            norm_type: As in `scale_core.grad_norm`, which measures them, over all ranks that share them.

        Raises:
            RuntimeError: With `overlap_step=True`; or gradients have changed since an earlier call.
            ValueError: `max_norm` is below 0 or not a number, or `norm_type` is not above 0.
            TransferError: A rank did not take part.
        """
        if self._in_backward is not None:
            raise RuntimeError(
                "overlap_step=True updates during the backward pass, when the norm is not known yet: build "
                "OffloadOptimizer(..., overlap_step=False) to clip gradients"
            )
        return self._clipping.measure(self._params(), max_norm, norm_type)

    @on_local_tensors
    def cast_to(self, param: Tensor, target: Tensor | None) -> None:
        """Makes each step also write the new values of a parameter to a second tensor, for example a bf16 copy.

        Args:
            param: One of the optimizer's.
            target: Of the parameter's shape, contiguous, any dtype and device; None ends it.

        Raises:
            ValueError: The shape or the strides don't fit, or the optimizer doesn't have the parameter.
        """
        if not self._placed.parts_of(param):
            raise ValueError(f"{title_of(param)} is not the optimizer's: pass one of its parameters")
        if target is not None and (target.shape != param.shape or not target.is_contiguous()):
            raise ValueError(
                f"expected a contiguous target of shape {tuple(param.shape)}, got {tuple(target.shape)} with strides "
                f"{target.stride()}"
            )
        for part in self._placed.parts_of(param):
            part.cast_target = None if target is None else target.detach()

    @on_local_tensors
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient.

        Args:
            closure: Computes loss and gradients again, and returns the loss.

        Raises:
            RuntimeError: Gradients have changed since they were clipped, are sparse, or are needed again after an
                update in backward has consumed them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.finish_step()
        factor = self._clipping.factor(self._params())
        self._clipping.reset()
        parts = [part for part in self._placed.parts() if part.has_gradient()]
        early = {} if self._prefetch is None else self._prefetch.valid_copies([part for part in parts if part.on_host])
        self._update.run(parts, early, factor)
        self._register_hooks()
        return loss

    @on_local_tensors
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, or fills them with zeros."""
        self._clipping.reset()
        if self._in_backward is not None:
            self._in_backward.discard_pending()
        for param in self._params():
            if isinstance(param.grad, ConsumedGradient):
                param.grad = None
        super().zero_grad(set_to_none)

    @on_local_tensors
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the `state_dict()` of this or of the plain optimizer.

        Raises:
            ValueError: It has other groups than this one.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = copy.deepcopy(state_dict["param_groups"])
        sizes, current_sizes = (
            [len(group["params"]) for group in saved],
            [len(group["params"]) for group in self.param_groups],
        )
        if sizes != current_sizes:
            raise ValueError(
                f"the state has groups of {sizes} parameters, the optimizer groups of {current_sizes}: build the "
                "optimizer with the groups that were saved"
            )
        ids = chain.from_iterable(group["params"] for group in saved)
        by_id = dict(zip(ids, self._params(), strict=True))
        if self._in_backward is not None:
            self._in_backward.reset()
        for group, options in zip(self.param_groups, saved, strict=True):
            params, names = group["params"], options.get("param_names", group.get("param_names"))
            group.clear()
            group.update({**self.defaults, **options, "params": params})
            if names is not None:
                group["param_names"] = names
        self._update.device_optimizer.fill_options(self.param_groups)
        self._placed.clear()
        for key, values in state_dict["state"].items():
            param = by_id.get(key, key)
            self._placed[param] = _cast_like(param, values) if isinstance(param, Tensor) else values
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state": dict(self._placed), "arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._configure(*state["arguments"])
        super().__setstate__({"defaults": state["defaults"], "param_groups": []})
        for group in state["param_groups"]:
            self.add_param_group(group)
        self.state = state["state"]

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @on_local_tensors
    def _check_param(self, param: Tensor) -> None:
        if hasattr(param, "__tensor_flatten__"):
            raise TypeError(
                f"expected plain tensors, got {title_of(param)} of type {type(param).__name__}, whose elements are "
                "in other tensors: shard the model by scale_fsdp.fully_shard, whose shards are plain"
            )
        shard = shard_of(param)
        if shard is not None and self._split == "parameter" and 0 < shard.stop - shard.start < shard.numel:
            raise ValueError(
                f"{self._arguments[0].__name__} needs each full parameter, and of '{shard.name}' this rank has "
                f"elements {shard.start:,} to {shard.stop:,} of {shard.numel:,}: train with an elementwise optimizer "
                'such as AdamW, or keep each parameter on one rank: options=ShardOptions(atom="parameter")'
            )

    @on_local_tensors
    def _place_group(self, group: dict[str, Any]) -> None:
        """Decides where the state of a new group's parameters is kept."""
        params = list(dict.fromkeys(group["params"]))
        sizes = [param.numel() for param in params]
        placed = self.placement()
        total = placed.host_elements + placed.device_elements + sum(sizes)
        num_on_host = max(0, round(self._host_fraction * total) - placed.host_elements)
        multiples = [self._cut_multiple(param, group) for param in params]
        for param, count, multiple in zip(params, host_counts(sizes, num_on_host, multiples), multiples, strict=True):
            size = param.numel()
            cuts = [(0, count, True), (count, size, False)] if 0 < count < size else [(0, size, count == size > 0)]
            parts = [StatePart(param, group, *span, on_host=host, divisible=multiple > 0) for *span, host in cuts]
            self._placed.add(param, parts)

    def _cut_multiple(self, param: Tensor, group: Mapping[str, Any]) -> int:
        """The multiple of elements at which a parameter can be split; 0: nowhere."""
        if self._split == "parameter" or not param.is_contiguous() or param.dim() == 0:
            return 0
        return FUSED_MULTIPLE if host_options(group, param.dtype).get("fused") else 1

    @on_local_tensors
    def _register_hooks(self) -> None:
        if self._in_backward is not None:
            self._grad_hooks.register(self._params())
        elif self._prefetch is not None:
            copied = (part.param for part in self._placed.parts() if part.on_host and not on_host(part.param))
            self._grad_hooks.register(copied)

    @torch.no_grad()
    @on_local_tensors
    def _on_grad_ready(self, param: Tensor, grad: Tensor) -> None:
        parts = self._placed.parts_of(param)
        if self._in_backward is not None:
            self._in_backward.on_grad_ready(parts)
        elif self._prefetch is not None:
            self._prefetch.on_grad_ready(parts, grad)


def _cast_like(param: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state as torch's optimizers load it: in the parameter's dtype if that is floating, except for `step`."""
    return {
        key: value.to(param.dtype)
        if isinstance(value, Tensor) and param.is_floating_point() and key != "step"
        else copy.deepcopy(value)
        for key, value in values.items()
    }
