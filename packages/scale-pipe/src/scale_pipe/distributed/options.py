"""`PipelineOptions`: what `DistributedPipe` takes beyond the arguments of torchgpipe's pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_core.arguments import checked_arguments
from scale_core.consistency.divergence import check_interval


@checked_arguments
@dataclass(frozen=True)
class PipelineOptions:
    """How a `DistributedPipe` places stages, and how its ranks wait for and compare each other.

        >>> from scale_pipe import PipelineOptions
        >>> options = PipelineOptions(stages_per_rank=2, limit_seconds=60)

    Attributes:
        stages_per_rank: For schedules that run with any number.
        deferred_batch_norm: Batch norms update their running statistics once per step, with the full batch.
        memory_cap: For the schedule "solve", the most live micro-batches on a rank, in model equivalents.
        limit_seconds: The longest wait for a rank; None is the group's own limit, at most ten minutes.
        check_replicas_every: After how many steps the copies of parameters that several ranks hold, for example tied
            embeddings, are compared, beginning with the first; 0 is never. None is 100, or the value of
            `SCALE_CHECK_REPLICAS_EVERY`. A difference is a `DivergenceError`.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: An interval below zero.

    See also: [the guide to pipelines](../guides/pipe.md).
    """

    stages_per_rank: int | None = None
    deferred_batch_norm: bool = False
    memory_cap: float | Sequence[float] | None = None
    limit_seconds: float | None = None
    check_replicas_every: int | None = None

    def __post_init__(self) -> None:
        check_interval(self.check_replicas_every)
