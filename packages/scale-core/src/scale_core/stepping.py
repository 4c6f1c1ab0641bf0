"""What must hold when an optimizer steps.

An optimizer sees tensors and knows nothing of shards: it steps without a word on parameters that are no longer the
model's, or before gradients have been reduced, and the training goes silently wrong. torch tells who asks about every
step, so three questions are asked here: are these the model's parameters, is nothing left to be reduced, and, after it,
have the parameters changed?
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.shard import shard_of

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_waiting: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in order, for the first to be named
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def mark_replaced(param: Tensor, owner: Any, index: int) -> None:
    """Records that `param` is no longer a parameter of its model: a local shard has taken its place.

    Args:
        param: The whole parameter, as it was before it was sharded.
        owner: What holds it now; has `names`, which may still change, as when a module around it is sharded later.
        index: Its number there.
    """
    _replaced[param] = owner, index
    _seen.clear()  # An optimizer that has stepped on it before must be looked at again.


def refuse_steps(owner: Any) -> None:
    """Refuses steps on `owner.exposed` while `owner.has_gradient`: gradients that wait for their reduction.

    Args:
        owner: Has `exposed`, a list of parameters, their `names`, and the property `has_gradient`; held weakly.
    """
    _waiting[owner] = None


@functools.cache
def watch_optimizers() -> None:
    """Begins to look at the steps of all optimizers of this process; once is enough."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _params(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _seen.get(optimizer) != count:  # Its parameters stay what they are until a group is added.
        _refuse_replaced(optimizer)
        _seen[optimizer] = count
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
                f"afterwards: {type(optimizer).__name__}(model.parameters(), ...)"
            )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers change parameters without a new version, by which a gathered copy is known to be stale."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([param for param in group["params"] if shard_of(param) is not None])
