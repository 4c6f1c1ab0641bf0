"""Checks before an optimizer steps on parameters of a sharded model.

An optimizer sees tensors and knows nothing of shards. It would step silently on parameters that are no longer the
model's, on pieces of parameters that it has to see unsharded, on parameters whose gradients come to another optimizer,
and before gradients have been reduced. `step_hooks` has each optimizer checked at its first step and after a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.live_objects import live_objects, register_live
from scale_core.optim.traits import is_known_elementwise, known_bases
from scale_core.optim.trial_step import check_first_step
from scale_core.records import ParamRecord, Record
from scale_core.shard import is_divided, shard_of, stages_of
from scale_core.sharded_tensor.replicated_parameter import reduced_gradient_of


class ShardOwner(Protocol):
    """An object with shards and their gradients accumulated under `no_sync()`, for example a flat buffer."""

    names: list[str]
    sharded_params: list[nn.Parameter]

    @property
    def group(self) -> Group:
        """The ranks that share the parameters."""

    @property
    def has_gradient(self) -> bool:
        """Whether gradients have been accumulated that are not reduced."""

    def sharded_param(self, index: int) -> nn.Parameter:
        """Returns the parameter that `parameters()` yields for `names[index]`."""

    def zero_accumulated(self, params: Container[int], *, set_to_none: bool) -> None:
        """Clears the accumulated gradients of the parameters with these ids."""


class CheckResult(NamedTuple):
    """The findings of the checks about an optimizer: whose parameters it steps on."""

    owners: list[weakref.ref[Any]]  # of shards
    models: list[weakref.ref[Any]]  # pipelines and step recorders; each has `recorded_steps`
    is_sharded: bool  # The steps are counted.


class StepRecorder(Protocol):
    """Whoever compares the steps of optimizers on some parameters between ranks; see `register_step_recorder`."""

    @property
    def recorded_steps(self) -> Any:
        """The `OptimizerSteps` since the last comparison."""

    def params(self) -> Iterable[Tensor]:
        """The parameters as they are now."""


def register_step_recorder(recorder: StepRecorder) -> None:
    """Has optimizers record their steps on the recorder's parameters in its `recorded_steps`."""
    if register_live(StepRecorder, recorder):
        invalidate_cache()


class OptimizerRecord(Record):
    """Facts about an optimizer.

    Attributes:
        num_changes: Number of parameter changes in all models of this process (class attribute).
        has_full_params: Whether one rank steps on all elements of its sharded parameters.
        checked_at: The value of `num_changes` at the last check.
        checks: Results since then, by the ids of the parameters in each group: some optimizers step on a part of their
            groups at a time, and groups may change.
    """

    attribute = "_scale_optimizer"
    num_changes: ClassVar[int] = 0

    def __init__(self) -> None:
        self.has_full_params = False
        self.checked_at = -1
        self.checks: dict[tuple[tuple[int, ...], ...], CheckResult] = {}


def register_replaced(param: Tensor, owner: Any, index: int) -> None:
    """Records that a local shard has replaced `param` in its model, as number `index` of `owner.names`."""
    ParamRecord.get_or_create(param).replaced_by = owner, index
    invalidate_cache()  # An optimizer that has stepped on it before must be looked at again.


def register_unsharded(params: Iterable[Tensor], owner: Any) -> None:
    """Records that `params` are unsharded copies of shards of `owner`; see `register_replaced`."""
    owner_ref = weakref.ref(owner)  # The owner holds the copies itself, as a rule: they must not keep it alive.
    for index, param in enumerate(params):
        ParamRecord.get_or_create(param).unsharded_copy_of = owner_ref, index


def sharded_param_of(param: Tensor) -> Tensor:
    """Returns the local shard, as `parameters()` yields it, of an unsharded parameter; of any other tensor itself."""
    record = ParamRecord.get(param)
    if record is None or record.unsharded_copy_of is None:
        return param
    owner_ref, index = record.unsharded_copy_of
    owner = owner_ref()
    return param if owner is None else cast(Tensor, owner.sharded_param(index))


def invalidate_cache() -> None:
    """Makes every optimizer be checked again at its next step: its parameters have changed."""
    OptimizerRecord.num_changes += 1


def register_shard_owner(owner: ShardOwner) -> bool:
    """Registers an owner; returns whether it is new. Optimizers can't step on its shards while `owner.has_gradient`."""
    invalidate_cache()
    return register_live(ShardOwner, owner)


def shard_owners() -> list[ShardOwner]:
    """Returns all owners of this process, in the order in which they were made."""
    return live_objects(ShardOwner)


def owners_with_error_feedback(params: Iterable[Tensor]) -> list[Any]:
    """Returns the owners of these parameters that keep the rounding errors of their gradients for the next step."""
    owners = [owner for owner in shard_owners() if getattr(owner, "error_feedback", ())]
    if not owners:
        return owners
    stepped = {id(param) for param in params}
    return [owner for owner in owners if any(id(param) in stepped for param in owner.sharded_params)]


def allow_full_state(optimizer: torch.optim.Optimizer) -> None:
    """Records that one rank steps on all elements of this optimizer's sharded parameters."""
    OptimizerRecord.get_or_create(optimizer).has_full_params = True


def constructor_example(optimizer: torch.optim.Optimizer) -> str:
    """The line that builds an optimizer of this kind from a model's parameters, for errors."""
    # One that takes more than parameters, as one around another does, has it as its attribute `construction`.
    line = getattr(optimizer, "construction", None)
    return line if isinstance(line, str) else f"{type(optimizer).__name__}(model.parameters(), ...)"


def params_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Returns the parameters of all groups."""
    return (param for group in optimizer.param_groups for param in group["params"])


def check_optimizer(optimizer: torch.optim.Optimizer) -> CheckResult:
    """Refuses an optimizer that can't train its parameters; returns whose parameters they are."""
    _refuse_replaced(optimizer)
    _refuse_without_gradients(optimizer)
    _refuse_divided(optimizer)
    params = list(params_of(optimizer))
    pipelines = stages_of(params) if params else []
    is_sharded = bool(pipelines) or any(shard_of(param) is not None for param in params)
    param_ids = {id(param) for param in params}
    owners = [owner for owner in shard_owners() if any(id(param) in param_ids for param in owner.sharded_params)]
    recorders = [
        recorder for recorder in live_objects(StepRecorder) if not param_ids.isdisjoint(map(id, recorder.params()))
    ]
    models = [weakref.ref(model) for model in (*pipelines, *recorders)]
    return CheckResult([weakref.ref(owner) for owner in owners], models, is_sharded)


def _refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    for param in params_of(optimizer):
        record = ParamRecord.get(param)
        if record is None:
            continue
        if record.replaced_by is not None:
            owner, index = record.replaced_by
            raise RuntimeError(
                f"{type(optimizer).__name__} was built before the model was sharded: its '{owner.names[index]}' is not "
                f"the model's parameter any more, and to step on it would train nothing. Build the optimizer "
                f"afterwards: {constructor_example(optimizer)}"
            )
        if record.unsharded_copy_of is not None:
            owner_ref, index = record.unsharded_copy_of
            owner = owner_ref()
            name = f"'{owner.names[index]}'" if owner is not None else "parameter"
            raise RuntimeError(
                f"{type(optimizer).__name__} was built while the model's parameters were unsharded, by unshard() or "
                f"summon_full_params(): its {name} is a copy, and to step on it would train nothing. "
                f"Build the optimizer from the shards: {constructor_example(optimizer)} after "
                "reshard(), or outside of summon_full_params()"
            )


def _refuse_without_gradients(optimizer: torch.optim.Optimizer) -> None:
    around = {id(inner) for inner in with_inner(optimizer)}
    for param in params_of(optimizer):
        reduced = reduced_gradient_of(param)
        owner = None if reduced is None else reduced.optimizer
        if reduced is not None and owner is not None and id(owner) not in around:
            owner_name, wrapper = type(owner).__name__, type(reduced.wrapper).__name__
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): {wrapper} hands the averaged gradient of '{reduced.name}' to its "
                f"{owner_name}, of which each rank has a part, so this step would change other parameters on each "
                f"rank: call step() and zero_grad() of the {owner_name}, and build schedulers and scalers around that"
            )


def _refuse_divided(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose step needs elements that other ranks have, before its first step."""
    kind, bases = type(optimizer).__name__, known_bases(type(optimizer))
    shards = [shard for param in params_of(optimizer) if (shard := shard_of(param)) is not None and is_divided(param)]
    if not shards or OptimizerRecord.get_or_create(optimizer).has_full_params or is_known_elementwise(type(optimizer)):
        return
    if any(base.sparse for base in bases):
        raise RuntimeError(
            f"{kind}.step(): it takes sparse gradients, but the gradient of {shards[0].title} is dense: "
            "train with torch.optim.Adam(model.parameters(), ...)"
        )
    if runs_on_shards(optimizer):
        return
    error = check_first_step(optimizer)
    if error is not None:
        raise RuntimeError(f"{kind}.step(): {error}") from error


def runs_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of ours, whose step knows about shards by itself."""
    return type(optimizer).__module__.partition(".")[0].startswith(("scale_", "fairscale"))


def with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizer, and the optimizers in its attributes, which it steps."""
    optimizers = [optimizer]
    for each in optimizers:  # It grows.
        for value in vars(each).values():
            members = value if isinstance(value, list | tuple) else (value,)
            optimizers += (
                inner for inner in members if isinstance(inner, torch.optim.Optimizer) and inner not in optimizers
            )
    return optimizers
