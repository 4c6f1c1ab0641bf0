"""Messages between stages: a pytree taken apart into tensors and a pickled structure, or the failure sent in its place.

Stages may return anything: tuples, dicts, dataclasses, with tensors and other values in them. All of it is
pickled but for the tensors, which are sent by themselves, uncopied (`p2p`).
"""

from __future__ import annotations

import io
import pickle
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from torch import Tensor, empty

from scale_pipe.schedules.action import EVERY_MICRO_BATCH


class StepKind(IntEnum):
    """The call that all ranks run together; every message carries it."""

    STEP = 1
    EVALUATION = 2

    def __str__(self) -> str:
        return "a step" if self is StepKind.STEP else "an evaluation"


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
    """A pytree taken apart by `pack`, and the size of its micro-batch."""

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


class _Packer(pickle.Pickler):
    """Pickles everything but tensors with values; a tensor that occurs twice is taken out once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._positions: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or obj.is_meta:
            return None
        position = self._positions.setdefault(id(obj), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(obj)
        return position


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        tensor: Tensor = self._tensors[pid]
        return tensor


def _pickled(tree: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(tree)
    return file.getvalue(), packer.tensors


_ONE_TENSOR, _ = _pickled(empty(0))


def pack(tree: Any) -> tuple[bytes, list[Tensor]]:
    """Takes the tensors but those on the meta device out of a pytree. Raises TypeError if it can't be pickled."""
    if type(tree) is Tensor and not tree.is_meta:
        return _ONE_TENSOR, [tree]
    try:
        return _pickled(tree)
    except Exception as error:
        raise TypeError(
            f"what a stage returns is sent to another process, and this can't be pickled: {error}. Return tensors, "
            "numbers and strings, in tuples, lists, dicts or dataclasses of a module's top level"
        ) from error


def unpack(structure: bytes, tensors: list[Tensor]) -> Any:
    """Puts the tensors that `pack` took out back into their pytree."""
    if structure == _ONE_TENSOR:
        return tensors[0]
    return _Unpacker(io.BytesIO(structure), tensors).load()
