"""`OffloadOptimizer`: any elementwise torch optimizer, with a fraction of its state on the host.

Adam remembers two numbers per parameter, twice the memory of the parameters themselves, and looks at them once per
step. So they can stand on the host: gradients go there, new values come back, and the host computes what belongs to it
while the device computes the rest.
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
from scale_core.optim.clip_grad import check_max_norm, clip_factor, grad_norm
from scale_core.shard import shard_of, title_of
from scale_core.streams import on_host
from scale_fsdp.offload.backward import EarlyCopies, GradientArrivals, UpdateInBackward, UsedGradient
from scale_fsdp.offload.host_kernel import FUSED_MULTIPLE, host_options
from scale_fsdp.offload.host_update import OffloadUpdate
from scale_fsdp.offload.placement import Part, PlacedState, Placement, Split, host_counts, split_of


class PendingClipping:
    """The factor by which the next update multiplies its gradients."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._marks: list[tuple[TensorWeakRef, int] | None] | None = None

    def measure(self, params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Takes the norm of all gradients, and keeps what clipping multiplies them by; returns the norm.

        Where none of those that were measured before is there any more, as after `model.zero_grad()`, these are new.

        Raises:
            RuntimeError: They were measured before, and have changed since.
            TransferError: As `scale_core.grad_norm`.
            ValueError: As `scale_core.grad_norm`; or `max_norm` is below 0, or not a number.
        """
        check_max_norm(max_norm)
        if self._marks is not None and not self._is_any_there(params):
            self.forget()
        before = self.factor(params)
        norm = grad_norm(params, norm_type) * before
        (factor,) = compat.values_of(clip_factor(norm, max_norm).reshape(1), simulated=[0.5])
        self._factor = factor * before
        self._marks = [None if grad is None else (TensorWeakRef(grad), grad._version) for grad in _grads(params)]
        return norm

    def factor(self, params: Sequence[Tensor]) -> float:
        """What gradients are to be multiplied by.

        Raises:
            RuntimeError: They are others than those whose norm was taken.
        """
        if all(grad is None for grad in _grads(params)):
            return 1.0  # They were thrown away, and there is nothing to multiply.
        for grad, mark in zip(_grads(params), self._marks or [], strict=self._marks is not None):
            if (grad is None) != (mark is None) or (mark and (mark[0]() is not grad or grad._version != mark[1])):
                raise RuntimeError(
                    "gradients have changed since OffloadOptimizer.clip_grad_norm_ has measured them: call it last, "
                    "after all backward passes and after scaler.unscale_(optimizer), right before step(); where those "
                    "that it has measured were thrown away, say so by optimizer.zero_grad(), or measure the new ones"
                )
        return self._factor

    def _is_any_there(self, params: Iterable[Tensor]) -> bool:
        """Whether one of the gradients that were measured is one still, changed or not."""
        marks = zip(_grads(params), self._marks or [], strict=True)
        return any(grad is not None and mark is not None and mark[0]() is grad for grad, mark in marks)

    def forget(self) -> None:
        """The gradients were used, or are gone."""
        self._factor, self._marks = 1.0, None


def _grads(params: Iterable[Tensor]) -> list[Tensor | None]:
    return [param.grad for param in params]


class OffloadOptimizer(Optimizer):
    """A torch optimizer of which a fraction of the state lives on the host, the rest on the parameters' device.

    It steps as the optimizer itself does, to the bit on CPU, and is used as that is: parameter groups, schedulers,
    `state_dict` in the optimizer's own format, which loads into it and back. Parameters are whole ones or local shards.
    Gradients may be clipped and unscaled in any way before `step()`.

        >>> import torch
        >>> from scale_fsdp import OffloadOptimizer
        >>> model = torch.nn.Linear(100, 100)
        >>> optimizer = OffloadOptimizer(torch.optim.AdamW, model.parameters(), host_fraction=0.5, lr=1e-3)
        >>> model(torch.ones(1, 100)).sum().backward()
        >>> norm = optimizer.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> optimizer.placement()
        Placement(host_elements=5028, device_elements=5072, host_bytes=40232, device_bytes=40580)

    The last parameters go to the host; the one where the fraction ends is cut in two, its first part on the host (at
    a multiple of 64 elements where torch's fused kernel works on the host, so that the cut changes no bit). The host
    updates with torch's fused kernel where the optimizer has one and the user has not said `fused` or `foreach`.

    Args:
        optim_cls: A class such as `torch.optim.AdamW`.
        params: Parameters, or groups of them, as for `optim_cls`.
        host_fraction: The fraction of all elements whose state is on the host, from 0 to 1.
        overlap_step: Update during the backward pass, bucket by bucket, and keep no gradients. It allows one backward
            pass per step, and no clipping, gradient scaler or look at the gradients between the two. A pass that fails
            may have updated some of the parameters.
        overlap_copies: Copy gradients to the host during the backward pass, into pinned memory of their size. False:
            in the step, through a few megabytes.
        split: Whether parameters can be cut ("element") or not ("parameter"); None is known for the classes of
            torch.optim.
        **defaults: The arguments of `optim_cls`.

    Raises:
        TypeError: `optim_cls` is no class of optimizers, a parameter is no plain tensor, or a setting is of another
            type.
        ValueError: A fraction below 0 or above 1, or an optimizer that can't be divided.
    """

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
        super().__init__(params, self._update.defaults)

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
        self._split = split_of(optim_cls, split)
        self._host_fraction = host_fraction
        self._placed = PlacedState()
        self._update = OffloadUpdate(optim_cls, settings)
        self._early = EarlyCopies(self._update) if overlap_copies and not overlap_step else None
        self._in_backward = UpdateInBackward(self._update) if overlap_step else None
        self._clipping = PendingClipping()
        self._arrivals = GradientArrivals(self._gradient_arrived, at_once=overlap_step)

    # What a user calls.

    @property  # type: ignore[override]
    def state(self) -> PlacedState:
        """What the optimizer remembers, by parameter, as if it stood in one place."""
        return self._placed

    @state.setter
    def state(self, values: Mapping[Tensor, dict[str, Any]]) -> None:
        values = dict(values)
        self._placed.clear()
        self._placed.update(values)

    @property
    def construction(self) -> str:
        """The line that builds one like this, as errors quote it."""
        return f"{type(self).__name__}({self._arguments[0].__name__}, model.parameters(), ...)"

    def placement(self) -> Placement:
        """Returns how many elements have their state on the host and on the device, and its bytes by now."""
        return self._placed.placement()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's optimizers do; the fraction holds for all parameters together.

        Raises:
            TypeError: As in the constructor.
            ValueError: As in the constructor, or an option that can't be had on the host.
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
        self._place(group)
        self._watch()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips all gradients together in the next step; returns their norm.

        Until then they stay as they are: the update multiplies them where it reads them, which costs little, and copies
        of them on the host stay good. Call it last before `step()`, after which gradients are not to be used again.

        Args:
            max_norm: The largest norm allowed.
            norm_type: As in `scale_core.grad_norm`, which measures them, over all ranks that share them.

        Raises:
            RuntimeError: With `overlap_step=True`; or gradients have changed since an earlier call.
            ValueError: `max_norm` is below 0 or not a number, or `norm_type` is not above 0.
            TransferError: Another rank did not take part.
        """
        if self._in_backward is not None:
            raise RuntimeError(
                "overlap_step=True updates during the backward pass, when the norm is not known yet: build "
                "OffloadOptimizer(..., overlap_step=False) to clip gradients"
            )
        return self._clipping.measure(self._params(), max_norm, norm_type)

    def cast_to(self, param: Tensor, target: Tensor | None) -> None:
        """Has each step also write the new values of a parameter, rounded, to another tensor.

        Such as the bf16 copy that is computed with: it is written while the new values are in the cache.

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
            part.target = None if target is None else target.detach()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient.

        Args:
            closure: Computes loss and gradients anew, and returns the loss.

        Raises:
            RuntimeError: Gradients have changed since they were clipped, are sparse, or were wanted again after they
                had been used during the backward pass.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.settle()
        factor = self._clipping.factor(self._params())
        self._clipping.forget()
        parts = [part for part in self._placed.parts() if part.has_gradient()]
        early = {} if self._early is None else self._early.take([part for part in parts if part.on_host])
        self._update.run(parts, early, factor)
        self._watch()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, or fills them with zeros."""
        self._clipping.forget()
        if self._in_backward is not None:
            self._in_backward.forget()
        for param in self._params():
            if isinstance(param.grad, UsedGradient):
                param.grad = None
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` of this or of the plain optimizer has returned; each part goes to its place.

        Raises:
            ValueError: It has other groups than this one.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = copy.deepcopy(state_dict["param_groups"])
        sizes, mine = [len(group["params"]) for group in saved], [len(group["params"]) for group in self.param_groups]
        if sizes != mine:
            raise ValueError(
                f"the state has groups of {sizes} parameters, the optimizer groups of {mine}: build the optimizer with "
                "the groups that were saved"
            )
        ids = chain.from_iterable(group["params"] for group in saved)
        by_id = dict(zip(ids, self._params(), strict=True))
        if self._in_backward is not None:
            self._in_backward.stop()
        for group, options in zip(self.param_groups, saved, strict=True):
            params, names = group["params"], options.get("param_names", group.get("param_names"))
            group.clear()
            group.update({**self.defaults, **options, "params": params})
            if names is not None:
                group["param_names"] = names
        self._update.complete(self.param_groups)
        self._placed.clear()
        for key, values in state_dict["state"].items():
            param = by_id.get(key, key)
            self._placed[param] = _in_dtype_of(param, values) if isinstance(param, Tensor) else values
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

    # What it is made of.

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _check_param(self, param: Tensor) -> None:
        if hasattr(param, "__tensor_flatten__"):
            raise TypeError(
                f"expected plain tensors, got {title_of(param)} of type {type(param).__name__}, whose elements stand "
                "in other tensors: shard the model by scale_fsdp.fully_shard, whose shards are plain"
            )
        shard = shard_of(param)
        if shard is not None and self._split == "parameter" and 0 < shard.stop - shard.start < shard.numel:
            raise ValueError(
                f"{self._arguments[0].__name__} needs each parameter as a whole, and of '{shard.name}' this rank has "
                f"elements {shard.start:,} to {shard.stop:,} of {shard.numel:,}: train with an elementwise optimizer "
                'such as AdamW, or keep parameters whole by fully_shard(module, atom="parameter")'
            )

    def _place(self, group: dict[str, Any]) -> None:
        """Decides for the parameters of a new group where their state is to be."""
        params = list(dict.fromkeys(group["params"]))
        sizes = [param.numel() for param in params]
        placed = self.placement()
        total = placed.host_elements + placed.device_elements + sum(sizes)
        wanted = max(0, round(self._host_fraction * total) - placed.host_elements)
        multiples = [self._multiple(param, group) for param in params]
        for param, count, multiple in zip(params, host_counts(sizes, wanted, multiples), multiples, strict=True):
            size = param.numel()
            cuts = [(0, count, True), (count, size, False)] if 0 < count < size else [(0, size, count == size > 0)]
            parts = [Part(param, group, *span, on_host=host, divisible=multiple > 0) for *span, host in cuts]
            self._placed.add(param, parts)

    def _multiple(self, param: Tensor, group: Mapping[str, Any]) -> int:
        """At what multiples of elements a parameter can be cut; 0 is nowhere."""
        if self._split == "parameter" or not param.is_contiguous() or param.dim() == 0:
            return 0
        return FUSED_MULTIPLE if host_options(group, param.dtype).get("fused") else 1

    # When gradients are there.

    def _watch(self) -> None:
        if self._in_backward is not None:
            self._arrivals.watch(self._params())
        elif self._early is not None:
            on_their_way = (part.param for part in self._placed.parts() if part.on_host and not on_host(part.param))
            self._arrivals.watch(on_their_way)

    @torch.no_grad()
    def _gradient_arrived(self, param: Tensor, grad: Tensor) -> None:
        parts = self._placed.parts_of(param)
        if self._in_backward is not None:
            self._in_backward.arrived(parts)
        elif self._early is not None:
            self._early.arrived(parts, grad)


def _in_dtype_of(param: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state as torch's optimizers take it over: of floating-point parameters in their dtype, but for counts."""
    return {
        key: value.to(param.dtype)
        if isinstance(value, Tensor) and param.is_floating_point() and key != "step"
        else copy.deepcopy(value)
        for key, value in values.items()
    }
