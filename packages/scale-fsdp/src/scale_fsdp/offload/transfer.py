"""Parameters and gradients on their way to the host, and new values on their way back.

A ferry has a few slots of host memory. While one bucket is updated, the next one arrives and the last one leaves. What
stands on the host already is used where it is.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from scale_core import compat
from scale_core.streams import Event, copy_into, host_memory, on_host, stream_for
from scale_fsdp.offload.host_kernel import HostPiece
from scale_fsdp.offload.placement import Part, dense_strides, is_dense

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# One bucket arrives, one is updated, one leaves.
_NUM_SLOTS = 3


class Stretch(NamedTuple):
    """The elements [start, stop) of a part, counted from the part's own start."""

    part: Part
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Returns its elements of a tensor of the parameter's shape."""
        return self.within(self.part.of(tensor))

    def within(self, tensor: Tensor) -> Tensor:
        """Returns its elements of a tensor of the part's shape: all of it as it is, else [n]."""
        if self.stop - self.start == self.part.numel:
            return tensor
        return tensor.detach().reshape(-1)[self.start : self.stop]


class Slot:
    """Host memory for one bucket.

    Args:
        device: Between which and the host it is for copies.

    Attributes:
        free: When what has left it has arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}
        self.free: Event | None = None

    def clear(self, tensors: Sequence[Tensor]) -> None:
        """Makes room for copies of these tensors; waits until what was in it has left."""
        if self.free is not None:
            self.free.synchronize()
        room: dict[torch.dtype, int] = {}
        for tensor in tensors:
            room[tensor.dtype] = room.get(tensor.dtype, 0) + tensor.numel()
        for dtype, numel in room.items():
            if dtype not in self._memory or self._memory[dtype].numel() < numel:
                self._memory[dtype] = host_memory(numel, dtype, self._device)
        self._used = dict.fromkeys(room, 0)

    def take(self, like: Tensor) -> Tensor:
        """Returns memory of the shape, dtype and, if it is one range of memory in any order, strides of `like`."""
        place = self._used[like.dtype]
        self._used[like.dtype] += like.numel()
        return self._memory[like.dtype].narrow(0, place, like.numel()).as_strided(like.shape, dense_strides(like))


@dataclass
class Load:
    """A bucket on the host, or on its way there.

    Attributes:
        stretches: What it holds, of one group and dtype.
        pieces: The same on the host, once it has arrived.
        slot: The memory that they are in; None: everything was on the host before.
        arrived: When they have.
        returns: What is to be copied back, to and from.
        sources: What is copied, and must live until it has arrived.
    """

    stretches: Sequence[Stretch]
    pieces: list[HostPiece]
    slot: Slot | None
    arrived: Event
    returns: list[tuple[Tensor, Tensor]]
    sources: list[Tensor]


class Ferry:
    """Copies between one device and the host, beside the device's computation.

    Args:
        device: Where the parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self._out, self._back = stream_for(device), stream_for(device)
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(_NUM_SLOTS):
            self._free.put(Slot(device))

    @torch.no_grad()
    def fetch(self, stretches: Sequence[Stretch], early: Mapping[Part, Tensor]) -> Load:
        """Begins to copy parameters and gradients to the host; waits for a free slot.

        Args:
            stretches: Whose parameters have gradients; of one group and dtype.
            early: The gradients that have arrived on the host before, in the shapes of their parts.
        """
        params = [stretch.of(stretch.part.param) for stretch in stretches]
        grads = [
            stretch.within(early[stretch.part]) if stretch.part in early else stretch.of(stretch.part.grad)
            for stretch in stretches
        ]
        casts = [None if stretch.part.target is None else stretch.of(stretch.part.target) for stretch in stretches]
        late = [grad for stretch, grad in zip(stretches, grads, strict=True) if stretch.part not in early]
        away = [tensor for tensor in (*params, *late, *casts) if tensor is not None and not _is_here(tensor)]
        slot = self._slot_for(away) if away else None
        copies: list[tuple[Tensor, Tensor]] = []
        returns: list[tuple[Tensor, Tensor]] = []

        def here(tensor: Tensor, *, comes: bool, goes: bool) -> Tensor:
            if slot is None or _is_here(tensor):
                return tensor
            place = slot.take(tensor)
            copies.extend([(place, tensor)] if comes else [])
            returns.extend([(tensor, place)] if goes else [])
            return place

        pieces = [
            HostPiece(
                here(param, comes=True, goes=True),
                grad if stretch.part in early else here(grad, comes=True, goes=False),
                stretch.part.state_of(stretch.start, stretch.stop),
                None if cast is None else here(cast, comes=False, goes=True),
            )
            for stretch, param, grad, cast in zip(stretches, params, grads, casts, strict=True)
        ]
        return Load(stretches, pieces, slot, self.copy_out(copies), returns, grads)

    def _slot_for(self, tensors: Sequence[Tensor]) -> Slot:
        slot = self._free.get()
        try:
            slot.clear(tensors)
        except BaseException:
            self._free.put(slot)
            raise
        return slot

    def copy_out(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Begins copies (to, from); returns when they are whole."""
        with self._out.run():
            for target, source in copies:
                copy_into(target, source)
        return self._out.record()

    @torch.no_grad()
    def bring_back(self, load: Load) -> None:
        """Begins to copy new values to where they belong."""
        with self._back.run(after_caller=False):  # The host has seen that what they replace was used.
            for target, source in load.returns:
                copy_into(target, source)
        if load.slot is not None:
            load.slot.free = self._back.record()

    def give_back(self, load: Load) -> None:
        """Ends a load, whether it was brought back or has failed."""
        if load.slot is not None:
            self._free.put(load.slot)

    def join(self) -> None:
        """What is computed on the device from now on sees the new values."""
        self._back.join()


def _is_here(tensor: Tensor) -> bool:
    """Whether the host can use a tensor where it is, as one range of memory."""
    return on_host(tensor) and is_dense(tensor)


class EarlyCopy:
    """A part's gradient on the host before the step, copied during the backward pass.

    Whoever clips or unscales gradients afterwards does it to the originals, often in ways that leave no new version
    behind (`grad.data.mul_()`, or torch's own scaler), so a copy must prove that it is one still.

    Args:
        part: Whose gradient it is.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._memory: Tensor | None = None
        self._source: Tensor | None = None
        self._arrived: Event | None = None
        self._of: TensorWeakRef | None = None
        self._print: _Fingerprint | None = None
        self._version = -1

    @torch.no_grad()
    def start(self, grad: Tensor, ferry: Ferry) -> None:
        """Begins to copy a gradient of the parameter's shape."""
        mine = self._part.of(grad)
        if self._memory is None or self._memory.dtype != mine.dtype:
            self._memory = host_memory(mine.numel(), mine.dtype, mine.device).view(mine.shape)
        self._of, self._print, self._version = TensorWeakRef(grad), _Fingerprint.of(mine), grad._version
        self._arrived = ferry.copy_out([(self._memory, mine)])
        self._source = None if grad.is_contiguous() else mine  # Made for the copy, and to be kept until its end.

    def is_of(self, grad: Tensor) -> bool:
        """Whether it was begun with this very gradient, and nothing is known to have been done to that since."""
        return self._of is not None and self._of() is grad and self._version == grad._version

    def differs(self, grad: Tensor) -> Tensor | None:
        """Returns a number that is 0 where it is a copy of this gradient as it is now; None: it is none at all."""
        if self._print is None or not self.is_of(grad):
            return None  # Of what leaves no new version, only the fingerprint tells.
        return self._print.differences(_Fingerprint.of(self._part.of(grad)))

    def wait(self) -> Tensor:
        """Returns the copy once it has arrived, in the shape of the part; it belongs to the caller until `start`."""
        assert self._arrived is not None and self._memory is not None, "waited for a copy that nobody started"
        self._arrived.synchronize()
        self._source, self._of = None, None
        return self._memory


def still_copies(copies: Sequence[tuple[EarlyCopy, Tensor]]) -> list[bool]:
    """Returns which copies are those of these gradients as they are now; the devices are asked all at once."""
    answers = [copy.differs(grad) for copy, grad in copies]
    known = [answer for answer in answers if answer is not None]
    if not known:
        return [False] * len(copies)
    gathered = torch.stack([answer.to(known[0].device) for answer in known]).to(torch.float32)
    values = iter(compat.values_of(gathered, simulated=[0.0] * len(known)))
    return [answer is not None and next(values) == 0 for answer in answers]


class _Fingerprint(NamedTuple):
    """What changes when a gradient is scaled, clipped, negated or replaced.

    Norm and sum are rounded, so that a small change of few elements can hide in them. The exact sum of all elements'
    bits shows every change of a single one. What only puts elements into other places shows in none of them.

    Attributes:
        rounded: [2] the norm and the sum.
        exact: Scalar of 64 bits: the sum of the elements' bits, read as integers.
    """

    rounded: Tensor
    exact: Tensor

    @classmethod
    def of(cls, grad: Tensor) -> _Fingerprint:
        grad = torch.view_as_real(grad) if grad.is_complex() else grad
        dtype = torch.promote_types(grad.dtype, torch.float32)
        rounded = torch.stack([torch.linalg.vector_norm(grad, dtype=dtype), grad.sum(dtype=dtype)])
        return cls(rounded, grad.view(_BITS[grad.itemsize]).sum(dtype=torch.int64))

    def differences(self, other: _Fingerprint) -> Tensor:
        """How many of the numbers differ; of a gradient that is no number, always some."""
        return (self.rounded != other.rounded).sum() + (self.exact != other.exact)
