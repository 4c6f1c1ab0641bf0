"""The step of the optimizer that updates this rank's parts: of all at once, or bucket by bucket.

What is updated first can travel while the rest is stepped on; and whole tensors of a sharded model have memory only
while they are. So the optimizer, which has all parameters in its groups, is shown a part of its groups for each bucket.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.comm.control_plane import exchange_text
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_oss.bucket import Bucket
from scale_oss.full_param_bucket import WholeBucket


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


_HALF = torch.float16  # In which parameters of fp32 travel, where they are rounded.
_MASTER = "master_param"


def follow_parameters(buckets: Sequence[Bucket], states: MutableMapping[Tensor, Any]) -> None:
    """Takes back parameters whose data somebody has put elsewhere, as `param.data = ...` does, and what was written.

    Args:
        buckets: That hold them.
        states: Of the optimizer, by what it steps on. Unrounded parameters that were loaded with them are taken, too.

    Raises:
        RuntimeError: They are on another device now, or of another dtype.
    """
    for bucket in buckets:
        strayed = bucket.strayed()
        for index in strayed:
            param = bucket.params[index]
            if param.dtype != bucket.dtype or param.device != bucket.device:
                raise RuntimeError(
                    f"'{bucket.names[index]}' was {bucket.dtype} on {bucket.device} when OSS was built, and is "
                    f"{param.dtype} on {param.device} now: convert or move the model first, "
                    "then build OSS(model.parameters(), ...)"
                )
        bucket.adopt(strayed)
        for index, stepped in _stepped(bucket):
            master = states[stepped].get(_MASTER) if stepped in states else None
            if master is not None and not master.is_set_to(stepped.data):
                bucket.load_master(index, master, _HALF)
                states[stepped][_MASTER] = bucket.master_of(index)
        bucket.take_written()


def give_gradients(buckets: Sequence[Bucket], *, are_reduced: bool) -> None:
    """Lets pieces have their part of averaged gradients, where these are not reduced into them.

    Args:
        buckets: That have the pieces.
        are_reduced: They are: then no parameter may have one of its own.

    Raises:
        RuntimeError: Some gradient has not been reduced.
    """
    for bucket in buckets:
        if not are_reduced:
            bucket.take_whole_gradients()
            continue
        for name, param in zip(bucket.names, bucket.params, strict=True):
            if param.grad is not None:
                raise RuntimeError(
                    f"the gradient of '{name}', accumulated under no_sync(), has not been reduced: call "
                    "model.reduce(), or run the last backward() before the step outside of no_sync()"
                )
        bucket.take_again()


def publish(bucket: Bucket, states: MutableMapping[Tensor, Any], *, in_half: bool) -> None:
    """Starts to give all ranks the parts of a bucket that each has updated, if a step may have changed them.

    Args:
        bucket: The bucket; all ranks have the same order of them.
        states: Of the optimizer, by what it steps on. What this rank alone has unrounded is saved with them.
        in_half: fp32 travels as fp16.
    """
    if not bucket.is_due:
        return
    stepped_on = [(index, stepped) for index, stepped in _stepped(bucket) if stepped.grad is not None]
    bucket.publish(message_tag(way_of(bucket)), _HALF if in_half and bucket.dtype == torch.float32 else None)
    for index, stepped in stepped_on:
        master = bucket.master_of(index)
        if master is not None:
            states.setdefault(stepped, {})[_MASTER] = master


def _stepped(bucket: Bucket) -> Iterator[tuple[int, nn.Parameter]]:
    """What this rank steps on, by number."""
    return ((index, place.stepped) for index, place in enumerate(bucket.places) if place.stepped is not None)


def wait(buckets: Sequence[Bucket], contract: Contract) -> None:
    """Returns when the parameters are whole again."""
    for bucket in buckets:
        with contract.waiting(way_of(bucket)):
            bucket.wait(contract.limit_seconds)


def way_of(bucket: Bucket) -> Event:
    """What ranks call the way of updated parameters."""
    return Event("parameters", bucket.title)
