"""Which stage holds which module, from the names at which a model is cut.

Modules and parameters count in the order in which the model registers them, parents before their children. A cut begins
a new stage there:

    cuts ["h.2", "norm"]        stage
    wte                         0
    h.0  h.1                    0  0
    h.2  h.3                    1  1        each with all that is in it
    norm  head                  2  2

A module with parts on several stages, here the model itself and `h`, is *split*: each stage has a copy of it, without
modules on other stages, and runs its forward. A module in it is on a stage as a *whole*, or is split in turn. A module
that holds neither parameters nor saved buffers is *stateless*: it is on every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from scale_core.arguments import did_you_mean


class _Item(NamedTuple):
    """A module or a parameter in the order of registration."""

    name: str
    module: nn.Module | None
    holds: bool


@dataclass(frozen=True)
class CutPlan:
    """The modules and parameters of each stage, by names in the model."""

    cuts: tuple[str, ...]  # The modules at which stages 1, 2, ... begin.
    stages_of: Mapping[str, tuple[int, ...]]  # By module, or parameter of a split one, the stages that hold it.
    split_modules: frozenset[str]  # The model itself is "".

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1

    def holds(self, stage: int, name: str) -> bool:
        """Whether a stage holds a module in full or a parameter."""
        return stage in self.stages_of[name]

    def describe_stages(self, name: str) -> str:
        """Returns "stage 0" or "stages 0, 3", for errors."""
        stages = self.stages_of[name]
        return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"


def plan_cuts(model: nn.Module, cuts: Sequence[str], hold: Mapping[str, int | Sequence[int]] | None = None) -> CutPlan:
    """Assigns modules and parameters to stages; for arguments and errors see `split`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model that is cut is an nn.Module, but is {type(model).__name__}")
    items = list(_items(model))
    positions = {item.name: position for position, item in enumerate(items)}
    starts = _check_cuts(model, items, positions, cuts)
    stages_by_name = _check_hold(hold or {}, positions, len(cuts) + 1, cuts)

    def stages_of(position: int) -> tuple[int, ...]:
        for ancestor in _with_ancestors(items[position].name):
            if ancestor in stages_by_name:
                return stages_by_name[ancestor]
        return (sum(start <= position for start in starts),)

    split_modules = {""} | {
        above for name in (*cuts, *stages_by_name) for above in _with_ancestors(name) if above != name
    }
    by_module: dict[str, set[tuple[int, ...]]] = {}
    for position, item in enumerate(items):
        if item.holds or item.name in stages_by_name:
            for ancestor in _with_ancestors(item.name):
                by_module.setdefault(ancestor, set()).add(stages_of(position))
    split_modules |= {
        item.name
        for item in items
        if item.name in by_module and item.module is not None
        if len(by_module[item.name]) > 1 or _parts_are_called(item.module)
    }
    stages: dict[str, tuple[int, ...]] = {}
    for position, item in enumerate(items):
        parent = item.name.rpartition(".")[0]
        if item.name not in split_modules and parent in split_modules and item.name in by_module:
            stages[item.name] = stages_of(position) if item.module is None else next(iter(by_module[item.name]))
    return CutPlan(tuple(cuts), stages, frozenset(split_modules))


def _parts_are_called(module: nn.Module) -> bool:
    """Whether a module's parts may be called one by one, as the parts of a list or of a plain sequence."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is nn.Sequential and not hooked


def _items(module: nn.Module, name: str = "") -> Iterator[_Item]:
    """Yields modules, parameters and saved buffers in the order of registration, those with two names twice."""
    yield _Item(name, module, holds=False)
    prefix = f"{name}." if name else ""
    saved = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
    for key in module._parameters:
        yield _Item(prefix + key, None, module._parameters[key] is not None)
    for key in saved:
        yield _Item(prefix + key, None, module._buffers[key] is not None)
    for key, child in module._modules.items():
        if child is not None:
            yield from _items(child, prefix + key)


def _with_ancestors(name: str) -> Iterator[str]:
    """Yields a name, the name of the module that holds it, and so on up to the model's, which is ""."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _check_cuts(
    model: nn.Module, items: Sequence[_Item], positions: Mapping[str, int], cuts: Sequence[str]
) -> list[int]:
    argument: object = cuts
    if isinstance(cuts, str) or not isinstance(argument, Sequence) or not all(isinstance(cut, str) for cut in cuts):
        raise TypeError(f'cuts are a list of names, as ["blocks.4", "blocks.8"], but got {cuts!r}')
    names = [item.name for item in items if item.module is not None and item.name]
    starts: list[int] = []
    for index, cut in enumerate(cuts):
        if cut not in names:
            same_depth = [name for name in names if name.count(".") == cut.count(".")]
            hint = did_you_mean(cut, same_depth or names)
            raise ValueError(f"{type(model).__name__} has no module named {cut!r} to be cut at; {hint}")
        if type(items[positions[cut]].module) in (nn.ModuleList, nn.ModuleDict):
            inside = next((name for name in names if name.startswith(f"{cut}.")), None)
            raise TypeError(
                f"{cut!r} is a {type(items[positions[cut]].module).__name__}, which is never called, so nothing can be "
                "cut at its call" + (f"; cut at its first module: {inside!r}" if inside else "")
            )
        if starts and positions[cut] <= starts[-1]:
            before = cuts[index - 1]
            problem = "is named twice" if cut == before else f"is registered before {before!r}"
            ordered = [name for name in names if name in cuts]
            raise ValueError(f"cuts are in the order of the model, but {cut!r} {problem}; write {ordered}")
        starts.append(positions[cut])
    return starts


def _check_hold(
    hold: Mapping[str, int | Sequence[int]], positions: Mapping[str, int], num_stages: int, cuts: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    if not isinstance(hold, Mapping):
        raise TypeError(f'hold gives the stage of each name, as {{"head": 0}}, but got {hold!r}')
    stages_by_name: dict[str, tuple[int, ...]] = {}
    for name, numbers in hold.items():
        if name not in positions or not name:
            hint = did_you_mean(name, filter(None, positions))  # "" is the model itself.
            raise ValueError(f"hold names {name!r}, which the model does not have; {hint}")
        many = list(numbers) if isinstance(numbers, Iterable) else [numbers]
        if not all(isinstance(number, int) for number in many):
            raise TypeError(f"hold[{name!r}] is the number of a stage, or a list of them, but is {numbers!r}")
        stages = tuple(sorted(set(many)))
        if not stages or min(stages) < 0 or max(stages) >= num_stages:
            raise ValueError(
                f"hold[{name!r}] is {numbers!r}, but {len(cuts)} cuts make the stages 0 to {num_stages - 1}"
            )
        within = [cut for cut in cuts if cut == name or cut.startswith(f"{name}.")]
        if within:
            raise ValueError(
                f"hold[{name!r}] would move the cut at {within[0]!r}; hold smaller modules, or cut elsewhere"
            )
        stages_by_name[name] = stages
    return stages_by_name
