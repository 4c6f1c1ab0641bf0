"""A partition or a stage with its skips as inputs and outputs, so that `checkpoint_wrapper` can recompute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from scale_core.tree import map_tensors
from scale_pipe.microbatch import Arguments
from scale_pipe.partition.partition import describe_layers, run_layers
from scale_pipe.skip.namespace import SkipKey, declared_skips
from scale_pipe.skip.tracker import run_with_skips

Result: TypeAlias = tuple[Any, dict[SkipKey, Any]]
"""The output of a partition, and what it has stashed."""


class PartitionFunction(nn.Module):
    """Calls a module with the skips that it pops, and returns those that it stashes; errors name its layers.

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

    def run(self, popped: Mapping[SkipKey, Any], given: Arguments) -> Result:
        """Computes the module, checkpointed if this is; its arguments alone are mostly tensors, which cost little."""
        if self._has_skips:
            result: Result = self(popped, *given.args, **given.kwargs)
            return result
        return self(*given.args, **given.kwargs), {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; where it has skips, the first argument are those popped, and a `Result` is returned."""
        popped, args = (args[0], args[1:]) if self._has_skips else ({}, args)
        if self._clones:
            args, kwargs = map_tensors(torch.clone, (args, kwargs))
        function: Callable[..., Any] = self.module
        if type(self.module) is nn.Sequential and (len(args) != 1 or kwargs) and len(self.module):
            function = self._run_layers  # torch's own gives its first layer one argument.
        return run_with_skips(function, popped, *args, **kwargs) if self._has_skips else function(*args, **kwargs)

    def _run_layers(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.module, nn.Sequential)
        return run_layers(self.module, args, kwargs)
