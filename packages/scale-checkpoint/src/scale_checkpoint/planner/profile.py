"""Memory profile: the costs of a model's blocks under each strategy, measured once on the machine that will train it.

Nothing here needs the memory that a plan is to save. One step is traced with every block recomputed, which gives the
live memory at every segment that no plan changes. Then the model runs forward without gradients, and each block, when
it is called, is measured by itself under every strategy on these inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from scale_checkpoint.planner.block_benchmark import benchmark_blocks
from scale_checkpoint.planner.blocks import (
    RECOMPUTE,
    BlockSignature,
    Strategies,
    applied,
    block_signature,
    excluded_modules,
    find_blocks,
    resolve_strategies,
)
from scale_checkpoint.planner.cost_model import assemble, pool_seconds
from scale_checkpoint.planner.step import (
    ALONE,
    Step,
    largest_over_ranks,
    least_seconds,
    preserve_state,
    single_threaded,
)
from scale_checkpoint.planner.timeline import BoundaryTensor, Segment, StrategyCost
from scale_checkpoint.planner.trace import StepTrace, trace_step
from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike, group_of

FORMAT = 3


@dataclass(frozen=True)
class MemoryProfile:
    """Costs of the segments of a step, from which plans for any budget are made.

        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint.planner.profile import profile_memory
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)))
        >>> profile = profile_memory(model, torch.randn(128, 64), repeats=1)
        >>> list(profile.blocks), profile.device
        (['0', '1'], 'cpu')

    Attributes:
        segments: In the order of the forward; bytes count all that lives, parameters, buffers and inputs included.
        boundary_tensors: Tensors that pass between the segments.
        blocks: Class and parameters of the blocks, by name.
        strategies: The setting of each strategy, by its name, as `apply_checkpointing` takes it.
        device: The device that it was measured on, for example "cuda".
        excluded: Modules of the same classes that are no blocks: of these names the model may have more.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
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
        """Reads a profile that `save` has written. Raises ValueError if the file has a different format."""
        return cls.from_json(read_json(path))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MemoryProfile:
        segments = []
        for segment in content["segments"]:
            costs = {
                name: StrategyCost(**{**cost, "holds": tuple(cost["holds"])}) for name, cost in segment["costs"].items()
            }
            segments.append(Segment(**{**segment, "costs": costs}))
        blocks = {
            name: BlockSignature(block["kind"], {key: tuple(shape) for key, shape in block["parameters"].items()})
            for name, block in content["blocks"].items()
        }
        strategies = {name: how if isinstance(how, str) else tuple(how) for name, how in content["strategies"].items()}
        tensors = tuple(BoundaryTensor(**tensor) for tensor in content["boundary_tensors"])
        return cls(tuple(segments), tensors, blocks, strategies, content["device"], tuple(content["excluded"]))


def read_json(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads a JSON file of this format."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    file_format = content.get("format") if isinstance(content, dict) else None
    if file_format != FORMAT:
        raise ValueError(f"{path}: expected a plan or profile of format {FORMAT}, but its format is {file_format}")
    return dict(content)


@checked_arguments
def profile_memory(
    model: nn.Module,
    sample_input: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    strategies: Strategies | None = None,
    blocks: Sequence[str] | None = None,
    repeats: int = 5,
    process_group: GroupLike = ALONE,
) -> MemoryProfile:
    """Measures the memory and the time of each block under each strategy.

    The model's gradients, buffers and random numbers are unchanged afterwards. Needs about the memory of a step
    in which every block is computed again.

    Args:
        model: In the state in which it will train: its device, its dtype, `train()`; before it is sharded or wrapped.
        sample_input: A batch as in training: a tensor, a tuple of positional or a dict of keyword arguments.
        loss: Makes a scalar of the model's output; None takes the output's `loss`, or the output itself if it is
            a scalar, or else gives every result a gradient of ones.
        strategies: The possible strategies of each block: see `Strategies`; None takes "keep", "recompute",
            "selective" and, where the device is not the host itself, "offload".
        blocks: Names of modules that are to be planned; None finds them.
        repeats: The least number of measurements of each time. The shortest one counts, because other work disturbs it
            least. Of several blocks with equal shapes and memory, only the first gets all measurements.
        process_group: The ranks whose models exchange data in their passes, for example with divided experts. All of
            them call it together, each with its own batch. They get one profile with the largest bytes and seconds of
            any rank, and the shapes of their own blocks. By default only this rank; None is the default group.

    Raises:
        ValueError: `repeats` is less than 1, no blocks are found, a name is not in the model, or the step has no
            gradient.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint.planner.plan import best_plan
        >>> from scale_checkpoint.planner.profile import profile_memory
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
        >>> profile = profile_memory(model, torch.randn(256, 64), repeats=1)
        >>> list(profile.blocks)
        ['0', '1', '2', '3']
        >>> plans = [best_plan(profile, budget_bytes=budget) for budget in (4 * 2**20, 8 * 2**20)]

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    if repeats < 1:
        raise ValueError(f"repeats: each time is taken at least once, but repeats={repeats} was given")
    block_by_name = find_blocks(model, blocks)
    step = Step(model, sample_input, loss, group_of(process_group))
    resolved = resolve_strategies(strategies, step.device)
    with preserve_state(model), single_threaded(step.device):
        trace = _trace_recomputed_step(step, block_by_name)
        seconds = _recomputed_step_seconds(step, block_by_name, repeats)
        measured = pool_seconds(benchmark_blocks(step, block_by_name, trace.visits, resolved, repeats))
        # Once more, so that a disturbance of the machine counts for the step and its blocks.
        seconds = min(seconds, _recomputed_step_seconds(step, block_by_name, repeats))
    segments, tensors = assemble(trace, measured, step.bytes_before(), seconds)
    signatures = {name: block_signature(block) for name, block in block_by_name.items()}
    profile = MemoryProfile(
        segments, tensors, signatures, resolved, step.device.type, excluded_modules(model, block_by_name)
    )
    if step.group.size == 1:
        return profile
    largest = MemoryProfile.from_json(largest_over_ranks(asdict(replace(profile, blocks={})), step.group))
    return replace(largest, blocks=signatures)  # Experts that do not divide evenly have other shapes on other ranks.


def _trace_recomputed_step(step: Step, blocks: Mapping[str, nn.Module]) -> StepTrace:
    trace = StepTrace(step.device)
    with _recomputed(blocks):
        step.run()  # Kernels prepare themselves at the first call.
        step.clear_grads()
        with trace_step(trace, blocks):
            step.run()
    step.clear_grads()
    return trace


def _recomputed_step_seconds(step: Step, blocks: Mapping[str, nn.Module], repeats: int) -> float:
    with _recomputed(blocks):
        seconds = least_seconds({"step": step.seconds}, repeats)["step"]
    step.clear_grads()
    return seconds


@contextmanager
def _recomputed(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, every block is recomputed."""
    with ExitStack() as stack:
        for block in blocks.values():
            stack.enter_context(applied(block, RECOMPUTE))
        yield
