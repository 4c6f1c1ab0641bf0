"""Memory profile: what a model's blocks cost under each strategy, measured once on the machine that will train it.

Nothing here needs the memory that a plan is to save. One step is traced with every block recomputed, which gives the
live memory at every segment that no plan changes. Then the model runs forward without gradients, and each block, when
it is called, is measured by itself under every strategy on these inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scale_checkpoint.live_memory import storage_bytes
from scale_checkpoint.offload.offload import prefetched_bytes
from scale_checkpoint.planner.block_benchmark import BlockCall, BlockMemory, measure_memory, measure_seconds
from scale_checkpoint.planner.blocks import BlockSignature, block_signature, excluded_modules, find_blocks
from scale_checkpoint.planner.cost_model import BlockCost, assemble, pool_seconds
from scale_checkpoint.planner.step import Step, device_of, least_seconds, preserve_state, single_threaded
from scale_checkpoint.planner.strategies import KEEP, OFFLOAD, RECOMPUTE, Strategies, applied, resolve_strategies
from scale_checkpoint.planner.timeline import BoundaryTensor, Segment, StrategyCost
from scale_checkpoint.planner.trace import StepTrace, Visit, trace_step
from scale_checkpoint.tree import unique_tensors

FORMAT = 3


@dataclass(frozen=True)
class MemoryProfile:
    """Costs of the segments of a step, from which plans for any budget are made.

    Attributes:
        segments: In the order of the forward; bytes count all that lives, parameters, buffers and inputs included.
        boundary_tensors: Tensors that pass between the segments.
        blocks: Class and parameters of the blocks, by name.
        strategies: What each strategy does, by its name, as `apply_checkpointing` takes it.
        device: The device that it was measured on, such as "cuda".
        excluded: Modules of the same classes that are no blocks: of these names the model may have more.
    """

    segments: tuple[Segment, ...]
    boundary_tensors: tuple[BoundaryTensor, ...]
    blocks: Mapping[str, BlockSignature]
    strategies: Mapping[str, str | tuple[str, ...]]
    device: str
    excluded: tuple[str, ...] = ()

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the profile as JSON, in the place of a file that is there."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MemoryProfile:
        """Reads a profile that `save` has written; a ValueError where the file holds none."""
        return cls.from_json(read_json(path, "a memory profile"), path)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], path: object) -> MemoryProfile:
        """Builds a profile from what JSON holds; `path` is for errors."""
        try:
            segments = tuple(
                replace(
                    Segment(**segment),
                    costs={name: _cost_from_json(**cost) for name, cost in segment["costs"].items()},
                )
                for segment in content["segments"]
            )
            tensors = tuple(BoundaryTensor(**tensor) for tensor in content["boundary_tensors"])
            blocks = {
                name: BlockSignature(block["kind"], {key: tuple(shape) for key, shape in block["parameters"].items()})
                for name, block in content["blocks"].items()
            }
            strategies = {
                name: how if isinstance(how, str) else tuple(how) for name, how in content["strategies"].items()
            }
            profile = cls(segments, tensors, blocks, strategies, content["device"], tuple(content["excluded"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no memory profile: {type(error).__name__}: {error}") from error
        _check_consistent(profile, path)
        return profile


def read_json(path: str | PathLike[str], what: str) -> dict[str, Any]:
    """Reads a JSON file of this format; `what` it is expected to hold is for the error."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} should hold {what} as JSON, but is not JSON: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} should hold {what} of format {FORMAT}, but its format is {found}")
    return dict(content)


def profile_memory(
    model: nn.Module,
    sample_input: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    strategies: Strategies | None = None,
    blocks: Sequence[str] | None = None,
    repeats: int = 5,
) -> MemoryProfile:
    """Measures the memory and the time of each block under each strategy.

    The model's gradients, buffers and random numbers are afterwards what they were. Needs about the memory of a step
    in which every block is computed again.

    Args:
        model: In the state in which it will train: its device, its dtype, `train()`; before it is sharded or wrapped.
        sample_input: A batch as in training: a tensor, a tuple of positional or a dict of keyword arguments.
        loss: Makes a scalar of what the model returns; None takes the output's `loss`, a scalar output as it is, or
            else gives every result a gradient of ones.
        strategies: What may be done with each block: see `Strategies`; None takes "keep", "recompute", "selective" and,
            where the device is not the host itself, "offload".
        blocks: Names of modules that are to be planned; None finds them.
        repeats: How often each time is taken at least; the least counts, which other work disturbs least. Of blocks
            that are alike, in shapes and in memory, the first alone is timed so often.

    Raises:
        ValueError: `repeats` is less than 1, no blocks are found, a name is none of the model's, or the step has no
            gradient.
    """
    if repeats < 1:
        raise ValueError(f"repeats: each time is taken at least once, but repeats={repeats} was given")
    found = find_blocks(model, blocks)
    device = device_of(model)
    resolved = resolve_strategies(strategies, device)
    step = Step(model, sample_input, loss)
    with preserve_state(model), single_threaded(device):
        trace = _trace_recomputed_step(step, found, device)
        seconds = _recomputed_step_seconds(step, found, device, repeats)
        measured = pool_seconds(
            _benchmark_blocks(step, found, trace.visits, _BlockBenchmark(device, resolved, repeats))
        )
        # Once more, lest what disturbed the machine for a while counts for the step and not for its blocks.
        seconds = min(seconds, _recomputed_step_seconds(step, found, device, repeats))
    model_bytes = storage_bytes([*model.parameters(), *model.buffers(), *unique_tensors((step.args, step.kwargs))])
    segments, tensors = assemble(trace, measured, model_bytes, seconds)
    signatures = {name: block_signature(block) for name, block in found.items()}
    return MemoryProfile(segments, tensors, signatures, resolved, device.type, excluded_modules(model, found))


def _trace_recomputed_step(step: Step, blocks: Mapping[str, nn.Module], device: torch.device) -> StepTrace:
    """Traces a step in which every block is recomputed."""
    trace = StepTrace(device)
    with _recomputed(blocks):
        step.run()  # Kernels prepare themselves at the first call.
        step.clear_grads()
        with trace_step(trace, blocks):
            step.run()
    step.clear_grads()
    return trace


def _recomputed_step_seconds(step: Step, blocks: Mapping[str, nn.Module], device: torch.device, repeats: int) -> float:
    """Takes the time of the same step."""
    with _recomputed(blocks):
        seconds = least_seconds({"step": lambda: step.seconds(device)}, repeats)["step"]
    step.clear_grads()
    return seconds


@contextmanager
def _recomputed(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks.values():
            stack.enter_context(applied(block, RECOMPUTE))
        yield


class _BlockBenchmark:
    """Measures blocks under every strategy; the first of several equal ones is timed `repeats` times."""

    def __init__(self, device: torch.device, strategies: Mapping[str, str | tuple[str, ...]], repeats: int) -> None:
        self._device, self._strategies, self._repeats = device, strategies, repeats
        self._timed: set[tuple[str, tuple[BlockMemory, ...]]] = set()

    def costs_of(self, block: nn.Module, call: BlockCall) -> dict[str, BlockCost]:
        """Returns the costs of a block by strategy."""
        device, memory = self._device, dict[str, BlockMemory]()
        for name, how in self._strategies.items():
            with applied(block, how):
                memory[name] = measure_memory(block, call, device)
        kind = repr(block_signature(block)), tuple(memory.values())
        seconds = least_seconds(
            {name: partial(self._seconds, block, call, how) for name, how in self._strategies.items()},
            1 if kind in self._timed else self._repeats,
        )
        self._timed.add(kind)
        fetched_bytes = prefetched_bytes(memory[KEEP].saved_bytes, device)
        return {
            name: BlockCost(memory[name], seconds[name], fetched_bytes if how == OFFLOAD else 0)
            for name, how in self._strategies.items()
        }

    def _seconds(self, block: nn.Module, call: BlockCall, how: str | tuple[str, ...]) -> float:
        with applied(block, how):
            return measure_seconds(block, call, self._device)


def _benchmark_blocks(
    step: Step, blocks: Mapping[str, nn.Module], visits: Sequence[Visit], benchmark: _BlockBenchmark
) -> list[dict[str, BlockCost]]:
    """Returns the costs by strategy of the block of each visit, in order."""
    waiting = [visit for visit in visits if visit.name]
    found: list[dict[str, BlockCost]] = []
    is_measuring = False

    def measure_here(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_measuring
        if is_measuring:
            return
        is_measuring = True
        visit = waiting[len(found)]
        try:
            found.append(
                benchmark.costs_of(block, BlockCall(args, kwargs, visit.input_requires_grad))
                if visit.output_requires_grad
                else {}
            )
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
    return found


def _check_consistent(profile: MemoryProfile, path: object) -> None:
    """Checks that segments, blocks and boundary tensors of a file belong together: it may have been cut."""
    message, num_tensors = f"{path} holds no complete memory profile", len(profile.boundary_tensors)
    for segment in profile.segments:
        if segment.is_block and segment.name not in profile.blocks:
            raise ValueError(f"{message}: its segments visit the block {segment.name!r}, which its blocks do not have")
        for number in (number for cost in segment.costs.values() for number in cost.holds):
            if not 0 <= number < num_tensors:
                raise ValueError(f"{message}: {segment.name!r} holds tensor {number} of {num_tensors}")
    for number, tensor in enumerate(profile.boundary_tensors):
        if not 0 <= tensor.producer <= tensor.last_reader < len(profile.segments):
            raise ValueError(
                f"{message}: tensor {number} passes from segment {tensor.producer} to {tensor.last_reader} of "
                f"{len(profile.segments)}"
            )


def _cost_from_json(holds: Sequence[int] = (), **numbers: Any) -> StrategyCost:
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            raise TypeError(f"'{name}' should be a number, but is {number!r}")
    return StrategyCost(**numbers, holds=tuple(holds))
