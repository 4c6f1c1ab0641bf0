"""What is looked at once, in a model's first forward: whether the ranks hold different parts of its weights.

Whoever initialises a model that is divided already, or sends one rank's weights to the others, gives all ranks the same
numbers. The model trains on with them, and nothing else shows that it is a much smaller one. Some elements of each
weight are compared, where the layer is about to use them, so that it does not matter who holds them at other times.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group
from scale_core.compat import active_fake_mode
from scale_core.consistency.execution_order import identity
from scale_core.part_hooks import ForEachPart
from scale_tp.layers.base import ParallelModule

_NUM_COMPARED = 32  # elements of a weight


def watch_first_forward(model: nn.Module, group: Group) -> None:
    """Has the first forward of a divided model end in an error where all ranks hold the same, and not their parts."""
    look = _Look(group)
    model.register_forward_pre_hook(look.before)
    model.register_forward_hook(look.after, always_call=True)


@dataclass
class _Look(ForEachPart):
    """The state of it.

    Attributes:
        group: The ranks that divide the model.
        done: What has been looked at: the model, or its parts.
        names: The weights that are compared, in the model's order.
        samples: Some elements of those that a layer has used, by name.
        handles: Of the hooks that take them, for as long as the forward runs.
    """

    group: Group
    done: WeakSet[nn.Module] = field(default_factory=WeakSet)
    names: list[str] = field(default_factory=list)
    samples: dict[str, Tensor] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)

    def before(self, model: nn.Module, args: Any) -> None:
        """A forward pre-hook of the model."""
        if torch.compiler.is_compiling() or model in self.done:
            return
        if self.group.size == 1 or self.group.backend == "fake" or active_fake_mode() is not None:
            self.done.add(model)
            return
        self.clear()
        for path, module in model.named_modules():
            if not isinstance(module, ParallelModule):
                continue
            names = [name for name in module.placements if _is_comparable(module, name)]
            if names:
                self.names += [f"{path}.{name}".lstrip(".") for name in names]
                self.handles.append(module.register_forward_pre_hook(_Sample(self.samples, path, names)))

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the model, after an error, too: then there is no output."""
        if torch.compiler.is_compiling() or model in self.done:
            return
        names, samples = self.names, self.samples
        self.clear()
        if output is None:
            return
        self.done.add(model)
        rows = exchange([_word(samples.get(name)) for name in names], self.group)
        used = [(name, set(words)) for name, words in zip(names, zip(*rows, strict=True), strict=True) if all(words)]
        alike = [name for name, words in used if len(words) == 1]
        if alike:
            _tell(alike, len(used), self.group)

    def clear(self) -> None:
        """Takes the hooks away and forgets what they have found."""
        for handle in self.handles:
            handle.remove()
        self.names, self.samples, self.handles = [], {}, []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "done": None, "names": [], "samples": {}, "handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, done=WeakSet())


@dataclass(frozen=True)
class _Sample:
    """A forward pre-hook of a layer: takes some elements of its weights."""

    samples: dict[str, Tensor]
    path: str
    names: list[str]

    def __call__(self, module: nn.Module, args: Any) -> None:
        assert isinstance(module, ParallelModule)
        for name in self.names:
            value = getattr(module, name, None)
            if isinstance(value, Tensor) and tuple(value.shape) == module.placements[name].local_shape(
                module.group.rank
            ):
                flat = value.detach().reshape(-1)
                step = max(1, flat.numel() // _NUM_COMPARED)
                self.samples[f"{self.path}.{name}".lstrip(".")] = flat[::step][:_NUM_COMPARED].clone()


def _is_comparable(module: ParallelModule, name: str) -> bool:
    """Whether all ranks have parts of one shape, and of different elements.

    A bias is none: whoever draws may set it to zeros, or leave it as it is.
    """
    shape, _, split = module.placements[name]
    return len(shape) > 1 and split is not None and len(set(split.sizes)) == 1 and sum(split.sizes) == split.total


def _word(sample: Tensor | None) -> int:
    """A number for these values; 0 where they say nothing, as all zeros or all ones."""
    values = [] if sample is None else sample.tolist()
    return identity(*values) if len(set(values)) > 1 else 0


def _tell(alike: list[str], number: int, group: Group) -> None:
    shown = ", ".join(map(repr, alike[:3])) + (", ..." if len(alike) > 3 else "")
    told = (
        f"the ranks {list(group.ranks)} hold the same numbers in {len(alike)} of {number} divided weights ({shown}), "
        "of which each should have a part of its own. Either they were drawn into the parts: write "
        "scale_tp.initialise_whole(model, lambda model: model.apply(initialise)). Or one rank's were sent to the "
        'others: give what does so, such as a data parallel wrapper, the ranks along the data axis, mesh["data"]. Then '
        "load or initialise them again"
    )
    if len(alike) == number:
        raise RuntimeError(told)
    warnings.warn(f"{told} (a model whose whole weights repeat may have such parts)", stacklevel=2)
