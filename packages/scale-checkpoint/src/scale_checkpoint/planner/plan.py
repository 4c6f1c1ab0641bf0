"""Memory plans: the strategy of each block, its cost, and how a model is made to follow it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from scale_checkpoint.planner.blocks import KEEP, Strategies, check_same_blocks, resolve_strategies
from scale_checkpoint.planner.chart import bar_chart, format_bytes, format_seconds, plot_timelines, strategy_table
from scale_checkpoint.planner.profile import FORMAT, MemoryProfile, profile_memory, read_json
from scale_checkpoint.planner.solver import UNLIMITED, fastest, minimum_peak
from scale_checkpoint.planner.step import ALONE, device_of
from scale_checkpoint.planner.timeline import Timeline, timeline
from scale_checkpoint.wrapper import apply_checkpointing
from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_core.errors import ScaleError


class BudgetError(ScaleError, ValueError):
    """No plan fits the budget.

    Attributes:
        minimum_bytes: The smallest budget that a plan fits.

    See also: [what to do about a BudgetError](../guides/troubleshooting.md#budgeterror).
    """

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The strategy for the activations of each block; `print` shows it.

    Attributes:
        strategies: By the block's qualified name: "keep", "recompute" or a different strategy of the profile.
        profile: The costs of the blocks.
        budget_bytes: The budget of the plan; None where it was made by hand.

    Raises:
        ValueError: A block has no strategy, or one that the profile doesn't know.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint.planner.plan import MemoryPlan
        >>> from scale_checkpoint.planner.profile import profile_memory
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)))
        >>> profile = profile_memory(model, torch.randn(128, 64), repeats=1)
        >>> keep, recompute = (MemoryPlan(dict.fromkeys(profile.blocks, how), profile) for how in ("keep", "recompute"))
        >>> keep.peak_bytes > recompute.peak_bytes
        True

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """

    strategies: Mapping[str, str]
    profile: MemoryProfile
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        costs = {segment.name: segment.costs for segment in self.profile.segments if segment.is_block}
        for name in self.profile.blocks:
            strategies = list(costs.get(name, self.profile.strategies))
            if self.strategies.get(name) not in strategies:
                raise ValueError(
                    f"block {name!r} has one of the strategies {', '.join(map(repr, strategies))}, "
                    f"but the plan has {self.strategies.get(name)!r}"
                )
        unknown = [name for name in self.strategies if name not in self.profile.blocks]
        if unknown:
            raise ValueError(
                f"a plan names the blocks of its profile ({', '.join(self.profile.blocks)}), but names {unknown[0]!r}"
            )

    @property
    def timeline(self) -> Timeline:
        """Memory over the step, as predicted."""
        segments = self.profile.segments
        chosen = [
            self.strategies[segment.name] if segment.is_block else next(iter(segment.costs)) for segment in segments
        ]
        return timeline(segments, self.profile.boundary_tensors, chosen)

    @property
    def peak_bytes(self) -> int:
        """The most that lives at any one time, as predicted: parameters, buffers, inputs and gradients included."""
        return self.timeline.peak_bytes

    @property
    def seconds(self) -> float:
        """Time of a step's forward and backward, as predicted."""
        return self.timeline.seconds

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan with its profile as JSON, in the place of a file that is there."""
        content = {"format": FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MemoryPlan:
        """Reads a plan that `save` has written. Raises ValueError if the file has a different format."""
        content = read_json(path)
        return cls(content["strategies"], MemoryProfile.from_json(content["profile"]), content["budget_bytes"])

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws memory over the step; needs matplotlib."""
        plot_timelines({"plan": self.timeline}, path, self.budget_bytes)

    def __str__(self) -> str:
        step = self.timeline
        counts = ", ".join(f"{count} {name}" for name, count in Counter(self.strategies.values()).items())
        budget = "" if self.budget_bytes is None else f" of a budget of {format_bytes(self.budget_bytes)}"
        head = f"{counts}: {format_bytes(step.peak_bytes)}{budget}, {format_seconds(step.seconds)} forward and backward"
        body = strategy_table(self.profile.segments, self.strategies, KEEP)
        return f"{head}\n\n{body}\n\n{bar_chart(step, self.budget_bytes)}"


@checked_arguments(own="budget_bytes other_bytes")
def plan_memory(
    model: nn.Module,
    sample_input: Any,
    budget_bytes: int,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    strategies: Strategies | None = None,
    blocks: Sequence[str] | None = None,
    other_bytes: int = 0,
    profile: MemoryProfile | None = None,
    process_group: GroupLike = ALONE,
) -> MemoryPlan:
    """Chooses for each block the strategy for its activations, so that a step is as fast as the budget lets it be.

    Measures the model first (see `profile_memory`), unless a profile is given: then the plan is the same each time.

    Args:
        model: In the state in which it will train: its device, its dtype, `train()`; before it is sharded or wrapped.
        sample_input: A batch as in training: a tensor, a tuple of positional or a dict of keyword arguments.
        budget_bytes: The limit, in bytes, for everything on the device in a step: parameters, buffers, inputs,
            activations, gradients, and `other_bytes`.
        loss: Makes a scalar of the model's output; None takes the output's `loss`, or the output itself if it is
            a scalar, or else gives every result a gradient of ones.
        strategies: The possible strategies of each block: see `profile_memory`.
        blocks: Names of modules that are to be planned; None finds them.
        other_bytes: Other memory on the device all the time, for example the optimizer's state.
        profile: The result of `profile_memory` for this model.
        process_group: Ranks that measure together, and get the same plan: see `profile_memory`.

    Raises:
        BudgetError: No plan fits; names the smallest budget that one fits.
        ValueError: No blocks are found, a name is not in the model, the profile is of a different model, or the step
            has no gradient.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint import apply_plan, plan_memory
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
        >>> plan = plan_memory(model, torch.randn(256, 64), budget_bytes=4 * 2**20)
        >>> plan.peak_bytes <= 4 * 2**20
        True
        >>> model = apply_plan(model, plan)

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    if profile is None:
        profile = profile_memory(
            model, sample_input, loss=loss, strategies=strategies, blocks=blocks, process_group=process_group
        )
    else:
        check_same_blocks(model, profile.blocks, profile.excluded)
    return best_plan(profile, budget_bytes, other_bytes=other_bytes)


@checked_arguments(own="budget_bytes other_bytes")
def best_plan(profile: MemoryProfile, budget_bytes: int, *, other_bytes: int = 0) -> MemoryPlan:
    """Returns the fastest plan that fits a budget; needs no model.

    `budget_bytes`, `other_bytes` and the BudgetError are as in `plan_memory`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint.planner.plan import best_plan
        >>> from scale_checkpoint.planner.profile import profile_memory
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
        >>> profile = profile_memory(model, torch.randn(256, 64), repeats=1)
        >>> plan = best_plan(profile, budget_bytes=4 * 2**20)
        >>> plan.peak_bytes <= 4 * 2**20
        True

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    for name, num_bytes in (("budget_bytes", budget_bytes), ("other_bytes", other_bytes)):
        if type(num_bytes) is not int:
            raise TypeError(f"{name}: expected a whole number of bytes, got {num_bytes!r}; write 2 * 2**30 for 2 GiB")
    if other_bytes < 0:
        raise ValueError(f"other_bytes: expected 0 or more bytes of other tensors on the device, got {other_bytes}")
    room = budget_bytes - other_bytes
    chosen = fastest(profile.segments, profile.boundary_tensors, room)
    if chosen is None:
        least = minimum_peak(profile.segments, profile.boundary_tensors)
        others = f", besides the other {format_bytes(other_bytes)}" if other_bytes else ""
        raise BudgetError(
            f"no plan fits a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes): a step takes at least "
            f"{format_bytes(least)}{others}; write budget_bytes={least + other_bytes}, use a smaller batch, "
            "or name smaller blocks",
            least + other_bytes,
        )
    return MemoryPlan(_by_block(profile, chosen), profile, room)


@checked_arguments
def memory_front(profile: MemoryProfile) -> Iterator[MemoryPlan]:
    """Yields the plans that none is faster than in as little memory, from the fastest to the smallest.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint.planner.plan import memory_front
        >>> from scale_checkpoint.planner.profile import profile_memory
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
        >>> plans = list(memory_front(profile_memory(model, torch.randn(256, 64), repeats=1)))
        >>> plans[0].peak_bytes > plans[-1].peak_bytes  # from the fastest to the smallest
        True

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    waiting: MemoryPlan | None = None
    room = UNLIMITED
    while (chosen := fastest(profile.segments, profile.boundary_tensors, room)) is not None:
        plan = MemoryPlan(_by_block(profile, chosen), profile)
        if waiting is not None and plan.seconds > waiting.seconds:
            yield waiting
        waiting = plan
        room = plan.peak_bytes - 1
    if waiting is not None:
        yield waiting


@checked_arguments
def apply_plan(model: nn.Module, plan: MemoryPlan) -> nn.Module:
    """Makes a model follow a plan, in place; its names, parameters and state-dict keys stay the same.

    Args:
        model: Of the structure that the plan was made for; not yet sharded.
        plan: Of `plan_memory`, or loaded.

    Returns:
        The same model.

    Raises:
        ValueError: The model's blocks are others than the plan's, or more: names the first difference; or a
            strategy of the plan names an unknown operator. Nothing was changed.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint import apply_plan, plan_memory
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
        >>> plan = plan_memory(model, torch.randn(256, 64), budget_bytes=4 * 2**20)
        >>> model = apply_plan(model, plan)
        >>> model(torch.randn(256, 64)).sum().backward()

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    check_same_blocks(model, plan.profile.blocks, plan.profile.excluded)
    resolved = resolve_strategies(plan.profile.strategies, device_of(model))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, strategy in plan.strategies.items():
        apply_checkpointing(modules[name], resolved[strategy])
    return model


def _by_block(profile: MemoryProfile, chosen: Sequence[str]) -> dict[str, str]:
    strategy_by_block = dict.fromkeys(profile.blocks, KEEP)
    for segment, strategy in zip(profile.segments, chosen, strict=True):
        if segment.is_block:
            strategy_by_block[segment.name] = strategy
    return strategy_by_block
