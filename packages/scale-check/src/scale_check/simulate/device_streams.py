"""Streams, events and worker threads of the simulated accelerator, with the methods of CUDA's.

Nothing runs beside anything else here: each operation is done when its call returns, and a worker's task when it is
submitted. But where a simulation looks for races, everything that orders work on a real device (events, waits of
streams, waits of the host, results of threads) moves the clocks of `happens_before`. Without it nothing does.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar, cast

import torch

from scale_check.simulate.happens_before import Clock, Frames, WorkQueue
from scale_core import compat
from scale_core.device.streams import InlineExecutor

T = TypeVar("T")

_POLLS = 100
"""So often an event may be asked for without a wait; then it has happened, and a loop of a program ends."""

_MAX_FRAMES = 3
_TORCH, _HERE, _LIBRARY = (str(Path(file).parent) for file in (torch.__file__, __file__, functools.__file__))
_numbers = itertools.count(1)


class StreamOrder:
    """The clocks of one simulation: of its streams, its communicators and its host threads."""

    active: StreamOrder | None = None
    """The clocks of the simulation that runs now, if it looks for races."""

    def __init__(self) -> None:
        self.thread = WorkQueue("the main thread", "thread")
        self.threads = {threading.get_ident()}  # Those whose operators are seen
        self.communicators: dict[object, WorkQueue] = {}
        self.forward_streams: set[WorkQueue] = set()  # Those that have computed what autograd may go back through.
        self._streams: dict[int, WorkQueue] = {}
        self._names: dict[str, int] = {}  # Of communicators, how many there are
        self._polls: Counter[int] = Counter()  # By the identity of an event or handle

    def has_ended(self, polled: object, clock: Clock) -> bool:
        """Whether the host has waited until `clock`, through whatever it may be, when `polled` is asked once more."""
        self._polls[id(polled)] += 1
        if self._polls[id(polled)] > _POLLS:
            self.thread.wait(clock)
        return all(self.thread.clock.get(queue, 0) >= count for queue, count in clock.items())

    def restart_polls(self, polled: object) -> None:
        """It stands for something later from now on."""
        self._polls.pop(id(polled), None)

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Inside, streams and events of the simulated device move these clocks."""
        StreamOrder.active = self
        try:
            yield
        finally:
            StreamOrder.active = None

    def stream(self, stream: SimulatedStream | None = None) -> WorkQueue:
        """The queue of a stream, or of the current one, after all that the current host thread has seen.

        The host launches what comes next there.
        """
        if threading.get_ident() not in self.threads:
            raise RuntimeError(
                "a thread that the program has started uses a stream of a simulation. The simulation looks at the "
                "thread that has opened it and at backward passes only. Call what the thread does from there"
            )
        stream = current_stream() if stream is None else stream
        queue = self._streams.get(stream.stream_id)
        if queue is None:
            queue = self._streams[stream.stream_id] = WorkQueue(
                getattr(stream, "title", f"stream {stream.stream_id}")  # An operator gets torch's own class.
            )
        queue.wait(self.thread.clock)
        return queue

    def streams(self) -> list[WorkQueue]:
        """The queues of all streams that have been used."""
        return list(self._streams.values())

    def communicator(self, key: object, name: str) -> WorkQueue:
        """The queue of a communicator; of several with equal names, each has a number from the second on."""
        if key not in self.communicators:
            number = self._names[name] = self._names.get(name, 0) + 1
            self.communicators[key] = WorkQueue(f"{name} (number {number})" if number > 1 else name, "communicator")
        return self.communicators[key]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass: it runs on the streams of its forward pass, and its caller's stream waits for them.

        Here all of it runs on the caller's.
        """
        stream = self.stream()
        for forward_stream in self.forward_streams:
            stream.wait(forward_stream.clock)
        try:
            yield
        finally:
            for forward_stream in self.forward_streams:
                forward_stream.wait(stream.clock)

    def synchronize(self) -> None:
        """The host waits for the device."""
        for queue in (*self._streams.values(), *self.communicators.values()):
            self.thread.wait(queue.clock)

    @contextmanager
    def in_thread(self, thread: WorkQueue) -> Iterator[None]:
        """Inside, another host thread runs, which starts after what this one has seen."""
        thread.wait(self.thread.clock)
        caller, self.thread = self.thread, thread
        try:
            yield
        finally:
            self.thread = caller


class SimulatedStream(torch.Stream):
    """A stream of the simulated device."""

    title: str

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> SimulatedStream:  # noqa: PYI034
        device_type = int(cast(Any, torch._C)._autograd.DeviceType.PrivateUse1)
        make: Any = super().__new__
        stream: SimulatedStream = make(cls, stream_id=next(_numbers), device_index=0, device_type=device_type)
        return stream

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        made = frames()
        number = self.stream_id
        self.title = f"side stream {number}{f' (made at {text_of(made[:1])})' if made else ''}"

    def __enter__(self) -> Self:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()

    def wait_stream(self, stream: Any) -> None:
        if (order := StreamOrder.active) is not None:
            order.stream(self).wait(order.stream(stream).clock)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        has_ended: bool = self.record_event().query()
        return has_ended


class SimulatedEvent:
    """A point in the work of a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        if (order := StreamOrder.active) is not None:
            self._clock = order.stream(stream).now()
            order.restart_polls(self)

    def wait(self, stream: Any = None) -> None:
        if (order := StreamOrder.active) is not None:
            order.stream(stream).wait(self._clock)

    def synchronize(self) -> None:
        if (order := StreamOrder.active) is not None:
            order.thread.wait(self._clock)

    def query(self) -> bool:
        """Whether the host has waited for it, through whatever it may be; it is as late as it can be."""
        if (order := StreamOrder.active) is None:
            return True
        return order.has_ended(self, self._clock)

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class WaitedFuture(torch.futures.Future[Any]):
    """The result of a collective, or of a callback after it: `wait()` makes the current stream wait.

    A callback of `then` runs on a stream of its own, as it does on CUDA.
    """

    def __init__(self, order: StreamOrder, end: Clock, value: object) -> None:
        super().__init__()
        self._order, self._end = order, end
        self.set_result(value)
        if compat.graph_task_id() != -1:  # The reducer of DistributedDataParallel waits for it, in C++.
            compat.queue_callback(self._wait)

    def _wait(self) -> None:
        self._order.stream().wait(self._end)

    def wait(self) -> Any:
        self._wait()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], T]) -> torch.futures.Future[T]:
        side = SimulatedStream()
        queue = self._order.stream(side)
        queue.wait(self._end)
        with on_stream(side):
            value = callback(self)
        return WaitedFuture(self._order, queue.now(), value)


class SimulatedWorker(InlineExecutor):
    """A host thread that works beside the others, in the order of its tasks; who takes a result has waited for it.

    A task runs when it is submitted. On a device it may run as late as the first use of its result, or of the result
    of a later task. So what the task was given lives until then.
    """

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, order: StreamOrder | None) -> None:
        self._order = order  # Of the simulation that this is for; the worker itself may outlive it
        self._thread = WorkQueue("a worker thread", "thread")
        self._tasks: list[tuple[_OrderedFuture[Any], Any]] = []  # Whose results nobody has waited for

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        order = StreamOrder.active
        if order is not self._order:
            self._begin(order)
        if order is None:
            return super().submit(fn, *args, **kwargs)
        future: _OrderedFuture[T] = _OrderedFuture(self)
        self._tasks.append((future, (fn, args, kwargs)))
        with order.in_thread(self._thread), on_stream(_default):
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
        future.end = self._thread.now()
        return future

    def join(self, future: _OrderedFuture[Any]) -> None:
        """Makes the current host thread wait for a task, and so for those before it."""
        if (order := self._order) is None or order is not StreamOrder.active:
            return
        order.thread.wait(future.end)
        ends = next((index + 1 for index, (other, _) in enumerate(self._tasks) if other is future), 0)
        with order.in_thread(self._thread):  # It is the one that drops them.
            del self._tasks[:ends]


class _OrderedFuture(Future[T]):
    """The result of a task of a simulated worker."""

    end: Clock

    def __init__(self, worker: SimulatedWorker) -> None:
        super().__init__()
        self._worker, self.end = worker, {}

    def result(self, timeout: float | None = None) -> T:
        self._worker.join(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._worker.join(self)
        return super().exception(timeout)

    def done(self) -> bool:
        self._worker.join(self)
        return super().done()


def current_stream(device: Any = None) -> SimulatedStream:
    """The stream that takes what is computed now."""
    return _current[-1]


def default_stream(device: Any = None) -> SimulatedStream:
    """The stream that takes what is computed outside of all others."""
    return _default


@contextmanager
def on_stream(stream: SimulatedStream | None) -> Iterator[None]:
    """Inside, what is computed goes to a stream; None changes nothing, as in `torch.cuda.stream`."""
    _current.append(_current[-1] if stream is None else stream)
    try:
        yield
    finally:
        _current.pop()


def set_stream(stream: SimulatedStream) -> None:
    """From now on, what is computed goes to a stream."""
    _current[-1] = stream


class _Generic(type):
    """In place of a class of torch for streams or events of any device: makes the simulated device's."""

    real: Any
    simulated: Any

    def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_other = device is not None and torch.device(device).type != compat.STAND_IN
        return cls.real(device, *args, **kwargs) if is_other else cls.simulated(device, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.real, cls.simulated))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.real, cls.simulated))


class _Stream(metaclass=_Generic):
    real, simulated = torch.Stream, SimulatedStream


class _Event(metaclass=_Generic):
    real, simulated = torch.Event, SimulatedEvent


@contextmanager
def generic_names(synchronize: Callable[[], None]) -> Iterator[None]:
    """Inside, `torch.Stream`, `torch.Event` and `torch.accelerator` have streams and events of the simulated device."""
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "Stream", _Stream),
        (torch, "Event", _Event),
        (torch.accelerator, "current_stream", current_stream),
        (torch.accelerator, "set_stream", set_stream),
        (torch.accelerator, "synchronize", lambda device=None, /: synchronize()),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    for place, name, value in replaced:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in originals:
            setattr(place, name, value)


@contextmanager
def in_backward_thread(caller_frames: Frames) -> Iterator[None]:
    """Inside, a thread runs that the caller of a backward pass waits for; lines of C++ there are the caller's."""
    global _frames_of_caller
    order = StreamOrder.active
    if order is None:
        yield
        return
    thread, caller = WorkQueue("the thread of the backward pass", "thread"), order.thread
    order.threads.add(threading.get_ident())
    _frames_of_caller = caller_frames
    try:
        with order.in_thread(thread):
            yield
    finally:
        order.threads.discard(threading.get_ident())
        _frames_of_caller = ()
        caller.wait(thread.clock)


def frames() -> Frames:
    """The lines of code that have led here, the innermost first, without torch and the simulation."""
    found: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _MAX_FRAMES:
        if _is_shown(name := frame.f_code.co_filename):
            found.append((name, frame.f_lineno))
        frame = frame.f_back
    return tuple(found) or _frames_of_caller


@functools.cache
def _is_shown(file: str) -> bool:
    if file.startswith((_TORCH, _HERE, "<frozen", "<string>")):
        return False
    return not file.startswith(_LIBRARY) or "site-packages" in file


def text_of(lines: Frames) -> str:
    """Lines of code as text: the innermost, and those that have called it."""
    places = [f"{'/'.join(Path(name).parts[-2:])}:{number}" for name, number in lines]
    return ", called from ".join(places) or "an unknown line"


def _make_default() -> SimulatedStream:
    stream = SimulatedStream()
    stream.title = "the default stream"
    return stream


_frames_of_caller: Frames = ()
_default: SimulatedStream
_current: list[SimulatedStream]


@functools.cache
def prepare() -> None:
    """Makes the default stream, once the device type is registered."""
    global _default, _current
    _default = _make_default()
    _current = [_default]
