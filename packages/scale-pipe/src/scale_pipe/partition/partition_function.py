"""How a partition or a stage is called: layer by layer, with skips as inputs and outputs, so it can be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from scale_core.tree import map_tensors
from scale_pipe.microbatch import Arguments, describe_arguments
from scale_pipe.skip.namespace import SkipKey, declared_skips
from scale_pipe.skip.tracker import run_with_skips


class Partition(nn.Sequential):
    """Some layers of a sequence, by their names in it; the first one takes all arguments that the pipeline is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run_layers(self, args, kwargs)


def run_layers(layers: nn.Sequential, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs layers; the first may take any arguments; errors get a note on the layer and its arguments."""
    arguments = Arguments(args, dict(kwargs))
    for name, layer in layers._modules.items():
        assert layer is not None
        try:
            arguments = Arguments((layer(*arguments.args, **arguments.kwargs),), {})
        except Exception as error:  # In a recomputation as well, where no traceback says which layer it is.
            error.add_note(
                f"in layer {name!r} of the pipeline, a {type(layer).__name__}, given {describe_arguments(arguments)}"
            )
            raise
    return arguments.args[0]


def describe_layers(module: nn.Module) -> str:
    """Describes a partition or a stage for errors: "layers 2 (Linear), 3 (Tanh)", or its class."""
    if not isinstance(module, nn.Sequential):
        return str(module._get_name())
    layers = [f"{name} ({layer._get_name()})" for name, layer in module.named_children()]
    if len(layers) > 4:
        return f"layers {layers[0]} to {layers[-1]}"
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(layers)}"


Result: TypeAlias = tuple[Any, dict[SkipKey, Any]]
"""The output of a partition, and what it has stashed."""


class PartitionFunction(nn.Module):
    """Calls a module with the skips that it pops, and returns the skips that it stashes; errors name its layers.

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
        """The module's output; if it has skips, the first argument has the popped ones, and a `Result` is returned."""
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


Checkpoint: TypeAlias = Literal["always", "except_last", "never"]
"""Which micro-batches are recomputed; the last one's backward begins at once, so it need not be."""


def check_checkpoint(checkpoint: Any) -> None:
    """Raises `ValueError` if it is none of the three."""
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', but {checkpoint!r}")


def starts_in_place(module: nn.Module) -> bool:
    """Whether the first layer is one as `nn.ReLU(inplace=True)`, whose input has to be copied if it is needed again."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return getattr(module, "inplace", False) is True
