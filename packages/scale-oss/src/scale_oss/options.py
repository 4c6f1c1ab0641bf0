"""What `OSS` and `LocalSGD` take beyond the arguments of FairScale and of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from scale_core.arguments import checked_arguments
from scale_core.consistency.divergence import check_interval

BUCKET_NUMEL = 2**22  # Elements of a bucket, 16 MB of fp32: enough for full speed, small against a model.

InnerState: TypeAlias = Literal["maintain", "reset", "average"]


@checked_arguments
@dataclass(frozen=True)
class OSSOptions:
    """How an `OSS` divides an optimizer between ranks, and compares them.

        >>> import torch
        >>> from scale_oss import OSS, OSSOptions
        >>> params = torch.nn.Linear(4, 2).parameters()
        >>> optimizer = OSS(params, torch.optim.AdamW, options=OSSOptions(limit_seconds=60), lr=1e-3)

    Attributes:
        elementwise: Whether `optim` updates each element by itself, so that tensors may be cut. None is the answer
            known of torch.optim's own classes; of any other class, False: right for all that look at one tensor at a
            time.
        together: Whether `optim` looks at all tensors together, as Prodigy and D-Adaptation do, which estimate one step
            size. Then the first rank updates all of them and has all of the state: nothing is shared out, and results
            are right. Not for shards.
        bucket_numel: Elements that are sent together; of shards that are put together for the step, elements that each
            rank gets at a time.
        limit_seconds: The longest wait for a rank; None is the group's own limit, at most ten minutes.
        check_replicas_every: After how many steps all ranks compare that they hold equal parameters, beginning with the
            first; 0 is never. None is 100, or the value of `SCALE_CHECK_REPLICAS_EVERY`. With `ShardedDataParallel` all
            parameters of its module are compared. A difference is a `DivergenceError`, before the step.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: An interval below zero.

    See also: [the guide to OSS](../guides/oss.md).
    """

    elementwise: bool | None = None
    together: bool = False
    bucket_numel: int = BUCKET_NUMEL
    limit_seconds: float | None = None
    check_replicas_every: int | None = None

    def __post_init__(self) -> None:
        check_interval(self.check_replicas_every)


@checked_arguments
@dataclass(frozen=True)
class OuterStep:
    """The outer step of `LocalSGD`; by default the plain average.

        >>> from scale_oss import LocalSGD
        >>> from scale_oss.options import OuterStep
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = LocalSGD(model, sgd, sync_every=8, outer=OuterStep(lr=0.7, momentum=0.9, nesterov=True))

    Attributes:
        lr: Above 0.
        momentum: From 0 to below 1.
        nesterov: Take Nesterov's momentum.
        scale_by_lr: Divide and multiply by the inner learning rate, so that the momentum keeps its meaning while a
            schedule changes that.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A number out of its range.

    See also: [the guide to local SGD](../guides/slow-networks.md#local-sgd-slowmo-and-diloco).
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    scale_by_lr: bool = False

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"OuterStep: expected lr above 0, got {self.lr}; 1.0 takes the average unchanged")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OuterStep: expected momentum from 0 to below 1, got {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterStep(nesterov=True): expected momentum above 0, got 0: pass momentum=0.9")


@checked_arguments
@dataclass(frozen=True)
class LocalSGDOptions:
    """How `LocalSGD` sends, and what becomes of the inner optimizer and of buffers.

        >>> from scale_oss.options import LocalSGDOptions
        >>> options = LocalSGDOptions(inner_state="average")

    Attributes:
        inner_state: The fate of the inner optimizer's state in an outer step: each rank's stays ("maintain"), it
            begins again ("reset"), or is averaged where it has the parameter's shape ("average").
        broadcast_buffers: Give all ranks the first one's buffers in each outer step, as DistributedDataParallel does.
        bucket_numel: How many elements are sent together; a rank needs memory for this number in an outer step.
        limit_seconds: The longest wait for a rank; None is the group's own limit, at most ten minutes.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A number or a word that makes no sense.

    See also: [the guide to local SGD](../guides/slow-networks.md#local-sgd-slowmo-and-diloco).
    """

    inner_state: InnerState = "maintain"
    broadcast_buffers: bool = True
    bucket_numel: int = 25_000_000
    limit_seconds: float | None = None

    def __post_init__(self) -> None:
        check_count("LocalSGDOptions", "bucket_numel", self.bucket_numel)
        if self.inner_state not in get_args(InnerState):
            choices = ", ".join(map(repr, get_args(InnerState)))
            raise ValueError(f"LocalSGDOptions: expected inner_state to be one of {choices}, got {self.inner_state!r}")


def check_count(owner: str, name: str, value: Any) -> None:
    """Raises for a value that is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}: expected {name} to be an integer of at least 1, got {value!r}")
