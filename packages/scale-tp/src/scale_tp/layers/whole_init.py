"""Code that gives values to whole parameters, run on a model of which this rank has parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from scale_core.compat import active_fake_mode
from scale_tp.layers.base import ParallelModule
from scale_tp.weight_init import WholeView

_Module = TypeVar("_Module", bound=nn.Module)


@torch.no_grad()
def initialise_whole(module: _Module, function: Callable[[_Module], object]) -> _Module:
    """Has a function give values to a divided module as if it were whole; each rank keeps its part of them.

    A function that draws into a part computes with the part's number of inputs and outputs and, from one seed, gives
    all ranks the same numbers. Here it finds parameters that have the whole shape, and random numbers go on as if they
    had been drawn for the whole. Nothing is sent: all ranks call it from the same random state.

    Args:
        module: A module that is divided, or that holds such; on the meta device nothing happens to its parameters.
        function: Is called with the module once. It fills parameters in place, as those of `torch.nn.init` do. What it
            reads before it has written it is NaN where other ranks have it. Where it looks at the values of a
            parameter, that parameter is built as a whole until it returns.

    Returns:
        The module.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A parameter is no longer the part that its layer has, as after `fully_shard`, or `function` has put
            another one in its place.

    Example:
        initialise_whole(model, lambda model: model.apply(initialise))
        initialise_whole(model, lambda model: model.apply(model._init_weights))     # of transformers
    """
    _check_kinds(module, function)
    if active_fake_mode() is not None:
        function(module)
        return module
    views = _views(module)
    replaced: list[str] = []
    for (below, name), (_, view) in views.items():
        below._parameters[name] = view  # type: ignore[assignment]  # for as long as the function runs
    try:
        function(module)
    finally:
        for (below, name), (param, view) in views.items():
            held: object = below._parameters.get(name)
            if held is not view:
                replaced.append(f"{type(below).__name__}.{name}")
            below._parameters[name] = param
    if replaced:
        raise ValueError(
            f"expected the function to fill parameters in place, but it has put others in the place of {replaced}: "
            "write torch.nn.init.normal_(module.weight), or module.weight.data.normal_()"
        )
    for view in {id(view): view for _, view in views.values()}.values():
        view.finish()
    return module


def _check_kinds(module: object, function: object) -> None:
    if not isinstance(module, nn.Module) or not callable(function):
        raise TypeError(
            f"expected a module and a function of it, got {type(module).__name__} and {type(function).__name__}: write "
            "initialise_whole(model, lambda model: model.apply(initialise))"
        )


def _views(module: nn.Module) -> dict[tuple[ParallelModule, str], tuple[nn.Parameter, WholeView]]:
    """For each divided parameter, by its module and name, the parameter and what stands for the whole of it."""
    made: dict[Tensor, WholeView] = {}
    found: dict[tuple[ParallelModule, str], tuple[nn.Parameter, WholeView]] = {}
    for path, below in module.named_modules():
        if not isinstance(below, ParallelModule) or below.group.size == 1:
            continue
        for name, placement in below.placements.items():
            param = below._parameters.get(name)
            # Where it is a view, someone around has put it there.
            if param is None or param.is_meta or placement.split is None or isinstance(param, WholeView):
                continue
            local = placement.local_shape(below.group.rank)
            if tuple(param.shape) != local:
                raise ValueError(
                    f"'{path}.{name}': expected the part {local} that rank {below.group.rank} of {below.group.size} "
                    f"has, got {tuple(param.shape)}: give parameters their values before fully_shard"
                )
            if param not in made:
                view = WholeView.of(param, placement.shape, placement.dim, placement.split, below.group.rank)
                made[param] = view
            found[below, name] = (param, made[param])
    return found
