"""Plans: what is done with each block, what that costs, and how a model is made to follow it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from scale_checkpoint.planner.chart import bar_chart, format_bytes, format_seconds, plot_timelines, way_table
from scale_checkpoint.planner.model_signature import check_same_blocks
from scale_checkpoint.planner.profile import FORMAT, MemoryProfile, profile_memory, read_json
from scale_checkpoint.planner.solver import UNLIMITED, fastest, least_peak
from scale_checkpoint.planner.step import device_of
from scale_checkpoint.planner.strategies import KEEP, Ways, resolve
from scale_checkpoint.planner.timeline import Timeline, timeline
from scale_checkpoint.wrapper import apply_checkpointing


class BudgetError(ValueError):
    """No plan fits the budget.

    Attributes:
        least_bytes: The smallest budget that a plan fits.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """What is done with the activations of each block; `print` shows it.

    Attributes:
        ways: By the block's qualified name: "keep", "recompute" or another way of the profile.
        profile: What the blocks cost.
        budget_bytes: What the plan was made for; None where it was made by hand.

    Raises:
        ValueError: A block has no way, or one that the profile doesn't know.
    """

    ways: Mapping[str, str]
    profile: MemoryProfile
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        open_ways = {segment.name: segment.ways for segment in self.profile.segments if segment.is_block}
        for name in self.profile.blocks:
            known = list(open_ways.get(name, self.profile.hows))
            if self.ways.get(name) not in known:
                raise ValueError(
                    f"block {name!r} is treated in one of the ways {', '.join(map(repr, known))}, "
                    f"but the plan says {self.ways.get(name)!r}"
                )
        strangers = [name for name in self.ways if name not in self.profile.blocks]
        if strangers:
            raise ValueError(
                f"a plan names the blocks of its profile ({', '.join(self.profile.blocks)}), but names {strangers[0]!r}"
            )

    @property
    def timeline(self) -> Timeline:
        """Memory over the step, as predicted."""
        segments = self.profile.segments
        chosen = [self.ways[segment.name] if segment.is_block else next(iter(segment.ways)) for segment in segments]
        return timeline(segments, self.profile.crossings, chosen)

    @property
    def peak_bytes(self) -> int:
        """The most that lives at any one time, as predicted: parameters, buffers, inputs and gradients included."""
        return self.timeline.peak_bytes

    @property
    def seconds(self) -> float:
        """Time of a step's forward and backward, as predicted."""
        return self.timeline.seconds

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan with its profile as JSON.

        Args:
            path: A file, replaced if it is there.

        Raises:
            OSError: It cannot be written.
        """
        content = {"format": FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MemoryPlan:
        """Reads a plan that `save` has written.

        Args:
            path: The file.

        Raises:
            ValueError: It is no plan, or one of another format.
            OSError: It cannot be read.
        """
        content = read_json(path, "a memory plan")
        try:
            ways, profile, budget_bytes = dict(content["ways"]), content["profile"], content["budget_bytes"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no memory plan: {type(error).__name__}: {error}") from error
        if not (budget_bytes is None or isinstance(budget_bytes, int)):
            raise ValueError(f"{path} holds no memory plan: its budget_bytes are {budget_bytes!r}")
        return cls(ways, MemoryProfile.from_json(profile, path), budget_bytes)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws memory over the step; needs matplotlib.

        Args:
            path: A picture, such as `plan.png` or `plan.svg`, replaced if it is there.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: The picture cannot be written.
        """
        plot_timelines({"plan": self.timeline}, path, self.budget_bytes)

    def __str__(self) -> str:
        step = self.timeline
        counts = ", ".join(
            f"{sum(w == way for w in self.ways.values())} {way}" for way in dict.fromkeys(self.ways.values())
        )
        budget = "" if self.budget_bytes is None else f" of a budget of {format_bytes(self.budget_bytes)}"
        head = f"{counts}: {format_bytes(step.peak_bytes)}{budget}, {format_seconds(step.seconds)} forward and backward"
        body = way_table(self.profile.segments, self.ways, KEEP)
        return f"{head}\n\n{body}\n\n{bar_chart(step, self.budget_bytes)}"


def plan_memory(
    model: nn.Module,
    sample_input: Any,
    budget_bytes: int,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    ways: Ways | None = None,
    blocks: Sequence[str] | None = None,
    beside_bytes: int = 0,
    profile: MemoryProfile | None = None,
) -> MemoryPlan:
    """Decides for each block what is done with its activations, so that a step is as fast as the budget lets it be.

    Measures the model first (see `profile_memory`), unless a profile is given: then the plan is the same each time.

    Args:
        model: In the state in which it will train: its device, its dtype, `train()`; before it is sharded or wrapped.
        sample_input: A batch as in training: a tensor, a tuple of positional or a dict of keyword arguments.
        budget_bytes: For all that lives on the device in a step: parameters, buffers, inputs, activations, gradients,
            and what `beside_bytes` says.
        loss: Makes a scalar of what the model returns; None takes the output's `loss`, a scalar output as it is, or
            else gives every result a gradient of ones.
        ways: What may be done with each block: see `profile_memory`.
        blocks: Names of modules that are to be planned; None finds them.
        beside_bytes: What else lives on the device all the time, such as the optimizer's state.
        profile: What `profile_memory` has returned for this model.

    Raises:
        BudgetError: No plan fits; says the least that is possible.
        ValueError: No blocks are found, a name is none of the model's, the profile is another model's, or the step has
            no gradient.
        TypeError: A number of bytes is no int.
    """
    if profile is None:
        profile = profile_memory(model, sample_input, loss=loss, ways=ways, blocks=blocks)
    else:
        check_same_blocks(model, profile)
    return best_plan(profile, budget_bytes, beside_bytes=beside_bytes)


def best_plan(profile: MemoryProfile, budget_bytes: int, *, beside_bytes: int = 0) -> MemoryPlan:
    """Returns the fastest plan that fits a budget; needs no model.

    Args:
        profile: What the blocks cost.
        budget_bytes: See `plan_memory`.
        beside_bytes: See `plan_memory`.

    Raises:
        BudgetError: No plan fits; says the least that is possible.
        TypeError: A number of bytes is no int.
    """
    for name, given in (("budget_bytes", budget_bytes), ("beside_bytes", beside_bytes)):
        if type(given) is not int:
            raise TypeError(
                f"{name}: expected a whole number of bytes, got a {type(given).__name__}: {given!r}; write "
                f"{name}=2 * 2**30 for 2 GiB"
            )
    room = budget_bytes - beside_bytes
    chosen = fastest(profile.segments, profile.crossings, room)
    if chosen is None:
        least = least_peak(profile.segments, profile.crossings)
        beside = f", and {format_bytes(beside_bytes)} lie beside it" if beside_bytes else ""
        raise BudgetError(
            f"no plan fits a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes): a step takes at least "
            f"{format_bytes(least)}{beside}; write budget_bytes={least + beside_bytes}, use a smaller batch, "
            "or name smaller blocks",
            least + beside_bytes,
        )
    return MemoryPlan(_by_block(profile, chosen), profile, room)


def memory_front(profile: MemoryProfile) -> Iterator[MemoryPlan]:
    """Yields the plans that none is faster than in as little memory, from the fastest to the smallest.

    Args:
        profile: What the blocks cost.
    """
    waiting: MemoryPlan | None = None
    room = UNLIMITED
    while (chosen := fastest(profile.segments, profile.crossings, room)) is not None:
        plan = MemoryPlan(_by_block(profile, chosen), profile)
        if waiting is not None and plan.seconds > waiting.seconds:
            yield waiting
        waiting = plan
        room = plan.peak_bytes - 1
    if waiting is not None:
        yield waiting


def apply_plan(model: nn.Module, plan: MemoryPlan) -> nn.Module:
    """Makes a model follow a plan, in place; its names, parameters and state-dict keys stay what they are.

    Args:
        model: Of the structure that the plan was made for; not yet sharded.
        plan: Of `plan_memory`, or loaded.

    Returns:
        The same model.

    Raises:
        ValueError: The model's blocks are others than the plan's, or more: names the first difference; or a way of
            the plan names an operator that there is not. Nothing was changed.
    """
    check_same_blocks(model, plan.profile)
    hows = resolve(plan.profile.hows, device_of(model))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, way in plan.ways.items():
        apply_checkpointing(modules[name], hows[way])
    return model


def _by_block(profile: MemoryProfile, chosen: Sequence[str]) -> dict[str, str]:
    found = dict.fromkeys(profile.blocks, KEEP)
    for segment, way in zip(profile.segments, chosen, strict=True):
        if segment.is_block:
            found[segment.name] = way
    return found
