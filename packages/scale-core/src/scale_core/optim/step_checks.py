"""What must hold when an optimizer steps.

An optimizer sees tensors and knows nothing of shards: it steps without a word on parameters that are no longer the
model's, on pieces of what it would have to see whole, or before gradients have been reduced, and the training goes
silently wrong. torch tells who asks about every step, so five questions are asked here: are these the parameters of
the model, do their gradients come to this optimizer, can it work on pieces, is nothing left to be reduced, and, after
it, have the parameters changed?
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.optim.traits import known_bases
from scale_core.shard import Held, Shard, shard_of

# A scaler that asks one rank alone is refused where gradients are divided among ranks.
#
# torch's own `GradScaler` looks at the gradients that are here. If a shard of one rank is inf, that rank skips the
# step, the others step, and from then on their weights and their scales are of different steps, without a word. Whoever
# calls an optimizer's `step` is not told to anybody, so it is read off the stack.


def refuse_lone_scaler(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses a step that torch's own scaler takes on shards; a hook before the steps of optimizers.

    Raises:
        RuntimeError: It is one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.optim"):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != GradScaler.__module__:
        return
    scaler = frame.f_locals.get("self")
    # Whoever replaces the method that looks at the gradients, as ours and that of torch's FSDP do, has ranks agree.
    if not isinstance(scaler, GradScaler) or type(scaler)._unscale_grads_ is not GradScaler._unscale_grads_:
        return
    shards = (shard_of(param) for group in optimizer.param_groups for param in group["params"])
    for shard in shards if scaler.is_enabled() else ():
        if shard is not None and any(axis.held is Held.SHARD and axis.group.size > 1 for axis in shard.axes):
            raise RuntimeError(
                f"{type(scaler).__name__}.step({type(optimizer).__name__}): torch's scaler looks for inf and NaN in "
                f"this rank's gradients alone, and of {shard.title} other ranks have other elements: some would step "
                "and others not. Write scaler = scale_core.ShardedGradScaler(...), which has all ranks agree"
            )


_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
_stepped_by: WeakIdKeyDictionary = WeakIdKeyDictionary()
_waiting: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in order, for the first to be named
_for_all: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# With how many parameters each was looked at; one that steps on a part of its groups at a time has several numbers.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()


def mark_replaced(param: Tensor, owner: Any, index: int) -> None:
    """Records that `param` is no longer a parameter of its model: a local shard has taken its place.

    Args:
        param: The whole parameter, as it was before it was sharded.
        owner: What holds it now; has `names`, which may still change, as when a module around it is sharded later.
        index: Its number there.
    """
    _replaced[param] = owner, index
    _seen.clear()  # An optimizer that has stepped on it before must be looked at again.


def mark_copies(params: Iterable[Tensor], owner: Any) -> None:
    """Records that these are copies, for computing or for looking at, of what `owner` (see `mark_replaced`) holds."""
    held = weakref.ref(owner)  # Which holds the copies itself, as a rule: they must not keep it alive.
    for index, param in enumerate(params):
        _copies[param] = held, index


def mark_stepped_by(
    optimizer: torch.optim.Optimizer, params: Iterable[Tensor], names: Iterable[str], reducer: Any
) -> None:
    """Records that the averaged gradients of these parameters come to `optimizer`, and never to the parameters.

    Args:
        optimizer: It steps on them, or one that has it in an attribute, as AdaScale; held weakly.
        params: The parameters.
        names: What errors call them.
        reducer: What brings the gradients there, while it lives; held weakly.
    """
    for param, name in zip(params, names, strict=True):
        _stepped_by[param] = weakref.ref(optimizer), weakref.ref(reducer), name
    look_again()


def look_again() -> None:
    """Parameters have become other pieces: every optimizer is to be looked at again when it steps."""
    _seen.clear()


def refuse_steps(owner: Any) -> None:
    """Refuses steps on `owner.exposed` while `owner.has_gradient`: gradients that wait for their reduction.

    Args:
        owner: Has `exposed`, a list of parameters, their `names`, and the property `has_gradient`; held weakly.
    """
    _waiting[owner] = None


def step_for_all(optimizer: torch.optim.Optimizer) -> None:
    """Records that one rank has all that this optimizer's parameters are shards of, and steps for the others, too."""
    _for_all.add(optimizer)


def construction_of(optimizer: torch.optim.Optimizer) -> str:
    """The line that builds an optimizer of this kind from a model's parameters, for errors.

    One that takes more than parameters, as one around another does, has it as its attribute `construction`.
    """
    line = getattr(optimizer, "construction", None)
    return line if isinstance(line, str) else f"{type(optimizer).__name__}(model.parameters(), ...)"


@functools.cache
def watch_optimizers() -> None:
    """Begins to look at the steps of all optimizers of this process; once is enough."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_pre_hook(refuse_lone_scaler)
    register_optimizer_step_post_hook(_after_step)


def _params(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count not in _seen.setdefault(optimizer, set()):  # Its parameters stay what they are until a group is added.
        _refuse_replaced(optimizer)
        _refuse_without_gradients(optimizer)
        _refuse_pieces(optimizer)
        _seen[optimizer].add(count)
    unreduced = [owner for owner in _waiting if owner.has_gradient]
    if unreduced:
        mine = {id(param) for param in _params(optimizer)}
        for owner in unreduced:
            if any(id(param) in mine for param in owner.exposed):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): gradients of '{owner.names[0]}' and others, accumulated under "
                    "no_sync(), have not been reduced: run the last backward() before the step outside of no_sync(), "
                    "or drop them by model.zero_grad()"
                )


def _refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    for param in _params(optimizer):
        if param in _replaced:
            owner, index = _replaced[param]
            raise RuntimeError(
                f"{type(optimizer).__name__} was built before the model was sharded: its '{owner.names[index]}' is not "
                f"the model's parameter any more, and to step on it would train nothing. Build the optimizer "
                f"afterwards: {construction_of(optimizer)}"
            )
        if param in _copies:
            held, index = _copies[param]
            owner = held()
            name = f"'{owner.names[index]}'" if owner is not None else "parameter"
            raise RuntimeError(
                f"{type(optimizer).__name__} was built while the model's parameters were whole, by unshard() or "
                f"summon_full_params(): its {name} is a copy, and to step on it would train nothing. "
                f"Build the optimizer from the shards: {construction_of(optimizer)} after "
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
    """The optimizer, and those that it has in its attributes, to be stepped by it."""
    found = [optimizer]
    for each in found:  # It grows.
        for value in vars(each).values():
            held = value if isinstance(value, list | tuple) else (value,)
            found += (inner for inner in held if isinstance(inner, torch.optim.Optimizer) and inner not in found)
    return found


def _refuse_pieces(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that would compute something else with pieces than with whole tensors."""
    kind, bases = type(optimizer).__name__, known_bases(type(optimizer))
    # One of which nothing is known is taken for elementwise.
    needs = next((base.needs for base in bases if base.scope == "parameter"), None)
    needs_all = next((base.needs for base in bases if base.scope == "all"), None)
    shards = [shard for param in _params(optimizer) if (shard := shard_of(param)) is not None and _is_divided(shard)]
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
            f"{cut.start:,} to {cut.stop:,} of {cut.numel:,} only. Let scale-oss hand each whole tensor to one rank "
            f"for the step, OSS(model.parameters(), optim={kind}, ...); or keep every parameter whole on one rank, "
            'fully_shard(module, atom="parameter"), and give it those that are here, '
            "[p for p in model.parameters() if p.numel()]; or train with one that works element by element, as AdamW"
        )


def _is_divided(shard: Shard) -> bool:
    return any(axis.held is Held.SHARD and axis.group.size > 1 for axis in shard.axes)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers change parameters without a new version, by which a gathered copy is known to be stale."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([param for param in group["params"] if shard_of(param) is not None])
