"""What is handed over around a step: gradients to the pieces before it, updated pieces to all ranks after it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.contract import Contract
from scale_core.events import Event, message_tag
from scale_oss.bucket import Bucket

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
