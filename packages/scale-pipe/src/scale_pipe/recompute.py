"""A partition or a stage as a function of its inputs and skips, so that `checkpoint_wrapper` can recompute it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from scale_core.rng import GeneratorState, replayed
from scale_core.tree import map_tensors
from scale_pipe.partition.partition import describe_layers, run_layers
from scale_pipe.skip.namespace import SkipKey, declared_skips
from scale_pipe.skip.tracker import run_with_skips

Result: TypeAlias = tuple[Any, dict[SkipKey, Any]]
"""The output of a partition, and what it has stashed."""


class PartitionFunction(nn.Module):
    """Calls a module with what it pops, and returns what it stashes; errors of checkpointing name its layers.

    `clones` is for a module that changes its inputs in place where they are needed again.
    """

    def __init__(self, module: nn.Module, *, title: str, clones: bool = False) -> None:
        super().__init__()
        self.module = module
        self._title = f"{title} with {describe_layers(module)}"
        self._clones = clones
        self._has_skips = any(declared_skips(part) is not None for part in module.modules())

    def _get_name(self) -> str:
        return self._title

    def forward(
        self, popped: Mapping[SkipKey, Any], args: Any, kwargs: Any, random_state: RandomState | None = None
    ) -> Result:
        """Computes the module; a recomputation with the same random state draws the same numbers."""
        with nullcontext() if random_state is None else random_state.recorded_or_replayed():
            return self._call(popped, args, kwargs)

    def _call(self, popped: Mapping[SkipKey, Any], args: Any, kwargs: Any) -> Result:
        if self._clones:
            args, kwargs = map_tensors(torch.clone, (args, kwargs))
        function: Callable[..., Any] = self.module
        if type(self.module) is nn.Sequential and (len(args) != 1 or kwargs) and len(self.module):
            function = self._run_layers  # torch's own gives its first layer one argument.
        if self._has_skips:
            return run_with_skips(function, popped, *args, **kwargs)
        return function(*args, **kwargs), {}

    def _run_layers(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.module, nn.Sequential)
        return run_layers(self.module, args, kwargs)


class RandomState:
    """The random numbers of one micro-batch in one partition, drawn again in a recomputation.

    It looks at the generators of the host and of the partition's device: those of other devices belong to other
    threads. (What several threads draw from the host's generator at the same time has no order that could be repeated.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawn: list[GeneratorState] | None = None

    @contextmanager
    def recorded_or_replayed(self) -> Iterator[None]:
        """Around the forward, and around each recomputation."""
        if self._drawn is not None:
            with replayed(self._drawn):
                yield
            return
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            torch.cuda.init()
            generators.append(torch.cuda.default_generators[self._device.index])
        before = [GeneratorState(generator, generator.get_state()) for generator in generators]
        yield
        self._drawn = [drawn for drawn in before if not torch.equal(drawn.state, drawn.generator.get_state())]


# A leaf without tensors for checkpointing: the recomputation gets the same object.
pytree.register_pytree_node(RandomState, lambda state: ([], state), lambda _, state: state)
