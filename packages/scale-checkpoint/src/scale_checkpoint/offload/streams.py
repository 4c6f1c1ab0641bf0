"""The one seam between CPU and GPU: copies that run beside the computation, with the same verbs on both.

On CUDA a lane is a side stream in each direction, and host memory is pinned; on CPU a copy is done when the call
returns. No other file of the package asks which device it is on.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from scale_checkpoint.live_memory import elsewhere


class Mark(Protocol):
    """A point in the order of work of a lane."""

    def is_over(self) -> bool: ...

    def wait_on_host(self) -> None: ...

    def wait_on_device(self) -> None: ...


class _Over:
    """Of a device whose work is done when the call returns."""

    def is_over(self) -> bool:
        return True

    def wait_on_host(self) -> None:
        return None

    def wait_on_device(self) -> None:
        return None


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_over(self) -> bool:
        return bool(self._event.query())

    def wait_on_host(self) -> None:
        self._event.synchronize()

    def wait_on_device(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))


class Lane:
    """Copies between a device and the host, one after the other; this one is of a device without streams.

    Attributes:
        ahead_bytes: How much is worth fetching before it is needed, beside the one storage that comes next.
    """

    ahead_bytes = 0

    def out(self, source: Tensor) -> tuple[Tensor, Mark]:
        """Starts to copy `source`, uint8 [n], to the host; it must stay as it is until the mark is over."""
        with self._beside():
            target = self._host_memory(source.numel())
            target.copy_(source, non_blocking=True)
            return target, self._mark()

    def readable(self, source: Tensor) -> tuple[Tensor, Mark]:
        """Returns the bytes of `source` where the host can read them once the mark is over: where they are, if so."""
        return source, self._mark()

    def back(self, source: Tensor, target: Tensor) -> Mark:
        """Starts to copy `source`, uint8 [n], from the host into `target` on the device."""
        with self._beside():
            target.copy_(source, non_blocking=True)
            return self._mark()

    def host_memory(self, num_bytes: int) -> Tensor:
        """Returns memory of the host, uint8 [num_bytes], for copies from and to the device."""
        return self._host_memory(num_bytes)

    def worker(self) -> Executor:
        """Returns what does the host's share of the work, one thing after the other, while the device computes."""
        return _INLINE

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _host_memory(self, num_bytes: int) -> Tensor:
        with elsewhere():  # Where the device is the CPU, this stands for another memory.
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def _mark(self) -> Mark:
        return _OVER


class _CudaLane(Lane):
    """Copies beside the computation of a CUDA device, after all that was issued there before.

    Args:
        device: With its index.
    """

    ahead_bytes = 1 << 27

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._worker: Executor | None = None

    def worker(self) -> Executor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "scale_checkpoint")
        return self._worker

    def readable(self, source: Tensor) -> tuple[Tensor, Mark]:
        return self.out(source)

    def _beside(self) -> AbstractContextManager[Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)  # torch keeps a pool of these.

    def _mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaMark(event, self._device)


class Inline(Executor):
    """Does all at once, where a device leaves the host no time to spare."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls `fn(*args, **kwargs)`; what it raises comes out of the future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


_OVER = _Over()
_INLINE = Inline()


@cache
def lanes_of(device: torch.device) -> tuple[Lane, Lane]:
    """Returns the lanes of a device, to the host and back from it."""
    if device.type == "cuda":
        return _CudaLane(device), _CudaLane(device)
    return Lane(), Lane()
