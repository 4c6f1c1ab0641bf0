"""Runs code that initializes full parameters on a model that is divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from scale_core.compat import active_fake_mode
from scale_core.parameters import copy_attributes
from scale_core.shard import on_local_tensors
from scale_tp.layers.base import ParallelModule
from scale_tp.weight_init import FullWeightProxy

_Module = TypeVar("_Module", bound=nn.Module)


@torch.no_grad()
def init_as_full(module: _Module, function: Callable[[_Module], object]) -> _Module:
    """Has a function initialize a divided module as if it were not; each rank keeps its shard of the values.

    A function that draws into a part computes with the part's number of inputs and outputs and, from one seed, gives
    all ranks the same numbers. Here it sees parameters with the full shape, and the random state afterwards is the one
    after drawing the full parameters. Nothing is sent: all ranks call it from the same random state.

    Args:
        module: A module that is divided, or that holds such; on the meta device nothing happens to its parameters.
        function: Is called with the module once. It fills parameters in place, as in `torch.nn.init`. A value
            that it reads before it has written it is NaN where other ranks have it. Where it looks at the values of a
            parameter, that parameter is built in full until it returns.

    Returns:
        The module.

    Raises:
        TypeError: An argument has a different type.
        ValueError: A parameter is no longer the layer's part, for example after `fully_shard`, or `function` has
            replaced it.

    Example:
        init_as_full(model, lambda model: model.apply(initialize))
        init_as_full(model, lambda model: model.apply(model._init_weights))     # of transformers

    Examples:
        >>> import torch, scale_tp
        >>> model = scale_tp.parallelize(torch.nn.Sequential(torch.nn.Linear(8, 4)), {"0": "colwise"})
        >>> model = scale_tp.init_as_full(model, lambda model: torch.nn.init.normal_(model[0].weight))

    See also: [the guide to existing models](../guides/tensor-parallel.md#existing-models-parallelize).
    """
    argument: object = module
    if not isinstance(argument, nn.Module) or not callable(function):
        raise TypeError(
            f"expected a module and a function of it, got {type(module).__name__} and {type(function).__name__}: write "
            "init_as_full(model, lambda model: model.apply(initialize))"
        )
    if active_fake_mode() is not None:
        function(module)
        return module
    proxies = _proxies(module)
    replaced: list[str] = []
    for (below, name), (_, proxy) in proxies.items():
        below._parameters[name] = proxy  # type: ignore[assignment]  # for as long as the function runs
    try:
        function(module)
    finally:
        for (below, name), (param, proxy) in proxies.items():
            below_param: object = below._parameters.get(name)
            if below_param is not proxy:
                replaced.append(f"{type(below).__name__}.{name}")
            below._parameters[name] = param
    if replaced:
        raise ValueError(
            f"expected the function to fill parameters in place, but it has put others in the place of {replaced}: "
            "write torch.nn.init.normal_(module.weight), or module.weight.data.normal_()"
        )
    for param, proxy in {id(proxy): (param, proxy) for param, proxy in proxies.values()}.values():
        proxy.write_back()
        copy_attributes(proxy, param, leave_out=FullWeightProxy.__annotations__)
    return module


@on_local_tensors
def _proxies(module: nn.Module) -> dict[tuple[ParallelModule, str], tuple[nn.Parameter, FullWeightProxy]]:
    """For each divided parameter, by its module and name, the parameter and the proxy of the full one."""
    proxies: dict[Tensor, FullWeightProxy] = {}
    proxy_by_place: dict[tuple[ParallelModule, str], tuple[nn.Parameter, FullWeightProxy]] = {}
    for path, below in module.named_modules():
        if not isinstance(below, ParallelModule) or below.group.size == 1:
            continue
        for name, sharding in below.shardings.items():
            param = below._parameters.get(name)
            # Where it is a proxy, a call around this one has put it there.
            if param is None or param.is_meta or sharding.split is None or isinstance(param, FullWeightProxy):
                continue
            local = sharding.local_shape(below.group.rank)
            if tuple(param.shape) != local:
                raise ValueError(
                    f"'{path}.{name}': expected the shard {local} that rank {below.group.rank} of {below.group.size} "
                    f"has, got {tuple(param.shape)}: give parameters their values before fully_shard"
                )
            if param not in proxies:
                proxies[param] = FullWeightProxy.of(
                    param, sharding.shape, sharding.dim, sharding.split, below.group.rank
                )
                copy_attributes(param, proxies[param])
            proxy_by_place[below, name] = (param, proxies[param])
    return proxy_by_place
