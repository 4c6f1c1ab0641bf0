"""What is handed over around a step: gradients to the pieces before it, updated pieces to all ranks after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scale_core.contract import Contract
from scale_core.events import Event, message_tag
from scale_oss.bucket import Bucket


def follow_parameters(buckets: Sequence[Bucket]) -> None:
    """Takes back parameters whose data somebody has put elsewhere, as `param.data = ...` does, and what was written.

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


def publish(bucket: Bucket, *, in_half: bool) -> None:
    """Starts to give all ranks the parts of a bucket that each has updated, if a step may have changed them.

    Args:
        bucket: The bucket; all ranks have the same order of them.
        in_half: fp32 travels as fp16.
    """
    if bucket.is_due:
        half = torch.float16 if in_half and bucket.dtype == torch.float32 else None
        bucket.publish(message_tag(way_of(bucket)), half)


def wait(buckets: Sequence[Bucket], contract: Contract) -> None:
    """Returns when the parameters are whole again."""
    for bucket in buckets:
        with contract.waiting(way_of(bucket)):
            bucket.wait(contract.limit_seconds)


def way_of(bucket: Bucket) -> Event:
    """What ranks call the way of updated parameters."""
    return Event("parameters", bucket.title)
