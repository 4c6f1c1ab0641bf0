"""The step of the optimizer that updates this rank's parts: of all at once, or bucket by bucket.

What is updated first can travel while the rest is stepped on; and whole tensors of a sharded model have memory only
while they are. So the optimizer, which has all parameters in its groups, is shown a part of its groups for each bucket.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from scale_core.contract import Contract
from scale_core.events import Event
from scale_core.exchange import exchange_text
from scale_oss.whole import WholeBucket


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies hyperparameters from group to group: schedulers change them on one side, some optimizers on the other."""
    for mine, theirs in zip(source, target, strict=True):
        theirs.update({key: value for key, value in mine.items() if key not in ("params", "param_names")})


def step_on_one_rank(optim: Optimizer, contract: Contract, kwargs: Mapping[str, Any]) -> None:
    """Steps on the first rank, which has all parameters; what it has changed in its groups, the others take over.

    Raises:
        ScaleDistributedError: The ranks have lost each other.
    """
    group, mine = contract.group, ""
    if group.rank == 0:
        optim.step(**kwargs)
        options = [{key: value for key, value in each.items() if key != "params"} for each in optim.param_groups]
        mine = pickle.dumps(options).hex()
    with contract.waiting(Event("the owner's options", "")):
        told = exchange_text(mine, group, limit_seconds=contract.limit_seconds)[0]
    copy_options(pickle.loads(bytes.fromhex(told)), optim.param_groups)


def step_in_turn(
    optim: Optimizer,
    parts: Sequence[Sequence[nn.Parameter]],
    stepped_on: Callable[[int], None],
    contract: Contract,
    kwargs: Mapping[str, Any],
) -> None:
    """Steps on one part of the parameters after the other, so that what is updated can travel beside the next step.

    Args:
        optim: Has all of them, and looks at one at a time.
        parts: Of its parameters.
        stepped_on: Called with the number of each part when it is updated.
        contract: What the ranks have promised each other.
        kwargs: Of the step.
    """
    groups = stepped = optim.param_groups
    try:
        for number, params in enumerate(parts):
            if params:
                stepped = _step_on(optim, params, kwargs)
            stepped_on(number)
    except BaseException as error:
        contract.report_failure(error)
        raise
    copy_options(stepped, groups)


def step_by_buckets(
    optim: Optimizer,
    here: Sequence[nn.Parameter] | None,
    buckets: Sequence[WholeBucket],
    contract: Contract,
    kwargs: Mapping[str, Any],
) -> None:
    """Steps on the parameters that are here, then on those of each bucket, between their arrival and their return.

    Args:
        optim: Has all of them.
        here: What needs no other rank; none of it may be this rank's. None where no rank has any.
        buckets: What is put together for the step; all ranks have the same.
        contract: What the ranks have promised each other.
        kwargs: Of the step.

    Raises:
        RuntimeError: The ranks have lost each other.
    """
    groups = stepped = optim.param_groups
    try:
        if here is not None:
            stepped = _step_on(optim, here, kwargs)
        for bucket in buckets:
            if bucket.fetch():
                stepped = _step_on(optim, [whole for whole in bucket.stepped if whole.grad is not None], kwargs)
                bucket.give_back()
    except BaseException as error:
        for bucket in buckets:
            bucket.release()
        contract.report_failure(error)
        raise
    copy_options(stepped, groups)


def _step_on(optim: Optimizer, params: Sequence[nn.Parameter], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lets the optimizer step on these alone; returns its groups as it has left them.

    What it counts in its groups, and not for each parameter, begins from the same number in each bucket.
    """
    chosen = {id(param) for param in params}
    groups = optim.param_groups
    optim.param_groups = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    try:
        optim.step(**kwargs)
        return optim.param_groups
    finally:
        optim.param_groups = groups
