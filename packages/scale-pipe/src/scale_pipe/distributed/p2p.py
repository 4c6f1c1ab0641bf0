"""Point-to-point messages between ranks: headers, metadata and tensors, received early and sent without waiting.

Every slot of a program is filled in every step, whatever happens: with a payload, with a failure, or with a header that
says that there is nothing. So no rank waits for one that has failed, and sends and receives always match.

A header has a fixed length, so it can be received before anything is known. Tensors mostly have the metadata of the
last ones in their slot: memory for them is posted together with the header, and the transport fills it while this rank
computes. Small tensors are packed in one message with the header. Where the metadata has changed, the sender, which
knows the receiver's posted buffers, sends the header alone and a single byte for each tensor that was posted; the real
tensors follow. (Gloo accepts a message that is shorter than the memory posted for it.)

On NCCL, whose messages have no tags and are matched by their order alone, tensors are sent and received in the order of
the program, which is one for all ranks; headers and metadata stay on the host. If the metadata of a slot is known, its
tensors are received before its header is read, so that they may arrive while this rank computes. Then the sender always
fills the posted buffers: with the tensors, or with as many bytes of no meaning, after which changed tensors follow.

Layout of a packed message, with tensors at multiples of 64 bytes:

    bytes      0      48   64              192            320
               header      tensor 0        tensor 1
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core import fault_points
from scale_core.comm.collectives import HOST, control_group, torch_group
from scale_core.comm.group import Group
from scale_core.comm.work import Work, start_work, wait_for
from scale_core.errors import TransferError
from scale_pipe.distributed.message import ChunkSize, Failure, Message, Payload, Slot

HEADER_LENGTH = 6  # int64: kind, bytes of the description, the three numbers of a ChunkSize, kind of the pass
LARGEST_PACKED_BYTES = 1 << 17  # copying so many takes about as long as sending a message of its own

_HEADER_BYTES = 8 * HEADER_LENGTH
_ALIGNMENT = 64


class MessageKind(IntEnum):
    """The content of a message, as its header announces it."""

    SAME_META = 0  # tensors follow, with the metadata of the last ones in this slot
    WITH_META = 1  # metadata follows, and then the tensors
    FAILED = 2  # a failure follows
    ABSENT = 3  # the mini-batch has no such micro-batch


class TensorMeta(NamedTuple):
    """Everything about a tensor but its values. Strides decide how kernels read it, and so the last bits of results."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PayloadMeta:
    """The metadata of a payload, sent once and kept by both sides."""

    structure: bytes
    tensors: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, structure: bytes, tensors: Sequence[Tensor]) -> PayloadMeta:
        """The metadata of dense tensors."""
        return cls(structure, tuple(TensorMeta(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(meta.num_bytes for meta in self.tensors)

    @cached_property
    def is_packed(self) -> bool:
        """Whether the tensors are small enough to be sent in one message with their header."""
        return self.num_bytes <= LARGEST_PACKED_BYTES

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The first and past-the-last byte of each tensor in a packed message; the last entry is its end."""
        ranges, start = [], _ALIGNMENT
        for meta in self.tensors:
            ranges.append((start, start + meta.num_bytes))
            start += -(-meta.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return (*ranges, (start, start))


def dense(tensor: Tensor) -> Tensor:
    """The tensor without its graph, copied only if its memory has gaps or overlaps. Raises TypeError if not strided."""
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a strided tensor to send, but got one of layout {tensor.layout}: send .to_dense()")
    requires_grad, tensor = tensor.requires_grad, tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # torch keeps the strides of dense tensors, for example a permutation of a contiguous one, and no others.
    if not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        tensor = tensor.contiguous()
    return tensor.requires_grad_() if requires_grad else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, [num_bytes] uint8."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def _memory_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [as_bytes(tensor) for tensor in tensors if tensor.numel()]


def empty_like_meta(meta: TensorMeta, device: torch.device = HOST) -> Tensor:
    """Uninitialized memory for a tensor that will arrive."""
    return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=device)


def pack_message(header: Sequence[int], meta: PayloadMeta, tensors: Sequence[Tensor]) -> Tensor:
    """A packed message, [num_bytes] uint8, of dense tensors on the host."""
    memory = torch.empty(meta.ranges[-1][1], dtype=torch.uint8)
    memory[:_HEADER_BYTES].view(torch.int64).copy_(torch.tensor(header))
    for tensor, (start, stop) in zip(tensors, meta.ranges, strict=False):
        if start < stop:
            memory[start:stop].copy_(as_bytes(tensor))
    return memory


def unpack_message(memory: Tensor, meta: PayloadMeta) -> list[Tensor]:
    """The tensors in a packed message, uncopied; each has a version counter of its own."""
    return [
        memory[start:stop].view(one.dtype).as_strided(one.shape, one.strides).data
        for one, (start, stop) in zip(meta.tensors, meta.ranges, strict=False)
    ]


_Works = list[tuple[int | None, Work]]


def _start_works(operation: Callable[..., Work], parts: Iterable[Tensor], peer: int, tag: int = 0) -> _Works:
    """Sends or receives the memory of each part, [num_bytes] uint8."""
    return [start_work(peer, partial(operation, [part], peer, tag)) for part in parts]


class _Posted(NamedTuple):
    memory: Tensor  # of the header, and of the tensors packed with it
    works: _Works
    tensors: list[Tensor]  # posted with the header


class _OnDevice(NamedTuple):
    """Tensors of a slot that are being received on the device; its header was not read yet."""

    tensors: list[Tensor]
    works: _Works


class _Started(NamedTuple):
    """A slot whose header has arrived, and whose tensors are being received."""

    meta: PayloadMeta
    tensors: list[Tensor]
    works: _Works
    chunk_size: ChunkSize


class P2PError(TransferError):
    """A slot that did not arrive from `peer`, or could not be sent to it; `fact` says why."""

    def __init__(self, slot: Slot, error: TransferError) -> None:
        super().__init__(error.op, error.peer, "", rank=error.rank)
        self.args = (f"{slot}: {error}",)
        self.fact, self.gone, self.slot = error.fact, error.gone, slot


class P2PChannel:
    """The messages of one rank to and from the others, a tag for each slot: the same on all ranks, no two equal.

    `pass_kind` is sent with each message; `received_kind` came with the last message.
    `matches_by_order`: tensors go by NCCL, so `start_tensors` is called for each slot in the order of the program.
    """

    def __init__(
        self, group: Group, tags: Mapping[Slot, int], device: torch.device, limit_seconds: float | None
    ) -> None:
        self._group = group
        self._tags = tags
        self._limit = limit_seconds  # of the wait for one message
        self.pass_kind = self.received_kind = 0
        self._metas: dict[Slot, PayloadMeta] = {}  # of the last payload sent or received
        self._posted: dict[Slot, _Posted] = {}
        self._ahead: dict[Slot, _OnDevice] = {}
        self._started: dict[Slot, _Started | Failure | ChunkSize] = {}
        self._sent: dict[Slot, tuple[int, _Works, list[Tensor]]] = {}
        self.set_device(device)

    def set_device(self, device: torch.device) -> None:
        """Sets the device where this rank computes; the known metadata stays."""
        self.device = device
        by_backend = self._group.state.moves_host_tensors if device.type == HOST.type else self._group.backend == "nccl"
        self.matches_by_order = self._on_device = by_backend

    @cached_property
    def _host(self) -> Any:
        """The process group that moves host memory."""
        return control_group(self._group)

    def num_bytes(self, slot: Slot) -> int:
        """Bytes of the last payload in a slot; 0 before the first."""
        meta = self._metas.get(slot)
        return 0 if meta is None else meta.num_bytes

    # Receiving.

    def post_receive(self, slot: Slot, peer: int) -> None:
        """Posts the receive of a slot (`irecv`); does not wait."""
        expected = None if self._on_device else self._metas.get(slot)
        is_packed = expected is not None and expected.is_packed
        size = expected.ranges[-1][1] if expected is not None and is_packed else _HEADER_BYTES
        memory, tensors = torch.empty(size, dtype=torch.uint8), list[Tensor]()
        if expected is not None and not is_packed:
            tensors = [empty_like_meta(meta) for meta in expected.tensors]
        works = _start_works(self._host.recv, [memory, *_memory_of(tensors)], peer, self._tags[slot])
        self._posted[slot] = _Posted(memory, works, tensors)

    def start_ahead(self, slot: Slot, peer: int) -> None:
        """Starts to receive the tensors of a slot before its turn, if they go by NCCL and their metadata is known.

        Later computation of this rank does not hold them up. The header of each earlier slot has to be read.
        """
        if self._on_device and slot in self._metas:
            self._ahead[slot] = self._receive_on_device(self._metas[slot], peer)

    def start_tensors(self, slot: Slot, peer: int) -> None:
        """Waits for the header of a posted slot, and starts to receive its tensors. Raises P2PError."""
        self._started[slot] = self._start(slot, peer)

    def receive(self, slot: Slot, peer: int) -> Message:
        """Waits for a posted slot, and returns its message. Raises P2PError."""
        if fault_points.active is not None:
            fault_points.active("pipe.receive", str(slot))
        started = self._started.pop(slot, None)
        if started is None:
            started = self._start(slot, peer)
        if not isinstance(started, _Started):
            return started
        for work in started.works:
            self._wait(slot, work)
        tensors = started.tensors
        if self.device != HOST:
            tensors = [tensor.to(self.device) for tensor in tensors]
        for tensor, meta in zip(tensors, started.meta.tensors, strict=True):
            if meta.requires_grad:
                tensor.requires_grad_()
        return Payload(started.meta.structure, tensors, started.chunk_size)

    def _start(self, slot: Slot, peer: int) -> _Started | Failure | ChunkSize:
        posted = self._posted.pop(slot)
        if slot not in self._ahead:
            self.start_ahead(slot, peer)
        ahead = self._ahead.pop(slot, None)
        for work in posted.works:
            self._wait(slot, work)
        header = posted.memory[:_HEADER_BYTES].view(torch.int64).tolist()
        kind, length, *size, self.received_kind = header
        chunk_size = ChunkSize(*size)
        if ahead is not None and kind == MessageKind.SAME_META:
            return _Started(self._metas[slot], *ahead, chunk_size)
        for work in () if ahead is None else ahead.works:  # Its bytes have no meaning.
            self._wait(slot, work)
        if kind == MessageKind.ABSENT:
            return chunk_size
        if kind == MessageKind.FAILED:
            return Failure(*pickle.loads(self._receive_bytes(slot, peer, length)))
        if kind == MessageKind.WITH_META:
            self._metas[slot] = pickle.loads(self._receive_bytes(slot, peer, length))
        meta = self._metas[slot]
        if self._on_device:
            return _Started(meta, *self._receive_on_device(meta, peer), chunk_size)
        if kind == MessageKind.SAME_META:
            tensors = unpack_message(posted.memory, meta) if meta.is_packed else posted.tensors
            return _Started(meta, tensors, [], chunk_size)
        tensors = [empty_like_meta(one) for one in meta.tensors]
        works = _start_works(self._host.recv, _memory_of(tensors), peer, self._tags[slot])
        return _Started(meta, tensors, works, chunk_size)

    def _receive_on_device(self, meta: PayloadMeta, peer: int) -> _OnDevice:
        tensors = [empty_like_meta(one, self.device) for one in meta.tensors]
        return _OnDevice(tensors, _start_works(torch_group(self._group).recv, _memory_of(tensors), peer))

    def _receive_bytes(self, slot: Slot, peer: int, length: int) -> bytes:
        content = bytearray(length)
        memory = torch.frombuffer(content, dtype=torch.uint8)
        for work in _start_works(self._host.recv, [memory], peer, self._tags[slot]):
            self._wait(slot, work)
        return bytes(content)

    # Sending.

    def send(self, slot: Slot, peer: int, message: Message) -> None:
        """Starts to send a message (`isend`). Raises TypeError, with nothing sent, if a tensor in it can't be sent."""
        if fault_points.active is not None:
            fault_points.active("pipe.send", str(slot))
        known = self._metas.get(slot)
        expected = None if self._on_device else known  # the receiver has posted memory for these on the host
        description, tensors, chunk_size = b"", [], ChunkSize(0, 0, 0)
        if isinstance(message, Failure):
            kind, description = MessageKind.FAILED, pickle.dumps(tuple(message))
        elif isinstance(message, ChunkSize):
            kind, chunk_size = MessageKind.ABSENT, message
        else:
            chunk_size, tensors = message.chunk_size, [dense(tensor) for tensor in message.tensors]
            meta = PayloadMeta.of(message.structure, tensors)
            kind = MessageKind.SAME_META if meta == known else MessageKind.WITH_META
            if kind is MessageKind.WITH_META:
                self._metas[slot] = meta
                description = pickle.dumps(meta)
        header = [kind, len(description), *chunk_size, self.pass_kind]
        on_device: list[Tensor] = []
        if self._on_device and known is not None and kind is not MessageKind.SAME_META:
            sizes = [one.num_bytes for one in known.tensors if one.num_bytes]
            on_device = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        if kind is MessageKind.SAME_META and expected is not None and expected.is_packed:
            on_host = [pack_message(header, expected, [tensor.cpu() for tensor in tensors])]
        else:
            on_host = [torch.tensor(header, dtype=torch.int64)]
            if kind is not MessageKind.SAME_META and expected is not None and not expected.is_packed:
                on_host += [torch.zeros(1, dtype=torch.uint8) for one in expected.tensors if one.num_bytes]
            if description:
                on_host.append(torch.frombuffer(bytearray(description), dtype=torch.uint8))
            wires = _memory_of(tensors)
            if self._on_device:
                on_device += wires
            else:
                on_host += [wire.cpu() for wire in wires]
        works = _start_works(self._host.send, on_host, peer, self._tags[slot])
        if on_device:
            works += _start_works(torch_group(self._group).send, on_device, peer)
        self._sent[slot] = peer, works, [*on_host, *on_device]  # The transport reads them until they have arrived.

    def release_sends(self, slots: Iterable[Slot]) -> None:
        """Frees the memory of sends that have arrived. Raises P2PError if one could not be sent after all."""
        for slot in slots:
            for work in self._sent.pop(slot)[1]:
                self._wait(slot, work)

    def wait_sends(self) -> None:
        """Waits until everything sent has arrived. Raises the first P2PError, after waiting for the others too."""
        first: P2PError | None = None
        for slot in list(self._sent):
            try:
                self.release_sends([slot])
            except P2PError as error:
                first = first or error
        if first is not None:
            raise first

    def _wait(self, slot: Slot, work: tuple[int | None, Work]) -> None:
        try:
            # NCCL would block the host to keep a limit; its own watchdog keeps the group's.
            wait_for("the transfer", *work, None if self._on_device else self._limit, self._group.rank)
        except TransferError as error:
            raise P2PError(slot, error) from error
