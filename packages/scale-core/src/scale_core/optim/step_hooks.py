"""What happens around the step of an optimizer of torch: it is checked, runs on plain tensors, and is counted.

A `ShardedParameter` answers for the full parameter, which costs a call of Python for each attribute that is read. An
optimizer that is known to update each element by itself needs none of that, so its `step` runs where shards are plain
tensors, at no cost. Hooks around the step, and functions that schedulers and others put around it, see shards as
everywhere. `step_checks` has the checks, which run at the first step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scale_core.compat import graph_task_id
from scale_core.optim.step_checks import CheckResult, OptimizerRecord, check_optimizer, params_of, shard_owners
from scale_core.optim.traits import is_known_elementwise, is_per_param_number
from scale_core.shard import RECORD, as_local, is_divided, on_local_tensors, shard_of
from scale_core.sharded_tensor.tensor import is_sharded, mark_sharded


@functools.cache
def watch_optimizers() -> None:
    """Starts to check the optimizers of this process, and extends their `zero_grad`; once is enough."""
    register_optimizer_step_pre_hook(_before_step)
    Optimizer.zero_grad = _clearing(Optimizer.zero_grad)  # type: ignore[method-assign]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    owners = _checked(optimizer).owners
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure) or not owners:
        _prepare_shards(optimizer, owners)
        return None

    @functools.wraps(closure)
    def closure_and_check(*args: Any) -> Any:  # The last backward pass of an accumulation is in it.
        loss = closure(*args)
        _prepare_shards(optimizer, owners)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_check}
    return (args[0], closure_and_check, *args[2:]), kwargs


def _checked(optimizer: Optimizer) -> CheckResult:
    """Returns whose parameters an optimizer steps on, which is checked first, unless it has been."""
    with as_local():
        result = _cached_check(optimizer)
        if result is None:
            result, record = check_optimizer(optimizer), OptimizerRecord.get_or_create(optimizer)
            step_on_local_tensors(optimizer)
            if result.is_sharded and _after_step not in optimizer._optimizer_step_post_hooks.values():
                optimizer.register_step_post_hook(_after_step)
            if record.checked_at != record.num_changes:
                record.checked_at, record.checks = record.num_changes, {}
            record.checks[_groups_key(optimizer)] = result
        return result


def _groups_key(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(map(id, group["params"])) for group in optimizer.param_groups])


def _cached_check(optimizer: Optimizer) -> CheckResult | None:
    """Returns the result of the last check, or None if parameters have changed since."""
    # Without a call of `records`: it is asked several times in each step.
    record: OptimizerRecord | None = vars(optimizer).get(OptimizerRecord.attribute)
    if type(record) is not OptimizerRecord or record.checked_at != record.num_changes:
        return None
    return record.checks.get(_groups_key(optimizer))


def _prepare_shards(optimizer: Optimizer, owners: list[weakref.ref[Any]]) -> None:
    """Refuses a step on gradients that are not reduced, and waits until shards may be written to."""
    for owner_ref in owners:
        owner = owner_ref()
        if owner is not None and owner.has_gradient:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): gradients of '{owner.names[0]}' and others, accumulated under "
                "no_sync(), have not been reduced: run the last backward() before the step outside of no_sync(), "
                "or drop them by model.zero_grad()"
            )
        if owner is not None and getattr(owner, "moves", False):
            owner.wait_sent()  # A forward without a backward may have left copies that still read the shard.


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Counts the step, and a version for fused optimizers, which change parameters without one."""
    with as_local():
        result = _checked(optimizer)
        if graph_task_id() == -1:
            owners = [owner for ref in result.owners if (owner := ref()) is not None]
            models = [model for ref in result.models if (model := ref()) is not None]
            for count in {owner.group.state.optimizer_steps for owner in owners}:
                count.number += 1
            records = {getattr(owner_or_model, "recorded_steps", None) for owner_or_model in (*owners, *models)}
            for steps in filter(None, records):  # One record for each model.
                steps.add(optimizer)
        for group in optimizer.param_groups:
            if group.get("fused"):
                increment_version([param for param in group["params"] if RECORD in vars(param)])


def _clearing(own: Callable[..., None]) -> Callable[..., None]:
    """Wraps `Optimizer.zero_grad`, to clear gradients that were accumulated under `no_sync()`, too."""
    # On the class, and not on each optimizer: wrappers, as Lightning's, call the method of a class.

    @functools.wraps(own)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        with as_local():
            own(self, set_to_none)
            check = _cached_check(self)
            owners = (
                shard_owners() if check is None else [owner for ref in check.owners if (owner := ref()) is not None]
            )
            accumulated = [owner for owner in owners if owner.has_gradient]
            param_ids = {id(param) for param in params_of(self)} if accumulated else set()
            for owner in accumulated:
                owner.zero_accumulated(param_ids, set_to_none=set_to_none)

    return zero_grad


# A step on plain tensors.


class BoundMethod:
    """Replaces a method of an optimizer by a call around it, without keeping the optimizer alive."""

    def __init__(self, optimizer: Optimizer, name: str, wrapper: Callable[..., Any]) -> None:
        method: Any = getattr(optimizer, name)
        self._optimizer = weakref.ref(optimizer)
        function: Callable[..., Any] = getattr(method, "__func__", None) or _unbound(method)

        @functools.wraps(method)
        def call(optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
            return wrapper(function, optimizer, *args, **kwargs)

        self.__func__ = call  # A function, since learning rate schedulers bind it to the optimizer.
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it with the optimizer, as a method."""
        return self.__func__(self._optimizer(), *args, **kwargs)


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def _local_step(method: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    if args and callable(args[0]):
        args = (_with_sharded_tensors(args[0]), *args[1:])
    if callable(kwargs.get("closure")):
        kwargs["closure"] = _with_sharded_tensors(kwargs["closure"])
    with ExitStack() as local:
        if not getattr(type(optimizer).step, "hooked", False):
            _enter_local(local, optimizer)
            return method(optimizer, *args, **kwargs)
        # torch calls the hooks within `method`, which others may have wrapped: the last hook before the step enters,
        # and the first one after it leaves.
        before = optimizer.register_step_pre_hook(lambda *_: _enter_local(local, optimizer))
        after = optimizer.register_step_post_hook(lambda *_: local.close())
        cast(Any, optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)
        try:
            return method(optimizer, *args, **kwargs)
        finally:
            before.remove()
            after.remove()


def _enter_local(local: ExitStack, optimizer: Optimizer) -> None:
    state = optimizer.state
    if isinstance(state, StateOfShards):
        vars(optimizer)["state"] = state.by_param
        local.callback(vars(optimizer).update, state=state)
    local.enter_context(as_local())


def _with_sharded_tensors(closure: Callable[..., Any]) -> Callable[..., Any]:
    """Enables sharded tensors again inside a closure, which is the user's code."""

    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return closure(*args, **kwargs)

    return call


class StateOfShards(MutableMapping[Any, Any]):
    """An optimizer's state by parameter; reading the state of a shard makes it sharded.

    While the optimizer steps on plain tensors, `by_param` replaces it.
    """

    def __init__(self, by_param: MutableMapping[Any, Any]) -> None:
        self.by_param = by_param

    def __getitem__(self, param: Any) -> Any:
        values = self.by_param[param]
        if torch._C._is_torch_function_enabled() and is_sharded(param):
            mark_state(param, values)
        return values

    def __setitem__(self, param: Any, values: Any) -> None:
        self.by_param[param] = values

    def __delitem__(self, param: Any) -> None:
        del self.by_param[param]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.by_param)

    def __len__(self) -> int:
        return len(self.by_param)

    def __contains__(self, param: object) -> bool:
        return param in self.by_param

    def get(self, param: Any, default: Any = None) -> Any:
        """As for any mapping. `by_param` itself would add an entry."""
        return self[param] if param in self.by_param else default

    def __repr__(self) -> str:
        return repr(self.by_param)

    def __reduce__(self) -> Any:
        """A copy is a plain one."""
        return _identity, (self.by_param,)


def _identity(value: Any) -> Any:
    return value


@on_local_tensors
def mark_state(param: Tensor, values: Any) -> None:
    """Makes the tensors of a shard's state that have a value for each of its elements sharded, as the shard is."""
    shard = shard_of(param)
    if shard is None or not isinstance(values, dict):
        return
    for key, value in values.items():
        is_local = isinstance(value, Tensor) and value.shape == param.shape
        if is_local and not is_per_param_number(key, value.shape, shard.shape):
            mark_sharded(value, shard)


def wrap_state(optimizer: Optimizer) -> None:
    """Wraps an optimizer's state in `StateOfShards`, also after `load_state_dict`."""
    if "state" in vars(optimizer) and not isinstance(optimizer.state, StateOfShards):
        vars(optimizer)["state"] = StateOfShards(optimizer.state)


def step_on_local_tensors(optimizer: Optimizer) -> None:
    """Makes an elementwise optimizer step on plain tensors; other optimizers, and later calls, change nothing."""
    if isinstance(vars(optimizer).get("step"), BoundMethod) or not is_known_elementwise(type(optimizer)):
        return
    if any(is_divided(param) for group in optimizer.param_groups for param in group["params"]):
        vars(optimizer)["step"] = BoundMethod(optimizer, "step", _local_step)
        wrap_state(optimizer)
        optimizer.register_load_state_dict_post_hook(wrap_state)
