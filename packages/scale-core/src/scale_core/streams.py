"""The one seam between CPU and GPU: streams and events with the same verbs on both.

On CUDA a copy can run beside the computation; on CPU everything has happened by the time a call returns. No other
file asks which device it is on: it takes a stream here and uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_HOST = torch.device("cpu")


class Event(Protocol):
    """A mark in a stream's order of work."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """An order of work on one device."""

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
        """Work that is issued inside goes to this stream, after all that the caller's stream holds so far.

        Args:
            after_caller: False is for work that depends on nothing but this stream, and on what the host has seen done.
        """

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

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
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

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
        if after_caller:
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


class Inline(Executor):
    """The stand-in for a thread on a device whose work leaves the host no time to spare: it does all at once."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Calls `fn(*args, **kwargs)`; what it raises comes out of the future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def worker_for(device: torch.device) -> Executor:
    """Returns what does the host's share of the work while a device computes, one thing after the other.

    Args:
        device: Where the tensors are that it is about. Those on the host may belong to a model that a GPU computes
            with, so there is a thread as well where this process uses one.
    """
    beside = device.type == "cuda" or torch.cuda.is_initialized()
    return ThreadPoolExecutor(1, "scale_core worker") if beside else Inline()


def on_host(tensor: Tensor) -> bool:
    """Whether the host can read and write this tensor where it stands."""
    return tensor.device == _HOST


def host_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns memory [num_elements] of the host for copies from and to `device`, such as run beside its computation."""
    return torch.empty(num_elements, dtype=dtype, device=_HOST, pin_memory=device.type == "cuda")


def copy_into(target: Tensor, source: Tensor) -> None:
    """Starts a copy in the order of the current stream; on CUDA it runs beside the host if the host side is pinned."""
    target.copy_(source, non_blocking=target.is_cuda or source.is_cuda)


def copy_over(tensor: Tensor, device: torch.device, stream: Stream) -> Tensor:
    """Returns a copy on another device, made on `stream`; whatever the caller does with it from now on sees it whole.

    Where the host is one of the two, its side is to be pinned, as what `copy_to` has brought there is: then a copy to
    the device stops neither the host nor the computation. One to the host is waited for.
    """
    if device == _HOST:
        copy = copy_to(tensor, device, stream)
        stream.record().synchronize()
        return copy
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)  # The caller's stream owns it.
    with stream.run():
        copy_into(target, tensor)
    stream.join()
    return target


def copy_to(tensor: Tensor, device: torch.device, stream: Stream) -> Tensor:
    """Starts a copy of `tensor` to `device` on `stream`; it is whole after `stream.record().synchronize()`.

    The host side is pinned where the source is on CUDA, so that the copy does not stop the computation. The caller may
    forget `tensor`, but not write to it until then. A tensor that is on `device` already is cloned: the result is never
    shared.
    """
    with stream.run():
        pin = tensor.device.type == "cuda" and device.type == "cpu"
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pin)
        target.copy_(tensor, non_blocking=pin)
        if tensor.is_cuda:  # Its memory goes to nobody else before this stream has read it.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return target
