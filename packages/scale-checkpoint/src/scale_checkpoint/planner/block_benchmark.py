"""Block benchmark: the memory and the time of each block by itself, under each strategy.

The block gets copies of the tensors that the model gave it, as results of a node before it, and its own
results go to a node behind it that hands back fresh gradients. So every tensor lives exactly as long as the block and
autograd hold it, as in the middle of a step: the memory between forward and backward is what the strategy keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_checkpoint.offload.offload import MIN_BYTES, offload_activations, prefetched_bytes
from scale_checkpoint.planner.blocks import KEEP, OFFLOAD, ResolvedStrategies, applied, block_signature
from scale_checkpoint.planner.step import Step, least_seconds, preserve_state, time_now, unit_grad_scalar
from scale_checkpoint.planner.trace import StepTrace, Visit, trace_step
from scale_checkpoint.tree import extract_tensors, insert_tensors, unique_tensors

BLOCK = "block"

_MARKER_BYTES = MIN_BYTES + 8 * 1021  # A size that no tensor has by chance, large enough to be moved.


class BlockCall(NamedTuple):
    """The arguments with which a model called a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input_requires_grad: Sequence[bool]  # in training, of each tensor among them


class BlockMemory(NamedTuple):
    """Memory of a block under one strategy."""

    kept_bytes: int  # between forward and backward, without its inputs and outputs
    forward_bytes: int  # peak of its forward over the memory when it is entered
    backward_bytes: int  # the same of its backward
    prefetch_peak_bytes: int  # the same from the moment on at which storages that left before the block are fetched
    saved_bytes: tuple[int, ...]  # of tensors that autograd saved and no other hook took, in order
    held_inputs: tuple[bool, ...]  # which of its input tensors it keeps
    held_outputs: tuple[bool, ...]


class BlockCost(NamedTuple):
    """The measurements of a block under one strategy."""

    memory: BlockMemory
    seconds: float  # forward and backward
    prefetched_bytes: int  # see `StrategyCost`


def benchmark_blocks(
    step: Step, blocks: Mapping[str, nn.Module], visits: Sequence[Visit], strategies: ResolvedStrategies, repeats: int
) -> list[dict[str, BlockCost]]:
    """Runs the model forward, and each block by itself when it is called; returns the costs of each visit, by strategy.

    They are empty where a visit has no gradient. The first of several equal blocks alone is timed `repeats` times.
    """
    waiting = [visit for visit in visits if visit.name]
    costs: list[dict[str, BlockCost]] = []
    timed: set[tuple[object, ...]] = set()
    is_measuring = False

    def costs_of(block: nn.Module, call: BlockCall) -> dict[str, BlockCost]:
        memory = {}
        for name, how in strategies.items():
            with applied(block, how):
                memory[name] = measure_memory(block, call, step.device)
        kind = repr(block_signature(block)), *memory.values()
        runs = {name: partial(_seconds, block, call, step, how) for name, how in strategies.items()}
        seconds = least_seconds(runs, repeats if step.any_(kind not in timed) else 1)
        timed.add(kind)
        fetched = prefetched_bytes(memory[KEEP].saved_bytes, step.device)
        return {
            name: BlockCost(memory[name], seconds[name], fetched if how == OFFLOAD else 0)
            for name, how in strategies.items()
        }

    def measure_here(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_measuring
        if is_measuring:
            return
        is_measuring = True
        visit = waiting[len(costs)]
        call = BlockCall(args, kwargs, visit.input_requires_grad)
        try:
            costs.append(costs_of(block, call) if visit.output_requires_grad else {})
        except RuntimeError as error:
            error.add_note(
                f"This happened while the block '{visit.name}' was measured by itself. It runs several times on the "
                "model's inputs, so it must not change these, as it changes a cache: write "
                "model.config.use_cache = False for models of transformers, or use_cache=False in the call, as for T5."
            )
            raise
        is_measuring = False

    with ExitStack() as stack:
        for block in blocks.values():
            stack.callback(block.register_forward_pre_hook(measure_here, with_kwargs=True, prepend=True).remove)
        with torch.no_grad():
            step.model(*step.args, **step.kwargs)
    return costs


def _seconds(block: nn.Module, call: BlockCall, step: Step, how: str | tuple[str, ...]) -> float:
    with applied(block, how):
        return step.largest(measure_seconds(block, call, step.device))


def measure_memory(block: nn.Module, call: BlockCall, device: torch.device) -> BlockMemory:
    """Runs a block forward and backward once; returns its memory."""
    trace = StepTrace(device)
    start = torch.zeros((), requires_grad=True)
    trace.marker_bytes = _MARKER_BYTES
    with preserve_state(block), torch.enable_grad(), trace_step(trace, {BLOCK: block}):
        with offload_activations():
            marker = _PrefetchMarker.apply(start, device)  # type: ignore[no-untyped-call]
        loss = _forward(block, call, marker)
        del marker
        visit = trace.visits[1]
        live = set(trace.live())
        boundary = {*visit.inputs, *visit.outputs}
        kept_bytes = sum(trace.num_bytes(number) for number in live - boundary) - trace.num_bytes(
            trace.storage_number(loss)
        )
        held_inputs = tuple(number in live for number in visit.inputs)
        held_outputs = tuple(number in live and number not in visit.inputs for number in visit.outputs)
        loss.backward()
        del loss
    assert visit.backward is not None
    peak, end = visit.backward.peak_bytes, visit.backward.peak_after_marker_bytes or 0
    return BlockMemory(
        kept_bytes=kept_bytes,
        forward_bytes=visit.forward.peak_bytes - visit.forward.start_bytes,
        backward_bytes=max(peak, end) - visit.backward.start_bytes,
        prefetch_peak_bytes=max(0, end - visit.backward.start_bytes),
        saved_bytes=tuple(trace.sizes[number] for number in dict.fromkeys(visit.saved) if number in trace.sizes),
        held_inputs=held_inputs,
        held_outputs=held_outputs,
    )


def measure_seconds(block: nn.Module, call: BlockCall, device: torch.device) -> float:
    """Runs a block forward and backward once; returns the seconds that it took."""
    start = torch.zeros((), requires_grad=True)
    with preserve_state(block), torch.enable_grad():
        started = time_now(device)
        _forward(block, call, start).backward()
        return time_now(device) - started


def _forward(block: nn.Module, call: BlockCall, start: Tensor) -> Tensor:
    """Runs the block between its two neighbors; only the graph holds the tensors between them."""
    tensors, structure = extract_tensors((call.args, call.kwargs))
    grads: tuple[Tensor, ...] = ()
    if tensors:
        grads = _CopiedInputs.apply(start, call.input_requires_grad, *tensors)  # type: ignore[no-untyped-call]
    args, kwargs = insert_tensors(structure, grads)
    del grads, tensors
    output = block(*args, **kwargs)
    del args, kwargs
    results = unique_tensors(output)
    del output
    return unit_grad_scalar(results)


class _PrefetchMarker(torch.autograd.Function):
    """Saves a tensor of its own size, to be moved away: it comes when storages before the block would come."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, device: torch.device) -> Tensor:
        ctx.save_for_backward(torch.empty(_MARKER_BYTES, dtype=torch.uint8, device=device))
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


class _CopiedInputs(torch.autograd.Function):
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
