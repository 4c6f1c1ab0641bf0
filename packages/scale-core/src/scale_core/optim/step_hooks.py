"""What happens around the step of an optimizer of torch: it is checked, runs on plain tensors, and is recorded.

A `ShardedParameter` answers for the full parameter, which costs a call of Python for each attribute that is read. An
optimizer that is known to update each element by itself needs none of that, so its `step` runs where shards are plain
tensors, at no cost. Hooks around the step, and functions that schedulers and others put around it, see shards as
everywhere. `step_checks` has the checks, which run at the first step. `OptimizerSteps` records each step: ranks compare
them at the end of the next pass (`Contract.end_checked`), and `step_differences` says what differs.
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scale_core.comm.collectives import FINGERPRINT_MASK, exchange_text, fingerprint_of
from scale_core.comm.group import Group
from scale_core.compat import graph_task_id
from scale_core.optim.step_checks import (
    CheckResult,
    OptimizerRecord,
    check_optimizer,
    params_of,
    shard_owners,
    with_inner,
)
from scale_core.optim.step_differences import StepsByName, describe_difference
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
    waiting = [owner for ref in owners if (owner := ref()) is not None and getattr(owner, "awaits_backward", False)]
    if waiting and all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        warnings.warn(
            f"{type(optimizer).__name__}.step() changes nothing: '{waiting[0].names[0]}' and others were used in a "
            "forward, and none of its parameters has a gradient. If you call backward(inputs=parameters), it does not "
            "reach shards: write loss.backward(), and freeze other parameters before the forward by "
            "requires_grad_(False)",
            UserWarning,
            stacklevel=2,
        )


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

    def copy(self) -> StateOfShards:
        """Returns a copy, as `dict.copy` does. It does not get later entries."""
        return StateOfShards(copy.copy(self.by_param))

    __copy__ = copy

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


# The steps that ranks compare.

# Options of the implementation of a step, not of its result.
_IMPLEMENTATIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))
_RATES = {"lr": None, "initial_lr": None}  # Of all groups; a scheduler keeps the first rate in the latter.
_KEPT_STEPS = 1000  # since the last comparison
_FLAGS = 2
_HAS_ANY, _KEEPS_STRUCTURE = 1, 2


class _Step(NamedTuple):
    """A step that an optimizer has taken."""

    optimizer: int  # Its id.
    kind: str
    names: Sequence[str]  # Of the hyperparameters.
    options: Sequence[tuple[Any, ...]]  # The hyperparameters of its groups, equal ones once.
    numbers: Sequence[int]  # Of each group, the number of its options.
    params: Sequence[Sequence[Tensor]]  # Of each group.

    @property
    def groups(self) -> Iterator[tuple[Mapping[str, str], Sequence[Tensor]]]:
        """The hyperparameters of each group, as text, and its parameters."""
        texts = [dict(zip(self.names, map(repr, values), strict=True)) for values in self.options]
        return ((texts[number], params) for number, params in zip(self.numbers, self.params, strict=True))

    def values(self, name: str) -> list[Any]:
        """Returns the values of a hyperparameter, equal ones of groups perhaps once."""
        position = self.names.index(name)
        return [values[position] for values in self.options]


class OptimizerSteps:
    """The steps on one model since its ranks compared them."""

    def __init__(self) -> None:
        self._has_any = False  # An optimizer has ever stepped.
        self._equal_structure = 0  # That of steps that were equal on all ranks that made some.
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)

    def add(self, optimizer: Optimizer) -> None:
        """Records a step, in place of the steps of optimizers that it consists of."""
        if any(step.optimizer != id(optimizer) for step in self._steps):
            inner = set(map(id, with_inner(optimizer)[1:]))
            self._steps = deque((step for step in self._steps if step.optimizer not in inner), maxlen=_KEPT_STEPS)
        names = [name for name in {**optimizer.defaults, **_RATES} if name not in _IMPLEMENTATIONS]
        plain_of: dict[Any, tuple[Any, ...]] = {}  # There may be a group for each parameter, of few different values.
        number_of: dict[tuple[Any, ...], int] = {}
        numbers = []
        for group in optimizer.param_groups:
            values = tuple(map(group.get, names))
            try:
                plain = plain_of.get(values) or plain_of.setdefault(values, _plain(values))
            except TypeError:  # A list can't be hashed.
                plain = _plain(values)
            numbers.append(number_of.setdefault(plain, len(number_of)))
        params = [group["params"] for group in optimizer.param_groups]
        self._steps.append(_Step(id(optimizer), type(optimizer).__name__, names, list(number_of), numbers, params))
        self._has_any = True

    def mark_failed(self, error: Exception) -> None:
        """Records that the last step has raised, perhaps on this rank alone."""
        if self._steps:
            last = self._steps.pop()
            self._steps.append(last._replace(kind=f"{last.kind} that failed with {type(error).__name__}"))

    def status(self) -> int:
        """Returns a number that is equal where kinds, hyperparameters and the number of steps are."""
        fingerprint = fingerprint_of(*(step[1:-1] for step in self._steps)) if self._steps else 0
        keeps_structure = self._equal_structure and self._structure() in (0, self._equal_structure)
        return fingerprint << _FLAGS & FINGERPRINT_MASK | bool(keeps_structure) << 1 | self._has_any

    @staticmethod
    def differ(statuses: Sequence[int]) -> bool:
        """Whether some ranks have made other steps than others."""
        return len({status >> _FLAGS for status in statuses}) > 1

    def difference(
        self, statuses: Sequence[int], named_params: Iterable[tuple[str, Tensor]], group: Group, limit_seconds: float
    ) -> str:
        """Says how steps on one parameter differ, or on the ranks' parts after equal steps; "" if they do not.

        All ranks call it together where their `statuses` differ.
        """
        text = json.dumps([self.by_name(named_params), self.of_part()])
        by_name, of_parts = zip(*map(json.loads, exchange_text(text, group, limit_seconds=limit_seconds)), strict=True)
        return describe_difference(by_name) or (describe_difference(of_parts) if have_diverged(statuses) else "")

    def end(self, statuses: Sequence[int]) -> None:
        """Forgets the steps, which were compared: these are the ranks' statuses."""
        fingerprints = {status >> _FLAGS for status in statuses if status & _HAS_ANY}
        if len(fingerprints) == 1 and 0 not in fingerprints:
            self._equal_structure = self._structure()
        self._steps.clear()

    def _structure(self) -> int:
        """Returns a number that is equal where optimizers of the same kinds and groups began equal and have stepped.

        0 is for no step, and for one with a learning rate of 0, as at the start of a warmup.
        """
        if not self._steps or any(0 in step.values("lr") for step in self._steps):
            return 0
        return fingerprint_of(*((step.kind, len(step.numbers), step.values("initial_lr")) for step in self._steps))

    def params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of the optimizers that have stepped since the last comparison, each with their kind."""
        return ((step.kind, param) for step in self._steps for params in step.params for param in params)

    def of_part(self) -> StepsByName:
        """Returns all steps, where ranks hold different parameters."""
        return {"their parts of the model": [(step.kind, texts) for step in self._steps for texts, _ in step.groups]}

    def by_name(self, named: Iterable[tuple[str, Tensor]]) -> StepsByName:
        """Returns the steps on the parameters of which this rank has elements; ranks have the same names."""
        with torch._C.DisableTorchFunctionSubclass():  # An empty part has no element, whatever the full shape is.
            names = {id(param): f"'{name}'" for name, param in named if param.numel()}
        steps: dict[str, list[tuple[str, Mapping[str, str]]]] = {name: [] for name in names.values()}
        for step in self._steps:
            for texts, params in step.groups:
                for name in (names[id(param)] for param in params if id(param) in names):
                    steps[name].append((step.kind, texts))
        return steps


def have_diverged(statuses: Sequence[int]) -> bool:
    """Whether optimizers that have made equal steps on all ranks with some do so no more.

    Ranks with different parameters may have different optimizers, or none. So those count that began equal.
    """
    stepping = [status for status in statuses if status & _HAS_ANY]
    return OptimizerSteps.differ(stepping) and all(status & _KEEPS_STRUCTURE for status in stepping)


def _plain(value: Any) -> Any:
    """Returns a value as Python's own, so that equal ones have one text; "" for values without a text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):  # A wait for another device would be a wait in every step.
        return _plain(value.item()) if value.device.type == "cpu" and value.numel() == 1 else ""
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else ""
