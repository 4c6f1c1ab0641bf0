"""Races of a simulated program: accesses of the same memory that no stream, event or wait puts in an order.

Each operator is one operation of the current stream, of a communicator or of a host thread, and reads and writes
ranges of storages. The rules are CUDA's and NCCL's:

- The host launches: what a stream does next comes after all that the launching thread has seen, not the other way.
- A collective runs on its communicator's stream, after the current stream; a wait merges it into the stream that waits.
- Memory belongs to the stream that allocated it. New memory may have belonged to a different tensor on that stream, so
  no other stream may use it earlier. What was released is given to that stream's next allocations, which must come
  after all uses of it, unless `record_stream` has named the streams that use it.
- A collective keeps its tensors alive until it is waited for, though not the memory that `resize_(0)` gives back.
- Copies between host and device are asynchronous where they are `non_blocking` and the host's memory is pinned;
  otherwise the host waits for them. Pinned memory that dies is kept until its copies have ended. A `non_blocking` copy
  to the device from memory that is not pinned has read it when the call returns, but has not yet written.
- Autograd runs a backward pass on the streams of its forward pass, and the stream that calls it waits for them.

C++ that waits for collectives by itself is not seen: these collectives count as waited for at once. `ddp` does in
Python what the reducer of DistributedDataParallel does. A future that is taken in a backward pass counts as waited for
at the end of the pass, where that reducer waits for the futures of communication hooks.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scale_check.simulate import ddp
from scale_check.simulate.device_streams import StreamOrder, WaitedFuture, frames, text_of
from scale_check.simulate.happens_before import Access, AccessHistory, Clock, Frames, Strides, WorkQueue
from scale_check.simulate.memory import tensors_with_memory
from scale_check.simulate.traffic import group_of_call
from scale_core import compat
from scale_core.errors import ScaleError
from scale_core.tree import tensors_in

COPIES = frozenset(("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"))
_FUNCTIONAL = "_c10d_functional::"
# Of collectives, by the beginning of the operator's name: which arguments are written and which are read.
_WRITTEN_AND_READ = {
    "allgather": ((0,), (1,)),
    "_allgather": ((0,), (1,)),
    "reduce_scatter": ((0,), (1,)),
    "_reduce_scatter": ((0,), (1,)),
    "alltoall": ((0,), (1,)),
    "gather": ((0,), (1,)),
    "scatter": ((0,), (1,)),
    "allreduce": ((0,), ()),
    "broadcast": ((0,), ()),
    "reduce_": ((0,), ()),
    "recv": ((0,), ()),
    "send": ((), (0,)),
    "barrier": ((), ()),
}


# Of torch, the files that call C++ which starts collectives and waits for them; among them the engine of autograd.
_WAIT_IN_CPP = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py", "torch/autograd/graph.py")
_MOST_TRANSFERS = 256  # Then handles that nobody has any more are dropped.
_HERE = str(Path(__file__).parent)


class Race(NamedTuple):
    """Two accesses of the same memory without an order.

    Attributes:
        earlier: The access that was launched first: the operator, the stream, and the line of code.
        later: The other one; or the release, and the next allocation, of memory that the first may still use.
        memory: The bytes, and where they were allocated.
        missing: The wait that would give them an order.

    See also: [the guide to missing waits](../guides/races.md).
    """

    earlier: str
    later: str
    memory: str
    missing: str

    def __str__(self) -> str:
        return (
            f"two accesses of the same memory have no order.\n  first:   {self.earlier}\n  second:  {self.later}\n"
            f"  memory:  {self.memory}\n{self.missing}"
        )


class RaceError(ScaleError):
    """A simulation has found two accesses of the same memory without an order.

    Attributes:
        race: The two accesses.

    See also: [the guide to races](../guides/races.md).
    """

    def __init__(self, race: Race) -> None:
        super().__init__(str(race))
        self.race = race


class _Memory(AccessHistory):
    """The accesses of one storage."""

    __slots__ = ("is_on_host", "made", "owner", "recorded", "watch")

    def __init__(self, owner: WorkQueue, is_on_host: bool) -> None:
        super().__init__()
        self.owner = owner  # The stream, or host thread, that has allocated it
        self.is_on_host = is_on_host
        self.made: Frames = ()
        self.recorded: set[WorkQueue] = set()  # Streams that the allocator waits for before it gives the memory away
        self.watch: weakref.ref[torch.UntypedStorage] | None = None


class _Transfer(NamedTuple):
    """A collective that was started."""

    communicator: WorkQueue
    clock: Clock  # When it has ended
    is_on_host: bool
    work: dist.Work | None = None  # Kept, so that its identity stays its own
    written: tuple[weakref.ref[Tensor], ...] = ()


class _Freed(NamedTuple):
    """A use of memory that was released, and that its stream had not seen by then."""

    last_use: Access
    how: str
    frames: Frames
    origin: str


class RaceChecker:
    """Finds the races of one simulation.

    Args:
        order: The clocks of its streams.
        is_pinned: Whether a tensor is in pinned memory.
        raises: Raise a `RaceError` where a race is found; otherwise `races` collects them.

    Attributes:
        races: What was found, each pair of lines once.
    """

    def __init__(self, order: StreamOrder, is_pinned: Callable[[Tensor], bool], raises: bool) -> None:
        self.races: list[Race] = []
        self._order, self._is_pinned, self._raises = order, is_pinned, raises
        self._memories: dict[int, _Memory] = {}  # by the identity of the storage
        self._known: set[tuple[object, ...]] = set()
        self._transfers: dict[int, _Transfer] = {}  # by the identity of the handle
        self._functional: dict[int, _Transfer] = {}  # by the identity of the result's storage
        self._free: dict[WorkQueue, list[_Freed]] = {}  # by the stream that allocated it
        self._waited: dict[WorkQueue, int] = {}  # How many of a communicator's operations were waited for
        self._unraised: RaceError | None = None
        self._is_closed = False

    # What the simulation tells it.

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, needs: bool) -> None:
        """Adds an operator that has run; `needs` is False where it only looks at sizes."""
        self.raise_found()
        name = operator.name()
        if name.startswith(("c10d::", _FUNCTIONAL)):
            self._transfer(name, args, result)
            self.raise_found()
            return
        inputs = [tensor for tensor in tensors_with_memory((*args, *kwargs.values())) if tensor.numel()]
        outputs = [tensor for tensor in tensors_with_memory(result) if tensor.untyped_storage().nbytes()]
        fresh = [tensor for tensor in outputs if id(tensor.untyped_storage()) not in self._memories]
        on_device = any(tensor.device.type != "cpu" for tensor in (*inputs, *outputs))
        lines = frames()
        for tensor in fresh:
            self._allocate(tensor.untyped_storage(), tensor.device.type == "cpu", name, lines)
        queue = self._order.stream() if on_device else self._order.thread
        if on_device and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            self._order.forward_streams.add(queue)
        if not needs or operator.is_view:
            return
        copies = name in COPIES
        staged = copies and self._is_asynchronous(name, args, kwargs)
        for tensor, writes in accesses(operator, args, kwargs):
            # A number in the host's memory is read when a kernel is launched, and memory that is not pinned when the
            # call of an asynchronous copy returns.
            by_host = tensor.device.type == "cpu" and (
                not copies or (staged and not writes and not self._is_pinned(tensor))
            )
            self._access(self._order.thread if by_host else queue, tensor, writes, name, lines)
        for tensor in fresh:
            if copies and tensor.device.type == "cpu" and on_device:
                self._access(queue, tensor, True, name, lines)
        if not name.startswith("aten::"):  # Their schemas don't say what they write.
            for tensor in outputs:
                if all(tensor is not other for other in fresh):
                    self._access(queue, tensor, True, name, lines)
        if copies and on_device:
            self._wait_for_copy(queue, name, args, kwargs, [*inputs, *outputs])
        self.raise_found()

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Adds a stream that memory is not to be given away before."""
        self._memory(tensor).recorded.add(self._order.stream(stream))

    def resized(self, storage: torch.UntypedStorage, bytes_before: int, is_on_host: bool) -> None:
        """Adds `UntypedStorage.resize_`: a release, or new memory."""
        memory = self._memories.get(id(storage))
        if memory is not None and bytes_before:
            self._release(memory, "resize_(0)" if not storage.nbytes() else "resize_", frames(), is_resize=True)
            memory.clear()
        if storage.nbytes():
            self._allocate(storage, is_on_host if memory is None else memory.is_on_host, "resize_", frames())
        self.raise_found()

    def wait(self, work: dist.Work) -> None:
        """Adds a wait for a collective's handle."""
        if (transfer := self._transfers.get(id(work))) is not None:
            self._wait(transfer)

    def is_completed(self, work: dist.Work) -> bool:
        """Whether the host has seen the end of a collective, which is as late as it can be; adds the wait if so."""
        if (transfer := self._transfers.get(id(work))) is None:
            return True
        return self._order.has_ended(work, transfer.clock)

    def future(self, work: dist.Work) -> torch.futures.Future[Any]:
        """The future of a collective's handle; who does not wait for it has not waited for the collective."""
        transfer = self._transfers.get(id(work))
        values = [] if transfer is None else [tensor for each in transfer.written if (tensor := each()) is not None]
        return WaitedFuture(self._order, {} if transfer is None else transfer.clock, values)

    def wait_functional(self, tensor: Tensor) -> None:
        """Adds a wait for the result of a functional collective."""
        if (transfer := self._functional.pop(id(tensor.untyped_storage()), None)) is not None:
            self._wait(transfer)

    def raise_found(self) -> None:
        """Raises what was found where nothing could be raised, as at the end of a tensor."""
        if self._unraised is not None and self._raises:
            error, self._unraised = self._unraised, None
            raise error

    def close(self) -> None:
        """Stops looking."""
        self._is_closed = True
        self._memories.clear()
        self._transfers.clear()

    # How it counts.

    def _memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(id(storage))
        if memory is None:
            memory = self._watch(storage, tensor.device.type == "cpu")
        return memory

    def _watch(self, storage: torch.UntypedStorage, is_on_host: bool) -> _Memory:
        memory = _Memory(self._order.thread if is_on_host else self._order.stream(), is_on_host)
        memory.watch = weakref.ref(storage, functools.partial(self._died, id(storage)))
        self._memories[id(storage)] = memory
        return memory

    def _allocate(self, storage: torch.UntypedStorage, is_on_host: bool, name: str, lines: Frames) -> None:
        memory = self._memories.get(id(storage)) or self._watch(storage, is_on_host)
        memory.owner = self._order.thread if is_on_host else self._order.stream()
        memory.made, memory.recorded = lines, set()
        self._reuse(memory.owner, name, lines)
        memory.add(memory.owner.access(0, storage.nbytes(), writes=True, operation=name, frames=lines))

    def _access(self, queue: WorkQueue, tensor: Tensor, writes: bool, name: str, lines: Frames) -> None:
        memory = self._memory(tensor)
        start, stop = _byte_range(tensor)
        access = queue.access(
            start, stop, writes=writes, operation=name, frames=lines, strides=_strides_with_gaps(tensor)
        )
        for other in memory.add(access):
            self._report(other, access, memory)

    def _wait_for_copy(
        self, stream: WorkQueue, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Iterable[Tensor]
    ) -> None:
        sources = list(tensors_with_memory(args[0] if name == "aten::_to_copy" else args[1]))
        targets = [tensor for tensor in tensors if all(tensor is not source for source in sources)]
        brings_to_host = [tensor for tensor in targets if tensor.device.type == "cpu"]
        if not any(tensor.device.type == "cpu" for tensor in tensors):
            return
        if not (self._is_asynchronous(name, args, kwargs) and all(map(self._is_pinned, brings_to_host))):
            self._order.thread.wait(stream.clock)

    @staticmethod
    def _is_asynchronous(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        position = 6 if name == "aten::_to_copy" else 2
        return bool(kwargs.get("non_blocking", args[position] if len(args) > position else False))

    def _transfer(self, name: str, args: Sequence[Any], result: Any) -> None:
        library, _, short = name.partition("::")
        functional = library == _FUNCTIONAL[:-2]
        tensors = list(tensors_with_memory(args))
        is_on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        caller = self._order.thread if is_on_host else self._order.stream()
        communicator = self._communicator(group_of_call(name, args), short, args, is_on_host)
        lines = frames()
        if functional and not name.endswith("_"):
            for tensor in tensors_with_memory(result):
                self._allocate(tensor.untyped_storage(), is_on_host, name, lines)
        if short == "barrier":  # NCCL's is an all-reduce, and its wait stops the host until the current stream is done.
            caller = self._order.stream()
        communicator.wait(caller.clock)
        if functional:
            self._transfer_functional(name, args, result, communicator, is_on_host, lines)
            return
        written, read = next(roles for start, roles in _WRITTEN_AND_READ.items() if short.startswith(start))
        for indices, writes in ((written, True), (read, False)):
            for tensor in tensors_with_memory([args[index] for index in indices]):
                if tensor.numel():
                    self._access(communicator, tensor, writes, name, lines)
        work = compat.work_of(result[-1] if isinstance(result, list | tuple) else result)
        outputs = tuple(weakref.ref(tensor) for tensor in tensors_in([args[index] for index in written]))
        transfer = _Transfer(communicator, communicator.now(), is_on_host, work, outputs)
        self._transfers[id(work)] = transfer
        self._order.restart_polls(work)
        if _python_caller().endswith(_WAIT_IN_CPP):
            self._wait(transfer)
        if len(self._transfers) > _MOST_TRANSFERS:
            self._forget_transfers()

    def _transfer_functional(
        self,
        name: str,
        args: Sequence[Any],
        result: Any,
        communicator: WorkQueue,
        is_on_host: bool,
        lines: Frames,
    ) -> None:
        in_place = name.endswith("_")
        for tensor in tensors_with_memory(args):
            self._access(communicator, tensor, in_place, name, lines)
        outputs = list(tensors_with_memory(result))
        for tensor in outputs:
            if not in_place:
                self._access(communicator, tensor, True, name, lines)
        for tensor in outputs:
            self._functional[id(tensor.untyped_storage())] = _Transfer(communicator, communicator.now(), is_on_host)

    def _communicator(self, group: dist.ProcessGroup, name: str, args: Sequence[Any], is_on_host: bool) -> WorkQueue:
        ranks = dist.get_process_group_ranks(group)
        where = "the host's communicator" if is_on_host else "the communicator"
        if name.startswith(("send", "recv")):  # Each pair of ranks has one of its own.
            pair = sorted((dist.get_rank(group), args[2]))
            return self._order.communicator((id(group), is_on_host, *pair), f"{where} of the pair {pair} of {ranks}")
        return self._order.communicator((id(group), is_on_host), f"{where} of ranks {ranks}")

    def _wait(self, transfer: _Transfer) -> None:
        communicator = transfer.communicator
        waiting = self._order.thread if transfer.is_on_host else self._order.stream()
        waiting.wait(transfer.clock)
        self._waited[communicator] = max(self._waited.get(communicator, 0), transfer.clock[communicator])

    def _forget_transfers(self) -> None:
        """Drops handles that nobody else has, who could wait for them once more."""
        for key, transfer in list(self._transfers.items()):
            if sys.getrefcount(transfer.work) <= 2:
                self._order.restart_polls(transfer.work)  # A later handle may have its identity.
                del self._transfers[key]

    def _died(self, key: int, _: object) -> None:
        memory = self._memories.pop(key, None)
        self._functional.pop(key, None)
        if memory is not None and not self._is_closed:
            self._release(memory, "the end of its last tensor", frames(), is_resize=False)

    def _release(self, memory: _Memory, how: str, lines: Frames, *, is_resize: bool) -> None:
        if memory.is_on_host:
            return
        for access in memory.unseen(memory.owner.clock, self._order.thread.clock):
            user = access.queue
            is_kept = user.kind == "communicator" and access.count > self._waited.get(user, 0) and not is_resize
            if user is not memory.owner and user not in memory.recorded and not is_kept:
                self._free.setdefault(memory.owner, []).append(_Freed(access, how, lines, self._origin(memory)))

    def _reuse(self, owner: WorkQueue, name: str, lines: Frames) -> None:
        """Gives memory that was released to what its stream allocates now."""
        for freed in self._free.pop(owner, ()):
            if not owner.has_seen(freed.last_use):
                self._report_reuse(owner, freed, name, lines)

    def _report(self, first: Access, second: Access, memory: _Memory) -> None:
        place, name = text_of(second.frames[:1]), second.queue.name
        if first.queue.kind == "communicator":
            wait = "wait for the collective's handle, work.wait(), in the stream that uses its result"
        elif second.queue.kind == "thread" and first.queue.kind == "thread":
            wait = "take the result of the thread's task, such as future.result()"
        elif second.queue.kind == "thread":
            wait = f"make the host wait: event.synchronize(), of an event that {first.queue.name} has recorded"
        elif second.queue.kind == "communicator":
            wait = f"make the stream that starts the collective wait: current_stream().wait_stream({first.queue.name})"
        elif first.queue.kind == "thread":
            wait = "let the thread that launches this take the result of the other thread's task first"
        else:
            wait = f"make {name} wait: wait_stream({first.queue.name}), or the join() of a scale_core stream"
        self._found(
            (first.operation, first.frames, second.operation, second.frames),
            Race(
                _text(first),
                _text(second),
                f"{min(first.stop, second.stop) - max(first.start, second.start)} bytes, {self._origin(memory)}",
                f"Before {place}, {wait}.",
            ),
        )

    def _report_reuse(self, owner: WorkQueue, freed: _Freed, name: str, lines: Frames) -> None:
        use, user = freed.last_use, freed.last_use.queue.name
        self._found(
            (use.operation, use.frames, freed.how, freed.frames),
            Race(
                _text(use),
                f"released by {freed.how}: {text_of(freed.frames)}; "
                f"{owner.name} may give it to {name}: {text_of(lines)}",
                f"{use.stop - use.start} bytes, {freed.origin}",
                f"Before the release, make {owner.name} wait for {user}, or call tensor.record_stream(stream) with the "
                "stream that uses it.",
            ),
        )

    def _origin(self, memory: _Memory) -> str:
        return f"allocated by {memory.owner.name} at {text_of(memory.made[:1])}"

    def _found(self, key: tuple[object, ...], race: Race) -> None:
        if key in self._known:
            return
        self._known.add(key)
        self.races.append(race)
        if self._unraised is None:
            self._unraised = RaceError(race)


def _text(access: Access) -> str:
    verb = "writes" if access.writes else "reads"
    return f"{access.operation} {verb} on {access.queue.name}: {text_of(access.frames)}"


def _python_caller() -> str:
    """The file of the line that has called into torch's C++: what C++ starts by itself, it also waits for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE) and frame.f_code.co_filename != ddp.__file__:
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


@functools.cache
def _written_arguments(operator: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Which arguments an operator writes, by position and by name."""
    written = [
        (index, argument.name)
        for index, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(index for index, _ in written), frozenset(name for _, name in written)


def accesses(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator is given, and whether it writes them."""
    indices, names = _written_arguments(operator)
    for index, argument in enumerate(args):
        for tensor in tensors_with_memory(argument):
            yield tensor, index in indices
    for name, argument in kwargs.items():
        for tensor in tensors_with_memory(argument):
            yield tensor, name in names


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * tensor.itemsize


def _strides_with_gaps(tensor: Tensor) -> Strides:
    """The sizes and strides of a view in bytes; empty for one without gaps."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    length, outer = tensor.itemsize, list[tuple[int, int]]()
    for stride, size in ((stride * tensor.itemsize, size) for stride, size in dims if stride and size > 1):
        if outer and stride == math.prod(outer[-1]):
            outer[-1] = (size * outer[-1][0], outer[-1][1])
        elif outer or stride > length:
            outer.append((size, stride))
        else:
            length += (size - 1) * stride
    return (*reversed(outer), (length, 1)) if outer else ()
