"""What a message between stages says: a header of fixed length, what is needed to read the rest, and the tensors.

Stages may return anything: tuples, dicts, dataclasses, with tensors in them and other values beside. All of it is
pickled but for the tensors, which travel by themselves, uncopied. In a training most messages are as the last one
was in that place, so the pickled part is sent only where it has changed.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEADER_LENGTH = 6
"""Integers of 64 bits in a header."""


class Says(IntEnum):
    """What a header announces."""

    SAME = 0
    """Tensors follow, nested and shaped as the last ones in this place."""

    DESCRIBED = 1
    """A description follows, and then the tensors."""

    FAILED = 2
    """Nothing will be computed here in this step; a description of the failure follows."""

    ABSENT = 3
    """The mini-batch has no such micro-batch."""


class Pass(IntEnum):
    """What the ranks go through together: each message tells of which kind of pass it is."""

    STEP = 1
    EVALUATION = 2

    def __str__(self) -> str:
        return "a step" if self is Pass.STEP else "an evaluation"


class Share(NamedTuple):
    """Which part of the mini-batch a micro-batch is; every rank learns it from what arrives.

    Attributes:
        samples: Of this micro-batch.
        total: Of the mini-batch.
        num_micro_batches: How many it makes.
    """

    samples: int
    total: int
    num_micro_batches: int

    @property
    def weight(self) -> float:
        """What the mean over this micro-batch counts in the mean over the mini-batch."""
        return self.samples / self.total if self.total else 1 / self.num_micro_batches


class TensorForm(NamedTuple):
    """All that a tensor is but its values.

    Attributes:
        shape: Its sizes.
        strides: Of a dense tensor: they decide how kernels read it, and so the last bits of what they compute.
        dtype: Its type.
        requires_grad: Whether its gradient is to be sent back.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Form(NamedTuple):
    """What is sent once and kept: how tensors are nested, and their forms.

    Attributes:
        structure: The pickled tree, with numbers in the places of tensors.
        tensors: By these numbers.
    """

    structure: bytes
    tensors: tuple[TensorForm, ...]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(one.num_bytes for one in self.tensors)

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensor"


class Content(NamedTuple):
    """What arrives, and what is sent: a tree taken apart (`pack`).

    Attributes:
        structure: The tree without its tensors.
        tensors: In the order of the structure.
        share: Of which part of the mini-batch.
    """

    structure: bytes
    tensors: list[Tensor]
    share: Share

    def __str__(self) -> str:
        return str(form_of(self.structure, self.tensors))


class Failure(NamedTuple):
    """Why a step was given up; the same words on every rank.

    Attributes:
        rank: Where it was raised.
        stage: In which stage; -1 outside of all.
        micro_batch: On which micro-batch; -1 where it is none's.
        doing: Such as "the forward".
        kind: The exception's class.
        text: Its message.
        trace: Its traceback.
        lost: Another rank can't be reached any more.
    """

    rank: int
    stage: int
    micro_batch: int
    doing: str
    kind: str
    text: str
    trace: str
    lost: bool = False

    def to_bytes(self) -> bytes:
        """Returns it as it travels."""
        return json.dumps(list(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Failure:
        """Reads what `to_bytes` has written."""
        return cls(*json.loads(data))


Message = Content | Failure | Share
"""What a stage gets: content; a failure; or the share of a micro-batch that is not there."""


class _Packer(pickle.Pickler):
    """Pickles all but the tensors that hold values."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or obj.is_meta:
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


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


_ONE_TENSOR, _ = _pickled(torch.empty(0))


def pack(tree: Any) -> tuple[bytes, list[Tensor]]:
    """Takes the tensors out of a tree; one that stands there twice is taken once.

    Args:
        tree: Any nesting; tensors on the meta device stay in it, for they are forms alone.

    Returns:
        The rest of the tree, and the tensors.

    Raises:
        TypeError: Something in it can't be sent.
    """
    if type(tree) is Tensor and not tree.is_meta:
        return _ONE_TENSOR, [tree]
    try:
        return _pickled(tree)
    except Exception as error:
        raise TypeError(
            f"what goes from one stage to the next is sent to another process, and this can't be pickled: {error}; "
            "return tensors, numbers and words, in tuples, lists, dicts or dataclasses of a module's top level"
        ) from error


def unpack(structure: bytes, tensors: list[Tensor]) -> Any:
    """Puts tensors back into a tree.

    Args:
        structure: Of `pack`.
        tensors: As many as it has returned.
    """
    if structure == _ONE_TENSOR:
        return tensors[0]
    return _Unpacker(io.BytesIO(structure), tensors).load()


def form_of(structure: bytes, tensors: list[Tensor]) -> Form:
    """Returns the form of what is to be sent; all tensors are dense (`dense`).

    Args:
        structure: Of `pack`.
        tensors: Likewise.
    """
    return Form(
        structure,
        tuple(TensorForm(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors),
    )


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor without its history, copied only if its memory has gaps or is read several times.

    Args:
        tensor: Any shape and dtype, strided.

    Raises:
        TypeError: It is sparse, or another kind that has no memory of its own.
    """
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a strided tensor to send, but got one of layout {tensor.layout}: send .to_dense()")
    requires_grad, tensor = tensor.requires_grad, tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not (tensor.is_contiguous() or _is_dense(tensor)):
        tensor = tensor.contiguous()
    return tensor.requires_grad_() if requires_grad else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a dense tensor, as [num_bytes] uint8.

    Args:
        tensor: Of `dense`, or new.
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def empty(form: TensorForm) -> Tensor:
    """Returns memory on the host for a tensor that will arrive.

    Args:
        form: Its form.
    """
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype)


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element of its memory belongs to exactly one of its own: a permutation of a contiguous tensor."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
