"""Streams and events with the same methods on devices with streams and on the host.

On CUDA a copy can run during the computation; on CPU all work is done when a call returns. No other file asks which
device it is on: it takes a stream here and uses it. The simulated accelerator has streams, too, so that a simulation
runs the code that CUDA would run, and finds the waits that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from scale_core import compat

T = TypeVar("T")

_HOST = torch.device("cpu")


class StreamEvent(Protocol):
    """A point in a stream's work, with methods of `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class _Done:
    """An event of a device whose work is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def wait(self, stream: Any = None) -> None:
        return None


class Stream:
    """A stream of work on one device; this one, for devices without streams, does all work at once, in order."""

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
        """A context whose work goes to this stream, after the caller's stream unless `after_caller` is False."""
        return nullcontext()

    def record(self) -> StreamEvent:
        """Records an event after all work of this stream so far."""
        return _Done()

    def join(self) -> None:
        """Makes the caller's stream wait for all work of this stream so far."""


class DeviceStream(Stream):
    """A side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
        if after_caller:
            self._stream.wait_stream(self._module.current_stream(self._device))
        context: AbstractContextManager[object] = self._module.stream(self._stream)
        return context

    def record(self) -> StreamEvent:
        event: StreamEvent = self._stream.record_event()
        return event

    def join(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._stream)


def has_streams(device: torch.device) -> bool:
    """Whether the work of a device is ordered by streams, and a call may return before it is done."""
    return device.type in ("cuda", compat.STAND_IN)


def stream_for(device: torch.device) -> Stream:
    """Returns a new side stream of `device`."""
    return DeviceStream(device) if has_streams(device) else Stream()


def current_stream(device: torch.device) -> Any:
    """The current stream of a device, for example a `torch.cuda.Stream`; None on the host."""
    if has_streams(device):
        return torch.get_device_module(device).current_stream(device)
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


class InlineExecutor(Executor):
    """An executor that runs everything at once, for devices whose work leaves the host no time to spare."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Calls `fn(*args, **kwargs)`; its exception comes out of the future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def worker_for(device: torch.device) -> Executor:
    """Returns the executor of the host's share of the work while a device computes, in order."""
    if (simulated := compat.stand_in()) is not None:
        worker: Executor = torch.get_device_module(simulated).worker()
        return worker
    beside = device.type == "cuda" or torch.cuda.is_initialized()
    return ThreadPoolExecutor(1, "scale_core worker") if beside else InlineExecutor()


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is in host memory."""
    return tensor.device == _HOST


def host_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns host memory [num_elements] for copies from and to `device`, pinned where they can be asynchronous."""
    return torch.empty(num_elements, dtype=dtype, device=_HOST, pin_memory=has_streams(device))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copies in the order of the current stream; with streams it is asynchronous if the host side is pinned."""
    target.copy_(source, non_blocking=has_streams(target.device) or has_streams(source.device))


def tensor_on(device: torch.device, values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers on a device; on CUDA the host does not wait for their copy, as it would in `torch.tensor`."""
    if device.type != "cuda":  # A tensor without memory, as in a simulation, can be pinned by an operator alone.
        tensor = torch.tensor(values, dtype=dtype, device=_HOST)
        return (tensor.pin_memory() if has_streams(device) else tensor).to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=_HOST, pin_memory=True).to(device, non_blocking=True)


def copy_over(tensor: Tensor, device: torch.device, stream: Stream) -> Tensor:
    """Returns a copy on another device, made on `stream`; the caller's later work on it sees it complete."""
    # Where the host is one of the two, its side is to be pinned, as what `copy_to` has brought there is: then a copy to
    # the device stops neither the host nor the computation. One to the host is waited for.
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
    """Starts a copy of `tensor` to `device` on `stream`; it is complete after `stream.record().synchronize()`."""
    # The host side is pinned where the source's device has streams, so that the copy does not stop the computation. The
    # caller may forget `tensor`, but not write to it until then. A tensor that is on `device` already is cloned: the
    # result is never shared.
    with stream.run():
        pin = has_streams(tensor.device) and device == _HOST
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pin)
        target.copy_(tensor, non_blocking=pin)
        if has_streams(tensor.device):  # Its memory is not reused before this stream has read it.
            tensor.record_stream(current_stream(tensor.device))
        return target
