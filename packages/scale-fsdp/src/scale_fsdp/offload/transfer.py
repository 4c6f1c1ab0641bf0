"""Host transfer: parameters and gradients are copied to pinned buffers, and new values back, during the computation."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from scale_core import compat
from scale_core.device.streams import StreamEvent, copy_into, host_memory, on_host, stream_for
from scale_fsdp.offload.host_kernel import HostChunk
from scale_fsdp.offload.placement import StatePart, dense_strides, is_dense

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NUM_BUFFERS = 3  # one bucket arrives, one is updated, one leaves


class ElementRange(NamedTuple):
    """The elements [start, stop) of a state part, counted from the part's start."""

    part: StatePart
    start: int
    stop: int

    def slice_param(self, tensor: Tensor) -> Tensor:
        """Its elements of a tensor of the parameter's shape."""
        return self.slice_part(self.part.slice(tensor))

    def slice_part(self, tensor: Tensor) -> Tensor:
        """Its elements of a tensor of the part's shape: the tensor itself if these are all, else [n]."""
        if self.stop - self.start == self.part.numel:
            return tensor
        return tensor.detach().reshape(-1)[self.start : self.stop]


class PinnedBuffer:
    """Host memory for one bucket."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}
        self.free: StreamEvent | None = None

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Makes room for copies of these tensors, after its earlier content has left."""
        if self.free is not None:
            self.free.synchronize()
        numels: dict[torch.dtype, int] = {}
        for tensor in tensors:
            numels[tensor.dtype] = numels.get(tensor.dtype, 0) + tensor.numel()
        for dtype, numel in numels.items():
            if dtype not in self._memory or self._memory[dtype].numel() < numel:
                self._memory[dtype] = host_memory(numel, dtype, self._device)
        self._used = dict.fromkeys(numels, 0)

    def allocate(self, like: Tensor) -> Tensor:
        """Memory of the shape, dtype and, if that is dense, strides of `like`."""
        offset = self._used[like.dtype]
        self._used[like.dtype] += like.numel()
        return self._memory[like.dtype].narrow(0, offset, like.numel()).as_strided(like.shape, dense_strides(like))


@dataclass
class TransferBucket:
    """A bucket on the host, or on its way there."""

    transfer: HostTransfer
    ranges: Sequence[ElementRange]  # of one group and dtype
    chunks: list[HostChunk]  # the same on the host, once `ready`
    buffer: PinnedBuffer | None  # None: everything was on the host before
    ready: StreamEvent
    write_backs: list[tuple[Tensor, Tensor]]  # (to, from)
    sources: list[Tensor]  # alive until they are copied


class HostTransfer:
    """Copies between one device and the host, on streams of their own."""

    def __init__(self, device: torch.device) -> None:
        self._to_host, self._to_device = stream_for(device), stream_for(device)
        self._free: queue.SimpleQueue[PinnedBuffer] = queue.SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(PinnedBuffer(device))

    @torch.no_grad()
    def fetch(self, ranges: Sequence[ElementRange], early: Mapping[StatePart, Tensor]) -> TransferBucket:
        """Starts to copy parameters, and gradients that are not in `early`, to the host; waits for a free buffer."""
        params = [part_range.slice_param(part_range.part.param) for part_range in ranges]
        grads = [
            part_range.slice_part(early[part_range.part])
            if part_range.part in early
            else part_range.slice_param(part_range.part.grad)
            for part_range in ranges
        ]
        casts = [
            None if part_range.part.cast_target is None else part_range.slice_param(part_range.part.cast_target)
            for part_range in ranges
        ]
        late = [grad for part_range, grad in zip(ranges, grads, strict=True) if part_range.part not in early]
        on_device = [
            tensor for tensor in (*params, *late, *casts) if tensor is not None and not _usable_on_host(tensor)
        ]
        buffer = self._reserve(on_device) if on_device else None
        copies: list[tuple[Tensor, Tensor]] = []
        write_backs: list[tuple[Tensor, Tensor]] = []

        def host_tensor(tensor: Tensor, *, copy_in: bool, copy_back: bool) -> Tensor:
            if buffer is None or _usable_on_host(tensor):
                return tensor
            host = buffer.allocate(tensor)
            if copy_in:
                copies.append((host, tensor))
            if copy_back:
                write_backs.append((tensor, host))
            return host

        chunks = [
            HostChunk(
                host_tensor(param, copy_in=True, copy_back=True),
                grad if part_range.part in early else host_tensor(grad, copy_in=True, copy_back=False),
                part_range.part.state_slice(part_range.start, part_range.stop),
                None if cast is None else host_tensor(cast, copy_in=False, copy_back=True),
            )
            for part_range, param, grad, cast in zip(ranges, params, grads, casts, strict=True)
        ]
        return TransferBucket(self, ranges, chunks, buffer, self.copy_out(copies), write_backs, grads)

    def _reserve(self, tensors: Sequence[Tensor]) -> PinnedBuffer:
        buffer = self._free.get()
        try:
            buffer.reserve(tensors)
        except BaseException:
            self._free.put(buffer)
            raise
        return buffer

    def copy_out(self, copies: Sequence[tuple[Tensor, Tensor]]) -> StreamEvent:
        """Starts copies (to, from) to the host; returns their end."""
        with self._to_host.run():
            for target, source in copies:
                copy_into(target, source)
        return self._to_host.record()

    @torch.no_grad()
    def write_back(self, bucket: TransferBucket) -> None:
        """Starts to copy new values to the device."""
        with self._to_device.run(after_caller=False):  # The host has seen that the replaced values were used.
            for target, source in bucket.write_backs:
                copy_into(target, source)
        if bucket.buffer is not None:
            bucket.buffer.free = self._to_device.record()

    def release(self, bucket: TransferBucket) -> None:
        """Frees a bucket's buffer, whether it was written back or has failed."""
        if bucket.buffer is not None:
            self._free.put(bucket.buffer)

    def join(self) -> None:
        """Makes the current stream wait for the copies back."""
        self._to_device.join()


def _usable_on_host(tensor: Tensor) -> bool:
    """Whether the host can use a tensor where it is, as one range of memory."""
    return on_host(tensor) and is_dense(tensor)


class GradientCopy:
    """A part's gradient on the host, copied during the backward pass; a fingerprint shows whether it still is one."""

    # Clipping and scalers change the original later, often without a new version: `grad.data.mul_()`, torch's scaler.

    def __init__(self, part: StatePart) -> None:
        self._part = part
        self._memory: Tensor | None = None
        self._source: Tensor | None = None
        self._arrived: StreamEvent | None = None
        self._copied_from: TensorWeakRef | None = None
        self._fingerprint: _Fingerprint | None = None
        self._version = -1

    @torch.no_grad()
    def start(self, grad: Tensor, transfer: HostTransfer) -> None:
        """Starts to copy a gradient of the parameter's shape."""
        part_grad = self._part.slice(grad)
        if self._memory is None or self._memory.dtype != part_grad.dtype:
            self._memory = host_memory(part_grad.numel(), part_grad.dtype, part_grad.device).view(part_grad.shape)
        self._copied_from, self._fingerprint, self._version = (
            TensorWeakRef(grad),
            _Fingerprint.of(part_grad),
            grad._version,
        )
        self._arrived = transfer.copy_out([(self._memory, part_grad)])
        self._source = None if grad.is_contiguous() else part_grad  # Made for the copy, and to be kept until its end.

    def is_copy_of(self, grad: Tensor) -> bool:
        """Whether this very gradient was copied, with no known change since."""
        return self._copied_from is not None and self._copied_from() is grad and self._version == grad._version

    def differs(self, grad: Tensor) -> Tensor | None:
        """A number that is 0 if the copy has the present values of this gradient; None if it is of another one."""
        if self._fingerprint is None or not self.is_copy_of(grad):
            return None
        return self._fingerprint.differences(_Fingerprint.of(self._part.slice(grad)))

    def wait(self) -> Tensor:
        """The copy in the shape of the part, once it has arrived; valid until `start`."""
        assert self._arrived is not None and self._memory is not None, "wait() without start()"
        self._arrived.synchronize()
        self._source, self._copied_from = None, None
        return self._memory


def are_current(copies: Sequence[tuple[GradientCopy, Tensor]]) -> list[bool]:
    """Which copies have the present values of their gradients; synchronizes the devices once."""
    answers = [copy.differs(grad) for copy, grad in copies]
    local_answers = [answer for answer in answers if answer is not None]
    if not local_answers:
        return [False] * len(copies)
    gathered = torch.stack([answer.to(local_answers[0].device) for answer in local_answers]).to(torch.float32)
    values = iter(compat.values_of(gathered, simulated=[0.0] * len(local_answers)))
    return [answer is not None and next(values) == 0 for answer in answers]


# Share of the elements in the first part. Groups of features have no border there, nor at an odd number of elements.
_FIRST_PART = 0.618


class _Fingerprint(NamedTuple):
    """Numbers that change when a gradient is scaled, clipped, negated or replaced."""

    rounded: Tensor  # [3] norm, and the sums of two parts: a small change of few elements can hide in the rounding
    bits: Tensor  # int64 scalar: exact sum of the elements' bits

    @classmethod
    def of(cls, grad: Tensor) -> _Fingerprint:
        grad = torch.view_as_real(grad) if grad.is_complex() else grad
        dtype = torch.promote_types(grad.dtype, torch.float32)
        # A gradient can sum to 0 and have as many positive as negative elements, for example before a LayerNorm or in a
        # layer for two classes. Its negation then has the same norm, sum and bits, but other sums of unequal parts.
        flat = grad.as_strided((grad.numel(),), (1,)) if is_dense(grad) else grad.reshape(-1)
        sums = [part.sum(dtype=dtype) for part in flat.tensor_split([int(flat.numel() * _FIRST_PART) | 1])]
        rounded = torch.stack([torch.linalg.vector_norm(grad, dtype=dtype), *sums])
        return cls(rounded, grad.view(_BITS[grad.itemsize]).sum(dtype=torch.int64))

    def differences(self, other: _Fingerprint) -> Tensor:
        """How many of the numbers differ; with NaN always some."""
        return (self.rounded != other.rounded).sum() + (self.bits != other.bits)
