r"""Auto wrap: from a policy to units.

`plan_units` turns a policy into a list of names that can be printed; `auto_wrap` puts a wrapper around each, and
`fully_shard_modules` shards each in place.

    >>> from scale_fsdp.wrapping.policy import class_policy, name_policy, size_policy
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    >>> plan_units(model, class_policy(nn.Linear))
    ['0', '2.0', '2.1']
    >>> plan_units(model, name_policy(r"2\..*", "2"))  # nothing is left for 2 itself
    ['2.0', '2.1']
    >>> plan_units(model, size_policy(min_num_params=40))
    ['2']

`enable_wrap`, `wrap` and `auto_wrap` are as in FSDP1 and FairScale, but for this: the context is a context variable,
one for each thread and task; an inner context replaces the outer one until it ends; shared modules and parameters count
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from scale_core.arguments import checked_arguments
from scale_core.shard import unit_shard_of
from scale_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from scale_fsdp.mesh_info import resolve_mesh_info
from scale_fsdp.options import ShardOptions
from scale_fsdp.reshard.meta_init import should_initialize
from scale_fsdp.runtime.param_registry import managed_params, split_owned_and_shared
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.shard_module import check_parameters, fully_shard
from scale_fsdp.wrapping.policy import (
    Candidate,
    KeywordPolicy,
    Policy,
    as_policy,
    size_policy,
)

DEFAULT_MIN_NUM_PARAMS = int(1e8)  # of a unit, as in FSDP1

Progress: TypeAlias = Callable[[int, int, str], object]


@checked_arguments
def plan_units(
    module: nn.Module, policy: Policy | KeywordPolicy, wrapper_cls: type[nn.Module] | None = None
) -> list[str]:
    """The qualified names of the modules that `policy` makes units, children before parents; changes nothing.

    A module with several names is planned once, under its first one. A module that is a `wrapper_cls` already, or has
    only local shards, stays as it is, and its parameters count for no other unit.

    Raises:
        TypeError: `policy` is neither a Policy nor callable.
        ValueError: The policy doesn't fit the model.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import size_policy
        >>> from scale_fsdp.wrapping.auto_wrap import plan_units
        >>> plan_units(nn.Sequential(nn.Linear(64, 64), nn.Linear(4, 4)), size_policy(min_num_params=1000))
        ['0']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    chosen = as_policy(policy)
    chosen.check(module)
    units: list[str] = []
    visited: set[nn.Module] = set()
    wrapped = {param for param in module.parameters() if unit_shard_of(param) is not None}  # by other units

    def candidate(name: str, part: nn.Module) -> Candidate:
        return Candidate(name, part, sum(p.numel() for p in part.parameters() if p not in wrapped), part is module)

    def visit(name: str, part: nn.Module) -> None:
        if part in visited:
            return
        visited.add(part)
        params = list(part.parameters())
        if (wrapper_cls is not None and isinstance(part, wrapper_cls)) or (params and wrapped.issuperset(params)):
            wrapped.update(params)
            return
        if chosen.enters(candidate(name, part)):
            for key, child in part.named_children():
                visit(f"{name}.{key}" if name else key, child)
        elif not chosen.wraps_leaves:
            return
        if chosen.selects(candidate(name, part)):
            units.append(name)
            wrapped.update(params)

    visit("", module)
    return units


class _Context(NamedTuple):
    """Arguments of the current `enable_wrap`."""

    policy: Policy | KeywordPolicy | None
    wrapper: type[nn.Module]
    kwargs: Mapping[str, Any]


_context: ContextVar[_Context | None] = ContextVar("scale_fsdp.wrap", default=None)


@checked_arguments
@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | KeywordPolicy | None = None,
    *,
    wrapper_cls: type[nn.Module] | None = None,
    **wrapper_kwargs: Any,
) -> Iterator[None]:
    """Enables `wrap` and `auto_wrap` inside the block; outside of it they return modules as they are.

    An inner block replaces the outer one until it ends: neither its policy nor its arguments are inherited.

    Args:
        auto_wrap_policy: For calls of `auto_wrap` that name none.
        wrapper_cls: Called as `wrapper_cls(module, **arguments)`; FullyShardedDataParallel by default.
        wrapper_kwargs: Arguments for every wrapper; `module.wrapper_config` overrides them, a call's own both.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import FullyShardedDataParallel
        >>> from scale_fsdp.wrapping.auto_wrap import enable_wrap, wrap
        >>> with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        ...     model = nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 4))
        >>> type(model[0]).__name__, type(model[1]).__name__
        ('FullyShardedDataParallel', 'Linear')

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    token = _context.set(_Context(auto_wrap_policy, wrapper_cls or FullyShardedDataParallel, wrapper_kwargs))
    try:
        yield
    finally:
        _context.reset(token)


@checked_arguments
def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps one module as the surrounding `enable_wrap` says; outside of one, returns it unchanged.

    Raises:
        TypeError: `module.wrapper_config` is not a mapping.
        ValueError: The module is wrapped already.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import FullyShardedDataParallel
        >>> from scale_fsdp.wrapping.auto_wrap import enable_wrap, wrap
        >>> with enable_wrap(wrapper_cls=FullyShardedDataParallel, reshard_after_forward=False):
        ...     layer = wrap(nn.Linear(8, 8))
        >>> type(layer).__name__, type(wrap(nn.Linear(8, 8))).__name__  # outside of it, the module itself
        ('FullyShardedDataParallel', 'Linear')

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    context = _context.get()
    if context is None:
        return module
    wrapper = context.wrapper
    if isinstance(module, wrapper):
        raise ValueError(
            f"wrap expects a module that isn't wrapped, but got a {type(module).__name__}; "
            "leave this call out, or give its arguments to the first one"
        )
    return wrapper(module, **{**context.kwargs, **_wrapper_config(module), **wrap_overrides})


@checked_arguments
def auto_wrap(
    module: nn.Module,
    auto_wrap_policy: Policy | KeywordPolicy | None = None,
    *,
    min_num_params: float | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Wraps the modules below and including `module` that a policy selects, children first.

    Outside of `enable_wrap` it returns the module unchanged, like `wrap`. The root is wrapped only where the policy
    selects it, so that `FullyShardedDataParallel(auto_wrap(model))` holds the rest in an outer unit.

    Args:
        module: Changed in place below the root.
        auto_wrap_policy: By default the policy of `enable_wrap`, else `size_policy(1e8)`, as in FSDP1.
        min_num_params: Short for `size_policy(min_num_params)`.
        progress: Called after each module that was wrapped, as in `fully_shard_modules`.
        kwargs: Arguments for every wrapper, which override the arguments of the context and of `wrapper_config`.

    Returns:
        The module, or the wrapper around it.

    Raises:
        ValueError: Both a policy and `min_num_params` are given, or the policy doesn't fit the model.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import size_policy
        >>> from scale_fsdp.wrapping.auto_wrap import auto_wrap, enable_wrap
        >>> with enable_wrap():
        ...     model = auto_wrap(nn.Sequential(nn.Linear(32, 32), nn.Linear(4, 4)), size_policy(500))
        >>> [type(layer).__name__ for layer in model]
        ['FullyShardedDataParallel', 'Linear']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    if min_num_params is not None:
        if auto_wrap_policy is not None:
            raise ValueError(
                f"auto_wrap takes a policy or min_num_params={min_num_params}, but got both: leave one of them out"
            )
        auto_wrap_policy = size_policy(min_num_params)
    context = _context.get()
    if context is None:
        return module
    policy = auto_wrap_policy or context.policy or size_policy(DEFAULT_MIN_NUM_PARAMS)
    names = plan_units(module, policy, context.wrapper)
    units = [module.get_submodule(name) for name in names]
    _check_initializable(units, units, {**context.kwargs, **kwargs})
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for key, child in parent._modules.items():  # named_children() yields a shared child once
            if child is not None:
                places.setdefault(child, []).append((parent, key))
    root = module
    for done, (name, unit) in enumerate(zip(names, units, strict=True), start=1):
        wrapped = wrap(unit, **kwargs)
        for parent, key in places.get(unit, ()):
            parent.register_module(key, wrapped)
        root = wrapped if unit is module else root
        if progress is not None:
            progress(done, len(units), name)
    return root


@checked_arguments
def fully_shard_modules(
    module: nn.Module, policy: Policy | KeywordPolicy, *, progress: Progress | None = None, **kwargs: Any
) -> nn.Module:
    """Shards in place the modules that a policy selects, children first, and at last `module` around the rest.

    A model on the meta device is initialized unit by unit, so that no more than one unit is ever unsharded:

        >>> import torch
        >>> from torch import nn
        >>> from scale_fsdp import fully_shard_modules, size_policy
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.LayerNorm(2))
        >>> show = lambda done, total, name: print(f"{done} of {total}: {name or 'the rest'}")
        >>> model = fully_shard_modules(model, size_policy(min_num_params=16), progress=show)
        1 of 3: 0
        2 of 3: 1
        3 of 3: the rest

    Args:
        module: The model; its classes' names, its qualified names and its methods stay.
        policy: Modules that become units.
        progress: Called after each unit with the number of units done, the number of all units, and the unit's name,
            "" for `module` itself.
        kwargs: Arguments of `fully_shard` for every unit, also `options`; a module's `wrapper_config` overrides them.
            The `output_dtype` of an `mp_policy` applies to `module` only, because its blocks hand tensors to its other
            parameters, which are gathered in `param_dtype`.

    Returns:
        `module` itself.

    Raises:
        TypeError: A parameter is made of other tensors.
        ValueError: The policy doesn't fit the model; a parameter has no shape yet, or has a hook; or nothing
            initializes a parameter or buffer on the meta device. No unit is made then.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    names = [*(name for name in plan_units(module, policy) if name), ""]
    units = [module.get_submodule(name) for name in names]
    left = set(kwargs.get("ignored_params") or ())
    check_parameters(
        [info for info in split_owned_and_shared(list(managed_params(module)))[0] if info.param not in left]
    )
    _check_initializable([module], units, kwargs)
    inner_kwargs = _without_output_dtype(kwargs)
    for done, (name, unit) in enumerate(zip(names, units, strict=True), start=1):
        fully_shard(unit, **{**(inner_kwargs if name else kwargs), **_wrapper_config(unit)})
        if progress is not None:
            progress(done, len(units), name)
    return module


@checked_arguments
def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[nn.Module]:
    """Returns the modules below and including `mod` that are sharded by themselves, the outermost first.

        >>> import torch
        >>> from scale_fsdp import fully_shard
        >>> from scale_fsdp.wrapping.auto_wrap import get_fsdp_instances
        >>> model = fully_shard(torch.nn.Sequential(fully_shard(torch.nn.Linear(2, 2)), torch.nn.ReLU()))
        >>> [type(instance).__name__ for instance in get_fsdp_instances(model)]
        ['Sequential', 'Linear']

    Args:
        mod: Any module.
        skip_empty: Leave out modules whose parameters all belong to modules inside.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    return [unit.module for unit in units_in(mod) if unit.buffers or not skip_empty]


def _without_output_dtype(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments for units inside the model.

    Blocks that returned fp32 would hand it to parameters of the root, which are gathered in bf16.
    """
    policy = kwargs.get("mp_policy")
    if getattr(policy, "output_dtype", None) is None or not is_dataclass(policy) or isinstance(policy, type):
        return kwargs
    return {**kwargs, "mp_policy": replace(policy, output_dtype=None)}


def _check_initializable(parts: Sequence[nn.Module], units: Sequence[nn.Module], kwargs: Mapping[str, Any]) -> None:
    """Checks all parts of a model before the first of its units is made; all ranks together."""
    options = kwargs.get("options") or ShardOptions()
    init, sync = kwargs.get("init", options.init), kwargs.get("sync_module_states", options.sync_module_states)
    ShardOptions(init=init)
    if init is not False and not any({"init", "options"} & _wrapper_config(unit).keys() for unit in units):
        group = resolve_mesh_info(kwargs.get("mesh", kwargs.get("process_group"))).whole
        places = [list(managed_params(part)) for part in parts]
        should_initialize(zip(parts, places, strict=True), init, group, sync=sync)


def _wrapper_config(module: nn.Module) -> Mapping[str, Any]:
    """The module's own `wrapper_config`."""
    config = getattr(module, "wrapper_config", {})
    if not isinstance(config, Mapping):
        raise TypeError(
            f"wrapper_config holds arguments by name, but a {type(module).__name__} has {config!r}; "
            "write module.wrapper_config = {}"
        )
    return config
