"""The queue of a communicator of `AsyncGloo`, and its operations: what comes late, what times out, what is checked."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

EXIT_VARIABLE = "SCALE_TEST_EXIT_SECONDS"
"""The environment variable with the seconds from a limit to the end of the process; 60, as on NCCL, if unset."""

_EXIT_SECONDS = 60.0
_MOST_BYTES = 1 << 31  # of one message: its size is its tag

Parts: TypeAlias = dict[int, Tensor]
"""Tensors by rank."""

_c10d = cast(Any, dist)
_Work: Any = _c10d.Work


class UnorderedAccessError(AssertionError):
    """A tensor of a collective was changed or freed between the call and `wait()`, which is a race on NCCL."""


class OrderedWork(_Work):  # type: ignore[misc]  # torch's stubs give it no constructor
    """One operation of a communicator.

    Attributes:
        name: The operation and its number on the communicator, for errors.
    """

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        sends: Parts,
        receives: Parts,
        outputs: Sequence[Tensor],
        finish: Callable[[Parts], Sequence[Tensor]],
    ) -> None:
        super().__init__()
        self.name = name
        self.enqueued = time.monotonic()
        self._communicator = communicator
        self._outputs, self._finish = outputs, finish
        with _plain_tensors():
            snapshots = {id(part): part.contiguous().clone() for part in sends.values()}
            self.sends = {peer: snapshots[id(part)] for peer, part in sends.items()}
            rank, others = communicator.rank, [item for item in receives.items() if item[0] != communicator.rank]
            self.receives = {
                peer: torch.empty_like(part, memory_format=torch.contiguous_format) for peer, part in others
            }
            self._own_part = {rank: self.sends.pop(rank)} if rank in sends else {}
            inputs = {id(part): part for part in sends.values() if not any(_overlap(part, to) for to in outputs)}
            self._inputs = [(part, snapshots[key]) for key, part in inputs.items()]
            for output in outputs:
                _poison(output)
        self._results: Sequence[Tensor] = ()
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        self._is_published = False
        self._error: BaseException | None = None
        self._future: Any = None

    def complete(self) -> None:
        """Called in the worker thread when all messages have come."""
        with _plain_tensors():
            self._results = self._finish({**self.receives, **self._own_part})
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """Ends the operation with an error, unless it has ended."""
        if not self._is_done.is_set():
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._is_done.set()
            future = self._future
        if future is not None:
            self._set_future(future)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the results are there; `timeout` counts from the call that started the operation.

        Raises:
            RuntimeError: The limit passed, or a rank is gone. The communicator is aborted.
            UnorderedAccessError: A tensor was changed since the call.
        """
        seconds = timeout.total_seconds()
        left = max(0.0, self.enqueued + seconds - time.monotonic()) if seconds > 0 else None
        if not self._is_done.wait(left):
            self._communicator.expire(self, seconds)
        if self._error is not None:
            raise self._error
        self._publish()
        return True

    def is_completed(self) -> bool:
        """Whether the transfer has ended. If so, its results are there, since a host that asks has waited."""
        if self._is_done.is_set() and self._error is None:
            self._publish()
        return self._is_done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._is_done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The error that ended it."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that the operation fills."""
        return list(self._outputs)

    def get_future(self) -> Any:
        """torch's future of the results: the worker thread writes them before it sets the future."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
            is_done = self._is_done.is_set()
        if is_done and not self._future.done():
            self._set_future(self._future)
        return self._future

    def _set_future(self, future: Any) -> None:
        try:
            if self._error is not None:
                raise self._error
            self._publish()
            future.set_result(self.result())
        except Exception as error:
            future.set_exception(error)

    def _publish(self) -> None:
        """Writes the results, once, after it has checked that nobody has touched the operation's tensors."""
        with self._lock, _plain_tensors():
            if self._is_published:
                return
            self._is_published = True
            for tensor, snapshot in self._inputs:
                self._check(tensor, snapshot, "an input changed")
            for output, result in zip(self._outputs, self._results, strict=True):
                self._check(output, _poison(torch.empty_like(result)), "a result was written by somebody else")
                output.data.copy_(result.view(output.shape))
            self._inputs, self._results = [], ()

    def _check(self, tensor: Tensor, expected: Tensor, fact: str) -> None:
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            fact = "the memory of a tensor was freed"
        elif torch.equal(_as_bytes(tensor), _as_bytes(expected)):
            return
        raise UnorderedAccessError(
            f"{self.name}: {fact} before wait(): shape {tuple(tensor.shape)}, {tensor.dtype}. NCCL may still read or "
            "write it then: call wait() first"
        )


class Communicator:
    """A queue of operations, which one thread runs in order over a gloo group of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, title: str) -> None:
        self.rank, self.timeout, self._title = rank, timeout, title
        self._gloo = _c10d.ProcessGroupGloo(_c10d.PrefixStore(title, store), rank, size, timeout)
        self._queue: queue.SimpleQueue[OrderedWork | None] = queue.SimpleQueue()
        self._num_operations = 0
        self._pending: list[OrderedWork] = []
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name=f"ordered {title}", daemon=True).start()

    def start(
        self,
        op: str,
        sends: Parts,
        receives: Parts,
        outputs: Sequence[Tensor] = (),
        finish: Callable[[Parts], Sequence[Tensor]] = lambda received: (),
    ) -> OrderedWork:
        """Enqueues an operation: what goes to each rank, what comes from each, and the results made of what came."""
        self._num_operations += 1
        work = OrderedWork(
            f"{op} number {self._num_operations} on {self._title}", self, sends, receives, outputs, finish
        )
        self._pending.append(work)
        self._queue.put(work)
        if self._error is not None:  # The thread may still wait for a message of an earlier operation.
            work.fail(self._error)
        return work

    def expire(self, work: OrderedWork, seconds: float) -> None:
        """Aborts the communicator because an operation took too long, and ends the process later."""
        self.abort(f"{work.name} timed out waiting {1000 * seconds:.0f}ms since its call")
        delay = float(os.environ.get(EXIT_VARIABLE, _EXIT_SECONDS))
        timer = threading.Timer(delay, _end_process, (str(self._error),))
        timer.daemon = True
        timer.start()

    def abort(self, reason: str) -> None:
        """Fails all operations that have not ended, and all later ones."""
        self._error = self._error or RuntimeError(reason)
        for work in list(self._pending):
            work.fail(self._error)

    def close(self) -> None:
        """Ends the thread after the operations that were started."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._transfer(work)
                except RuntimeError as error:
                    left = work.enqueued + self.timeout.total_seconds() - time.monotonic()
                    if left <= 0:
                        self.expire(work, self.timeout.total_seconds())
                    else:  # A rank is gone.
                        self.abort(f"{work.name}: {error}")
            if self._error is not None:
                work.fail(self._error)
            self._pending.remove(work)

    def _transfer(self, work: OrderedWork) -> None:
        gloo, deadline = self._gloo, work.enqueued + self.timeout.total_seconds()
        messages = [(gloo.recv, peer, _as_bytes(part)) for peer, part in work.receives.items() if part.numel()]
        messages += [(gloo.send, peer, _as_bytes(part)) for peer, part in work.sends.items() if part.numel()]
        started = [start([wire], peer, wire.numel() % _MOST_BYTES) for start, peer, wire in messages]
        for message in started:
            message.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        if self._error is None:
            work.complete()


class Together(_Work):  # type: ignore[misc]
    """Several operations, waited for as one."""

    def __init__(self, works: Sequence[OrderedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        collected: Any = torch.futures.collect_all([work.get_future() for work in self._works])
        return collected.then(lambda done: [tensor for future in done.value() for tensor in future.value()])


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """A context in which no mode and no autograd of the program sees what the transport does with its tensors."""
    with torch.inference_mode(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory; a tensor with gaps counts as all that it spans."""
    (begin, end), (other_begin, other_end) = map(_span, (a, b))
    return begin < other_end and other_begin < end


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def _poison(tensor: Tensor) -> Tensor:
    """Fills a tensor with a value that no result has by accident: NaN, or the largest integer."""
    memory = tensor.data
    if memory.dtype.is_floating_point and memory.element_size() == 1:
        memory.view(torch.uint8).fill_(0xFF)  # NaN in each float8
    elif memory.is_floating_point() or memory.is_complex():
        memory.fill_(torch.nan)
    else:
        memory.fill_(True if memory.dtype == torch.bool else torch.iinfo(memory.dtype).max)
    return tensor


def _end_process(reason: str) -> None:
    print(f"ending the process, as NCCL's watchdog does: {reason}", file=sys.stderr, flush=True)
    os.abort()
