"""What a rank goes into a pass with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from scale_pipe.distributed.messages import Failure, Share
from scale_pipe.distributed.samples import Samples
from scale_pipe.distributed.stage import ToLoss

OnStep = Callable[[int], Sequence[int]]
"""Steps what belongs to a stage, and returns the stages whose parameters were updated."""


class Parts(NamedTuple):
    """Something that is given for a mini-batch, by micro-batch.

    Attributes:
        of: By micro-batch.
        total: Samples of the mini-batch that it was cut from; None where each micro-batch gets the whole.
    """

    of: Sequence[Any]
    total: int | None


class Given(NamedTuple):
    """What a rank is given for a pass.

    Attributes:
        shares: Of each micro-batch, on the rank of the first stage; elsewhere they arrive.
        arguments: By stage of this rank, the `Arguments` that it is called with beside what arrives.
        to_loss: On the rank of the last stage, where a loss is wanted.
        keeps_output: On the rank of the last stage, in an evaluation: its output is wanted.
        on_step: Called for each stage where the schedule steps it; returns the stages whose parameters were updated.
        failure: What was wrong with it.
        cause: What was raised then.
        samples: Tells of the step to whoever measures gradients; None in an evaluation.
    """

    shares: Sequence[Share] = ()
    arguments: Mapping[int, Parts] = {}
    to_loss: ToLoss | None = None
    keeps_output: bool = False
    on_step: OnStep | None = None
    failure: Failure | None = None
    cause: Exception | None = None
    samples: Samples | None = None
