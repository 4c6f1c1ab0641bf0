"""A trial of an optimizer's first step on shards, without memory: an impossible step raises before it begins.

An unknown optimizer is run once on tensors of the meta device that have the shapes and the records of
its parameters. Sharded tensors answer there as in a real step, but for values: nothing is sent, and a number that is
read is 1. Where a function needs elements of other ranks, `ShardedTensorError` says so, on all ranks.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Collection, MutableMapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from scale_core.errors import ShardedTensorError
from scale_core.shard import as_local, shard_of
from scale_core.sharded_tensor.tensor import ShardedParameter, ShardedTensor, is_sharded, mark_sharded, set_shard


def check_first_step(optimizer: Optimizer) -> ShardedTensorError | None:
    """Returns the error that the step of an optimizer would raise on its shards, or None where a trial shows none."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch._C._EnableTorchFunction(), _NumbersAreOne():
            trial = _on_meta(optimizer, {})
            step = inspect.unwrap(type(optimizer).step)
            closure = inspect.signature(step).parameters.get("closure")
            needs_closure = closure is not None and closure.default is closure.empty
            step(trial, lambda: torch.zeros(())) if needs_closure else step(trial)
    except ShardedTensorError as error:
        return error
    except Exception:  # If a trial without values can't run, that says nothing about a real step.
        return None
    finally:
        random.setstate(state)
    return None


_NUMBERS = {Tensor.__bool__: True, Tensor.__int__: 1, Tensor.__index__: 1, Tensor.__float__: 1.0, Tensor.item: 1.0}


class _NumbersAreOne(TorchFunctionMode):
    """Gives the value 1 to numbers without a value: results of reductions, which a step compares or reads."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _NUMBERS and type(args[0]) is Tensor and args[0].is_meta:
            return _NUMBERS[func]
        result = func(*args, **(kwargs or {}))
        is_number = type(result) is Tensor and result.is_meta and not result.dim()
        if is_number and any(issubclass(tensor_type, ShardedTensor | ShardedParameter) for tensor_type in types):
            return torch.ones((), dtype=result.dtype)
        return result


def _on_meta(value: Any, copies: dict[int, Any]) -> Any:
    """A copy whose tensors are on the meta device; modules, and objects that can't be copied, are shared."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor):
        copies[id(value)] = _tensor_on_meta(value, copies)
    elif isinstance(value, Optimizer):
        copied: Optimizer = object.__new__(type(value))
        copies[id(value)] = copied
        vars(copied).update(
            (name, _on_meta(attribute, copies)) for name, attribute in vars(value).items() if not _is_hook(name)
        )
        vars(copied).update((name, type(hooks)()) for name, hooks in vars(value).items() if name.endswith("_hooks"))
    elif type(value) is dict:
        copies[id(value)] = {_on_meta(key, copies): _on_meta(part, copies) for key, part in value.items()}
    elif isinstance(value, MutableMapping):  # The state makes the entry of a parameter when it is read.
        states: defaultdict[Any, Any] = defaultdict(
            dict, {_on_meta(key, copies): _on_meta(part, copies) for key, part in value.items()}
        )
        copies[id(value)] = states
    elif type(value) in (list, tuple, set):
        copies[id(value)] = type(value)(_on_meta(part, copies) for part in value)
    elif isinstance(value, torch.Generator):
        copies[id(value)] = value.clone_state()
    elif isinstance(value, nn.Module | type | FunctionType | MethodType):
        return value
    else:
        try:  # An object of the optimizer's own may count its calls.
            copies[id(value)] = copy.deepcopy(value, copies)
        except Exception:
            return value
    return copies[id(value)]


def _is_hook(name: str) -> bool:
    return name.endswith("_hooks") or name in ("step", "zero_grad")


def _tensor_on_meta(tensor: Tensor, copies: dict[int, Any]) -> Tensor:
    shard = shard_of(tensor) if is_sharded(tensor) else None
    with as_local():
        if shard is None and not isinstance(tensor, nn.Parameter):
            return tensor.detach().clone()  # A number, or a table of the optimizer's own.
        meta = torch.empty_like(tensor.detach(), device="meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, tensor.requires_grad)
            if shard is not None:
                set_shard(meta, shard)
        elif shard is not None:
            mark_sharded(meta, shard)
        if tensor.grad is not None and shard is not None:  # A full parameter needs no trial.
            meta.grad = torch.empty_like(tensor.grad, device="meta")
        return meta
