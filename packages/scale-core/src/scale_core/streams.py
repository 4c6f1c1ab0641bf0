"""The one seam between CPU and GPU: streams and events with the same verbs on both.

On CUDA a copy can run beside the computation; on CPU everything has happened by the time a call returns. No other
file asks which device it is on: it takes a stream here and uses it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A mark in a stream's order of work."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """An order of work on one device."""

    def run(self) -> AbstractContextManager[object]:
        """Work that is issued inside goes to this stream, after all that the caller's stream holds so far."""

    def record(self) -> Event:
        """Marks all the work that this stream holds so far."""

    def join(self) -> None:
        """The caller's stream goes on only after all that this stream holds so far."""


class _Done:
    """An event of a device whose work is done when the call returns."""

    def synchronize(self) -> None:
        return None


class HostStream:
    """The stand-in for a stream on a device without streams: all work is done at once, in order."""

    def run(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Event:
        return _Done()

    def join(self) -> None:
        return None


class CudaStream:
    """A side stream of one CUDA device.

    Args:
        device: The device whose work it orders.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        event: Event = self._stream.record_event()
        return event

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def stream_for(device: torch.device) -> Stream:
    """Returns a new side stream of `device`, or its stand-in where the device has none."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


def copy_to(tensor: Tensor, device: torch.device, stream: Stream) -> Tensor:
    """Starts a copy of `tensor` to `device` on `stream`; it is whole after `stream.record().synchronize()`.

    The host side is pinned where the source is on CUDA, so that the copy does not stop the computation. The caller
    keeps `tensor` alive until then. A tensor that is on `device` already is cloned: the result is never shared.
    """
    with stream.run():
        pin = tensor.device.type == "cuda" and device.type == "cpu"
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pin)
        return target.copy_(tensor, non_blocking=pin)
