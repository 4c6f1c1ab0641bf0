"""The messages between stages: a slot for each transfer of a step, and what it carries.

Nothing here sends: `p2p` has the format of messages, and the channel.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from scale_pipe.schedules.action import EVERY_MICRO_BATCH


class Flow(StrEnum):
    """The purpose of a transfer."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SHARED = "gradient of a shared parameter"
    SAMPLE = "one micro-batch's gradient of a shared parameter"
    STATE = "state"
    PROBE = "probe of the link"


class Slot(NamedTuple):
    """One transfer of a step, sent once; where both stages are on one rank it is handed over there."""

    flow: Flow
    name: str  # "" between neighbors, otherwise the name of the skip or of the shared parameter
    source: int  # stage
    target: int  # stage
    micro_batch: int  # EVERY_MICRO_BATCH for messages once per step

    def gradient_slot(self) -> Slot:
        """The slot of the gradient of this activation."""
        assert self.flow is Flow.ACTIVATION
        return Slot(Flow.GRADIENT, self.name, self.target, self.source, self.micro_batch)

    def __str__(self) -> str:
        subject = f"{self.flow.value} {self.name!r}" if self.name else self.flow.value
        batch = "" if self.micro_batch == EVERY_MICRO_BATCH else f", micro-batch {self.micro_batch}"
        return f"{subject} of stage {self.source} for stage {self.target}{batch}"


class ChunkSize(NamedTuple):
    """The size of a micro-batch in its mini-batch, which every rank learns from the messages."""

    samples: int  # of this micro-batch
    total: int  # of the mini-batch
    num_micro_batches: int

    @property
    def weight(self) -> float:
        """The weight of this micro-batch's mean in the mean over the mini-batch."""
        return self.samples / self.total if self.total else 1 / self.num_micro_batches


WHOLE = ChunkSize(1, 1, 1)  # for messages that belong to no micro-batch


class Payload(NamedTuple):
    """A pytree taken apart by `stage.pack`, and the size of its micro-batch."""

    structure: bytes
    tensors: list[Tensor]
    chunk_size: ChunkSize

    def __str__(self) -> str:
        metas = (f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in self.tensors)
        return ", ".join(metas) or "no tensor"


class Failure(NamedTuple):
    """The reason for which a step is aborted; the same text on every rank."""

    rank: int
    stage: int  # -1 outside of all stages
    micro_batch: int  # -1 outside of all micro-batches
    action: str  # for example "the forward"
    error_type: str
    text: str
    traceback: str
    rank_lost: bool = False  # another rank can't be reached any more


Message = Payload | Failure | ChunkSize
"""A payload, a failure, or the size alone where the mini-batch has no such micro-batch."""
