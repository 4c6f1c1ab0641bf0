"""Checks before an optimizer steps on parameters of a sharded model.

An optimizer sees tensors and knows nothing of shards. It would step silently on parameters that are no longer the
model's, on pieces of what it has to see unsharded, on parameters whose gradients come to another optimizer, and before
gradients have been reduced. Each optimizer is checked at its first step and after a change; torch's process-wide hook
is used because an optimizer that was built before the model was sharded can be found in no other way.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.compat import graph_task_id
from scale_core.optim.traits import known_bases
from scale_core.shard import is_divided, shard_of

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
_stepped_by: WeakIdKeyDictionary = WeakIdKeyDictionary()
_waiting: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in order, for the first to be named
_for_all: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


optimizer_steps: Counter[tuple[int, ...]] = Counter()
"""How many steps optimizers have taken on shards, by the ranks that share these; equal on all of them.

Whether a shard was written to is not: an optimizer may leave out what is empty on this rank, and one that writes to
`param.data` counts no versions. Nor is the number of all steps of a process, which may train other models as well.
Steps in backward passes count where they end, if hooks of users may have taken them.
"""
# Checked optimizers: the owners of the shards that they step on, by the number of parameters and the first one of each
# group (one that steps on a part of its groups at a time has several).
_checked: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, dict[tuple[tuple[int, int], ...], list[weakref.ref[Any]]]
] = weakref.WeakKeyDictionary()


def register_replaced(param: Tensor, owner: Any, index: int) -> None:
    """Records that a local shard has replaced `param` in its model, as number `index` of `owner.names`."""
    _replaced[param] = owner, index
    _checked.clear()  # An optimizer that has stepped on it before must be looked at again.


def register_unsharded(params: Iterable[Tensor], owner: Any) -> None:
    """Records that `params` are unsharded copies of what `owner` holds; see `register_replaced`."""
    held = weakref.ref(owner)  # Which holds the copies itself, as a rule: they must not keep it alive.
    for index, param in enumerate(params):
        _copies[param] = held, index


def sharded_param_of(param: Tensor) -> Tensor:
    """Returns the local shard, as `parameters()` yields it, of an unsharded parameter; of any other tensor itself."""
    if param not in _copies:
        return param
    held, index = _copies[param]
    owner = held()
    return param if owner is None else cast(Tensor, owner.sharded_param(index))


def register_owner(
    optimizer: torch.optim.Optimizer, params: Iterable[Tensor], names: Iterable[str], reducer: Any
) -> None:
    """Records that averaged gradients of these parameters go to `optimizer` (held weakly) and never to `.grad`."""
    for param, name in zip(params, names, strict=True):
        _stepped_by[param] = weakref.ref(optimizer), weakref.ref(reducer), name
    invalidate_cache()


def invalidate_cache() -> None:
    """Makes every optimizer be checked again at its next step: its parameters have changed."""
    _checked.clear()


def refuse_step_while_unreduced(owner: Any) -> None:
    """Refuses steps on `owner.sharded_params` while `owner.has_gradient`; `owner` is held weakly."""
    _waiting[owner] = None
    _checked.clear()


def owners_with_error_feedback(params: Iterable[Tensor]) -> list[Any]:
    """Returns the owners of these parameters that keep what rounding takes from their gradients for the next step."""
    owners = [owner for owner in list(_waiting) if getattr(owner, "error_feedback", ())]
    if not owners:
        return owners
    stepped = {id(param) for param in params}
    return [owner for owner in owners if any(id(param) in stepped for param in owner.sharded_params)]


def allow_full_state(optimizer: torch.optim.Optimizer) -> None:
    """Records that one rank steps on all elements of this optimizer's sharded parameters."""
    _for_all.add(optimizer)


def constructor_example(optimizer: torch.optim.Optimizer) -> str:
    """The line that builds an optimizer of this kind from a model's parameters, for errors."""
    # One that takes more than parameters, as one around another does, has it as its attribute `construction`.
    line = getattr(optimizer, "construction", None)
    return line if isinstance(line, str) else f"{type(optimizer).__name__}(model.parameters(), ...)"


@functools.cache
def watch_optimizers() -> None:
    """Starts to check the optimizers of this process, and to clear what waits by their `zero_grad`; once is enough."""
    register_optimizer_step_pre_hook(_before_step)
    torch.optim.Optimizer.zero_grad = _clearing(torch.optim.Optimizer.zero_grad)  # type: ignore[method-assign]


def _params(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    owners = _owners_of(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure) or not owners:
        _refuse_unreduced(optimizer, owners)
        return None

    @functools.wraps(closure)
    def closure_and_check(*args: Any) -> Any:  # The last backward pass of an accumulation is in it.
        loss = closure(*args)
        _refuse_unreduced(optimizer, owners)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_check}
    return (args[0], closure_and_check, *args[2:]), kwargs


def _owners_of(optimizer: torch.optim.Optimizer) -> list[weakref.ref[Any]]:
    """Returns the owners of the shards that an optimizer steps on, which is checked first, unless it has been."""
    groups = tuple([(len(group["params"]), id(next(iter(group["params"]), None))) for group in optimizer.param_groups])
    owners = _checked.get(optimizer, {}).get(groups)
    if owners is None:
        owners = _check(optimizer)
        _checked.setdefault(optimizer, {})[groups] = owners
    return owners


def _refuse_unreduced(optimizer: torch.optim.Optimizer, owners: list[weakref.ref[Any]]) -> None:
    for held in owners:
        owner = held()
        if owner is not None and owner.has_gradient:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): gradients of '{owner.names[0]}' and others, accumulated under "
                "no_sync(), have not been reduced: run the last backward() before the step outside of no_sync(), "
                "or drop them by model.zero_grad()"
            )


def _check(optimizer: torch.optim.Optimizer) -> list[weakref.ref[Any]]:
    """Refuses an optimizer that can't train its parameters; returns the owners of those that are shards."""
    _refuse_replaced(optimizer)
    _refuse_without_gradients(optimizer)
    _refuse_pieces(optimizer)
    hooks = optimizer._optimizer_step_post_hooks.values()
    if _after_step not in hooks and any(shard_of(param) is not None for param in _params(optimizer)):
        optimizer.register_step_post_hook(_after_step)
    mine = {id(param) for param in _params(optimizer)}
    return [weakref.ref(owner) for owner in _waiting if any(id(param) in mine for param in owner.sharded_params)]


def _refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    for param in _params(optimizer):
        if param in _replaced:
            owner, index = _replaced[param]
            raise RuntimeError(
                f"{type(optimizer).__name__} was built before the model was sharded: its '{owner.names[index]}' is not "
                f"the model's parameter any more, and to step on it would train nothing. Build the optimizer "
                f"afterwards: {constructor_example(optimizer)}"
            )
        if param in _copies:
            held, index = _copies[param]
            owner = held()
            name = f"'{owner.names[index]}'" if owner is not None else "parameter"
            raise RuntimeError(
                f"{type(optimizer).__name__} was built while the model's parameters were unsharded, by unshard() or "
                f"summon_full_params(): its {name} is a copy, and to step on it would train nothing. "
                f"Build the optimizer from the shards: {constructor_example(optimizer)} after "
                "reshard(), or outside of summon_full_params()"
            )


def _refuse_without_gradients(optimizer: torch.optim.Optimizer) -> None:
    around = {id(each) for each in _with_inner(optimizer)}
    for param in _params(optimizer):
        if param not in _stepped_by:
            continue
        held, reducer, name = _stepped_by[param]
        owner = held()
        if owner is not None and reducer() is not None and id(owner) not in around:
            who, wrapper = type(owner).__name__, type(reducer()).__name__
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): {wrapper} hands the averaged gradient of '{name}' to its {who}, "
                "and leaves none in the parameter, so this step would train nothing, or each rank by its own "
                f"gradients: call step() and zero_grad() of the {who}, and build schedulers and scalers around that"
            )


def _with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, and those in its attributes that it steps."""
    found = [optimizer]
    for each in found:  # It grows.
        for value in vars(each).values():
            held = value if isinstance(value, list | tuple) else (value,)
            found += (inner for inner in held if isinstance(inner, torch.optim.Optimizer) and inner not in found)
    return found


def _refuse_pieces(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that would compute another update on shards than on full tensors."""
    kind, bases = type(optimizer).__name__, known_bases(type(optimizer))
    # One of which nothing is known is taken for elementwise.
    needs = next((base.needs for base in bases if base.scope == "parameter"), None)
    needs_all = next((base.needs for base in bases if base.scope == "all"), None)
    shards = [shard for param in _params(optimizer) if (shard := shard_of(param)) is not None and is_divided(param)]
    if not shards:
        return
    if needs_all is not None and optimizer not in _for_all:
        raise RuntimeError(
            f"{kind}.step(): it measures {needs_all}, and this rank has only a part of them, as of "
            f"{shards[0].title}: every rank would take another direction. Train with an optimizer that works element "
            "by element, such as AdamW, or leave the model unsharded"
        )
    if any(base.sparse for base in bases):
        raise RuntimeError(
            f"{kind}.step(): it takes sparse gradients, and those of shards are dense, as that of {shards[0].title}: "
            "train with torch.optim.Adam(model.parameters(), ...)"
        )
    cut = next((shard for shard in shards if 0 < shard.stop - shard.start < shard.numel), None)
    if needs is not None and cut is not None:
        raise RuntimeError(
            f"{kind}.step(): its update of a parameter needs {needs}, and of {cut.title} this rank has elements "
            f"{cut.start:,} to {cut.stop:,} of {cut.numel:,} only. Let scale-oss hand each full tensor to one rank "
            f"for the step, OSS(model.parameters(), optim={kind}, ...); or keep every parameter unsharded on one rank, "
            'fully_shard(module, atom="parameter"), and give it those that are here, '
            "[p for p in model.parameters() if p.numel()]; or train with one that works element by element, as AdamW"
        )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Counts the step, and a version for fused optimizers, which change parameters without one."""
    if graph_task_id() == -1:
        owners = [owner for held in _owners_of(optimizer) if (owner := held()) is not None]
        optimizer_steps.update({owner.group.ranks for owner in owners})
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([param for param in group["params"] if shard_of(param) is not None])


def _clearing(own: Callable[..., None]) -> Callable[..., None]:
    """Wraps `Optimizer.zero_grad`, to clear gradients that were accumulated under `no_sync()`, too."""

    @functools.wraps(own)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        own(self, set_to_none)
        owners = [owner for owner in _waiting if owner.has_gradient]
        mine = {id(param) for param in _params(self)} if owners else set()
        for owner in owners:
            owner.zero_accumulated(mine, set_to_none=set_to_none)

    return zero_grad
