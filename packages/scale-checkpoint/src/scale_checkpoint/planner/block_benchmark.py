"""One block by itself, tried in every way: what it keeps, needs and takes.

The block gets copies of the tensors that the model gave it, as results of a node that stands before it, and its own
results go to a node behind it that hands back fresh gradients. So every tensor lives exactly as long as the block and
autograd hold it, as it does in the middle of a step: what is alive between forward and backward is what the way keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scale_checkpoint.offload.offload import MIN_BYTES, offload_activations
from scale_checkpoint.planner.step import now, scalar_of, undisturbed
from scale_checkpoint.planner.trace import StepTrace, following
from scale_checkpoint.tree import put_tensors, take_tensors, tensors_in

BLOCK = "block"

_SIGN_BYTES = MIN_BYTES + 8 * 1021  # A size that no tensor has by chance, large enough to be moved.


@dataclass(frozen=True)
class Call:
    """How a model called a block.

    Attributes:
        args: Positional arguments.
        kwargs: The others.
        wants_gradient: For each tensor among them, whether its gradient is asked for in training.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wants_gradient: Sequence[bool]


@dataclass(frozen=True)
class Trial:
    """What a block took in one way.

    Attributes:
        kept_bytes: What it keeps between forward and backward, without its inputs and outputs.
        forward_bytes: The most that its forward needs over what stands when it is entered.
        backward_bytes: The same of its backward.
        end_bytes: Like `backward_bytes`, from the moment on at which what left before the block is fetched ahead.
        saved_bytes: The sizes of what autograd saved, in order, where nothing else took care of it.
        held_inputs: Which of the tensors that it is given it keeps.
        held_outputs: Which of those that it returns it keeps.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    end_bytes: int
    saved_bytes: tuple[int, ...]
    held_inputs: tuple[bool, ...]
    held_outputs: tuple[bool, ...]


def try_memory(block: nn.Module, call: Call, device: torch.device) -> Trial:
    """Runs a block forward and backward once, and follows its memory.

    Args:
        block: Treated in some way.
        call: How the model called it.
        device: Whose memory counts.
    """
    trace = StepTrace(device)
    start = torch.zeros((), requires_grad=True)
    trace.sign_bytes = _SIGN_BYTES
    with undisturbed(block), torch.enable_grad(), following(trace, {BLOCK: block}):
        with offload_activations():
            sign = _Sign.apply(start, device)  # type: ignore[no-untyped-call]
        loss = _forward(block, call, sign)
        del sign
        visit = trace.visits[1]
        live = set(trace.live())
        boundary = {*visit.inputs, *visit.outputs}
        kept = sum(trace.num_bytes(number) for number in live - boundary) - trace.num_bytes(trace.number(loss))
        held_inputs = tuple(number in live for number in visit.inputs)
        held_outputs = tuple(number in live and number not in visit.inputs for number in visit.outputs)
        loss.backward()
        del loss
    assert visit.backward is not None
    peak, end = visit.backward.peak_bytes, visit.backward.peak_after_sign_bytes or 0
    return Trial(
        kept_bytes=kept,
        forward_bytes=visit.forward.peak_bytes - visit.forward.start_bytes,
        backward_bytes=max(peak, end) - visit.backward.start_bytes,
        end_bytes=max(0, end - visit.backward.start_bytes),
        saved_bytes=tuple(trace.sizes[number] for number in dict.fromkeys(visit.saved) if number in trace.sizes),
        held_inputs=held_inputs,
        held_outputs=held_outputs,
    )


def try_time(block: nn.Module, call: Call, device: torch.device) -> float:
    """Runs a block forward and backward once; returns the seconds that it took.

    Args:
        block: Treated in some way.
        call: How the model called it.
        device: CPU time counts where it is the CPU, and time until all is done otherwise.
    """
    start = torch.zeros((), requires_grad=True)
    with undisturbed(block), torch.enable_grad():
        started = now(device)
        _forward(block, call, start).backward()
        return now(device) - started


def _forward(block: nn.Module, call: Call, start: Tensor) -> Tensor:
    """Runs the block between its two neighbours; nothing but the graph holds what passes between them."""
    tensors, rest = take_tensors((call.args, call.kwargs))
    given: tuple[Tensor, ...] = ()
    if tensors:
        given = _Before.apply(start, call.wants_gradient, *tensors)  # type: ignore[no-untyped-call]
    args, kwargs = put_tensors(rest, given)
    del given, tensors
    output = block(*args, **kwargs)
    del args, kwargs
    results = tensors_in(output)
    del output
    return scalar_of(results)


class _Sign(torch.autograd.Function):
    """Saves a tensor of a size of its own, to be moved away: it comes when what left before the block would come."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, device: torch.device) -> Tensor:
        ctx.save_for_backward(torch.empty(_SIGN_BYTES, dtype=torch.uint8, device=device))
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


class _Before(torch.autograd.Function):
    """Copies of tensors, each with a gradient if one is asked for; its backward takes the gradients and keeps none."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, wants_gradient: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = tuple(tensor.detach().clone() for tensor in tensors)
        ctx.mark_non_differentiable(*(copy for copy, wants in zip(copies, wants_gradient, strict=True) if not wants))
        ctx.set_materialize_grads(False)
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        return (None, None, *(None for _ in gradients))
