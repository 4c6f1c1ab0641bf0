"""Steps the wrapped optimizer on this rank's parameters: on all at once, on one bucket after the other, or on one rank.

A rank whose optimizer raises still joins every collective of the step, so that no other rank waits for it.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from scale_core.comm.collectives import exchange_text
from scale_core.consistency.all_ranks import all_gather_json
from scale_core.consistency.contract import Contract
from scale_core.errors import ScaleDistributedError, recovery_hint
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad
from scale_oss.buckets.bucket import Bucket


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies hyperparameters from groups to groups: schedulers change those of OSS, some optimizers their own."""
    for options, target_options in zip(source, target, strict=True):
        target_options.update({key: value for key, value in options.items() if key not in ("params", "param_names")})


def call_on_one_rank(
    optim: Optimizer,
    contract: Contract,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    buckets: Sequence[Bucket],
) -> Any:
    """Calls a method on the first rank, which has all parameters.

    The others take over its hyperparameters, and drop the gradients that it has dropped.
    """
    group, packed, result = contract.group, "", None
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    has_grads = [piece.grad is not None for piece in pieces]
    failure: Exception | None = None
    if group.rank == 0:
        try:
            result = getattr(optim, name)(*args, **kwargs)
        except Exception as error:
            failure = error
        options = [{key: value for key, value in options.items() if key != "params"} for options in optim.param_groups]
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
        packed = pickle.dumps((options, [piece.grad is not None for piece in pieces], reason)).hex()
    with contract.waiting("the owner's options"):
        packed = exchange_text(packed, group, limit_seconds=contract.limit_seconds)[0]
    options, keeps_grads, reason = pickle.loads(bytes.fromhex(packed))
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # With its traceback it would hold the tensors of the step.
    if reason:
        raise _failed_step(f"{type(optim).__name__}.{name}()", 0, reason)
    copy_options(options, optim.param_groups)
    params = [param for bucket in buckets for param in bucket.params]
    for param, piece, had_grad, keeps_grad in zip(params, pieces, has_grads, keeps_grads, strict=True):
        if had_grad and not keeps_grad:
            piece.grad = None
            set_unreduced_grad(param, None)
    return result


def _failed_step(call: str, rank: int, reason: str) -> ScaleDistributedError:
    return ScaleDistributedError(
        f"{call} has raised on rank {rank}, which updates parameters for all: {reason}. They may be updated in part: "
        f"{recovery_hint()}",
        rank=rank,
    )


def raise_on_all_ranks(failure: Exception | None, contract: Contract, optim_name: str) -> None:
    """Raises on all ranks if the step of one has raised, because each updates full parameters for the others."""
    reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
    reasons = all_gather_json(reason, contract, f"the step of {optim_name}")
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # With its traceback it would hold the tensors of the step.
    for rank, reason in enumerate(reasons):
        if reason:
            raise _failed_step(f"{optim_name}.step()", rank, reason)


def step_in_turn(
    optim: Optimizer,
    parts: Iterable[Sequence[nn.Parameter] | None],
    contract: Contract,
    kwargs: Mapping[str, Any],
    after_part: Callable[[int], None] | None = None,
) -> Exception | None:
    """Steps on one part of the parameters after the other, so that each is sent during the next step.

    `optim` looks at one parameter at a time; a part that is None has nothing to step on. `after_part` is called with
    the number of each part when it is updated. Returns the exception of `optim`; it steps on no part after that.
    """
    groups = stepped = optim.param_groups
    failure: Exception | None = None

    def step(params: Sequence[nn.Parameter]) -> None:
        nonlocal stepped
        stepped = _step_params(optim, params, kwargs)

    try:
        for number, params in enumerate(parts):
            if params is not None and failure is None:
                failure = failure_of(functools.partial(step, params), contract)
            if after_part is not None:
                after_part(number)
    except BaseException as error:
        contract.report_failure(error)
        raise
    copy_options(stepped, groups)
    return failure


def failure_of(step: Callable[[], object], contract: Contract) -> Exception | None:
    """Calls an optimizer's step; returns its exception, which the others can read."""
    try:
        step()
    except Exception as error:
        contract.report_failure(error)
        return error
    return None


def _step_params(optim: Optimizer, params: Sequence[nn.Parameter], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lets the optimizer step on these alone; returns its groups as it has left them.

    Counts per group, not per parameter, begin from the same number in each bucket.
    """
    chosen = {id(param) for param in params}
    groups = optim.param_groups
    optim.param_groups = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    try:
        optim.step(**kwargs)
        return optim.param_groups
    finally:
        optim.param_groups = groups
