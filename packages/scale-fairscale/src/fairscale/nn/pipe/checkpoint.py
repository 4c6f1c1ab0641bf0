"""Recomputation of functions, and what layers may ask about it: one answer for pipelines and `checkpoint_wrapper`.

Pipelines recompute by `scale_checkpoint`. FairScale's pair of autograd functions is here for programs that apply them;
programs that replace their methods, so that a pipeline takes other values than tensors, need that no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairscale._warnings import warn_once
from scale_checkpoint import checkpoint_wrapper, is_checkpointing, is_recomputing
from scale_checkpoint.state import checkpointing as enable_checkpointing
from scale_checkpoint.state import recomputing as enable_recomputing
from scale_core.device import rng

RngStates = deque[list[rng.GeneratorState]]
Function = Callable[[Any], Any]
_Recomputed = deque[tuple[Any, tuple[Tensor, ...]]]  # the output and the inputs of each recomputation


class _Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = (function,)  # In a tuple, so that a module is not a child of this one.

    def forward(self, input: Any) -> Any:
        return self._function[0](input)


def checkpoint(function: Callable[[Any], Any], input: Any) -> Any:
    """Computes a function of a tensor or tensors, and computes it again in the backward pass."""
    return checkpoint_wrapper(_Call(function))(input)


def save_rng_states(device: torch.device, rng_states: RngStates) -> None:
    """Puts the states of the random generators of the host and of a device in the place of what is there."""
    rng_states.clear()
    with rng.only_device(device):
        rng_states.append(rng.generator_states())


@contextmanager
def restore_rng_states(device: torch.device, rng_states: RngStates) -> Iterator[None]:
    """Inside, generators start from the states that were saved; afterwards they are as before."""
    with rng.replayed(rng_states[0]):
        yield


class _Replaceable(type(torch.autograd.Function)):  # type: ignore[misc]  # torch's metaclass has no name.
    def __setattr__(cls, name: str, value: Any) -> None:
        if name in ("forward", "backward"):
            warn_once(
                f"fairscale.nn.pipe.checkpoint.{cls.__name__}.{name} =",
                "pipelines recompute by scale_checkpoint and don't call it. Remove the line: stages exchange tensors, "
                "None and other values as they are",
            )
        super().__setattr__(name, value)


class Checkpoint(torch.autograd.Function, metaclass=_Replaceable):
    """Computes a function without a graph; its gradients come from a recomputation, by `Recompute` or by itself.

    `Checkpoint.apply(phony, recomputed, rng_states, function, input_atomic, *input)`: `phony` is a tensor on the device
    that requires a gradient; the function is given the one input if `input_atomic`, else a tuple of all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        phony: Tensor,
        recomputed: _Recomputed,
        rng_states: RngStates,
        function: Function,
        input_atomic: bool,
        *input: Tensor,
    ) -> Any:
        save_rng_states(phony.device, rng_states)
        ctx.call = (phony.device, rng_states, function, input_atomic)
        ctx.recomputed = recomputed
        ctx.save_for_backward(*input)
        with enable_checkpointing():
            return function(input[0] if input_atomic else input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        output, inputs = ctx.recomputed.pop() if ctx.recomputed else _recompute(ctx)
        outputs = output if isinstance(output, tuple) else (output,)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return (None,) * 5 + tuple(leaf.grad for leaf in inputs)


class Recompute(torch.autograd.Function, metaclass=_Replaceable):
    """Computes the function of a `Checkpoint` again when the backward pass comes here, before it needs the result.

    `Recompute.apply` has its arguments and returns the phony tensor; on what depends on that, it comes first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        phony: Tensor,
        recomputed: _Recomputed,
        rng_states: RngStates,
        function: Function,
        input_atomic: bool,
        *input: Tensor,
    ) -> Tensor:
        ctx.call = (phony.device, rng_states, function, input_atomic)
        ctx.recomputed = recomputed
        ctx.save_for_backward(*input)
        return phony.view_as(phony)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.recomputed.append(_recompute(ctx))
        return (None,) * (5 + len(ctx.saved_tensors))


def _recompute(ctx: Any) -> tuple[Any, tuple[Tensor, ...]]:
    device, rng_states, function, input_atomic = ctx.call
    inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors)
    with restore_rng_states(device, rng_states), torch.enable_grad(), enable_recomputing():
        return function(inputs[0] if input_atomic else inputs), inputs


__all__ = [
    "Checkpoint",
    "Recompute",
    "checkpoint",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
    "restore_rng_states",
    "save_rng_states",
]
