"""How long a simulated step takes: a clock for the host, for each stream and for the network.

The operators, collectives and waits come from the program. An operator begins when the host has launched it and its
stream is free; a collective begins when the stream that calls it has come so far and the collective before it has
ended; a wait moves the clock of the stream, or of the host, that waits. So the end of a step shows which communication
the computation waits for, and which it hides.

How long each takes is given by `Rates`. They describe a device only if they were measured on it.

    >>> import torch
    >>> from scale_check.simulate import simulate
    >>> with simulate(world_size=8, device="sim") as simulation:
    ...     weight = torch.ones(1000, 1000, device="sim")
    ...     with durations(simulation, Rates(network_bytes_per_second=1e9)) as clocks:
    ...         work = torch.distributed.all_reduce(weight, async_op=True)
    ...         begun = clocks.now
    ...         _ = work.wait()
    >>> round(1e3 * clocks.now, 2)  # 7 MB of each rank, in milliseconds
    7.03
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from scale_check.simulate.device_streams import StreamOrder
from scale_check.simulate.happens_before import WorkQueue
from scale_check.simulate.memory import tensors_with_memory
from scale_check.simulate.races import COPIES, accesses
from scale_check.simulate.simulation import Simulation
from scale_core import compat

_NO_KERNEL = ("aten::empty", "aten::detach", "aten::set_", "aten::is_", "aten::new_empty", "prim::")
_FUNCTIONAL = "_c10d_functional::"


@dataclass(frozen=True)
class Rates:
    """What a device and its network reach.

    Attributes:
        flops_per_second: Of products.
        memory_bytes_per_second: Of all other operators, for what they read and write.
        host_link_bytes_per_second: Of copies between host and device, in one direction.
        host_memory_bytes_per_second: Of operators on the host, such as an optimizer's there.
        network_bytes_per_second: Of a rank, for what a ring algorithm sends; 0 for collectives that take no time.
        launch_seconds: The host's, for each operator and collective.
        collective_seconds: Of a collective, in addition to its bytes.
        attention_flops_per_second: Of attention kernels, which compute half of the products if they are causal. None is
            the rate of products.
    """

    flops_per_second: float = 500e12
    memory_bytes_per_second: float = 2.5e12
    host_link_bytes_per_second: float = 50e9
    host_memory_bytes_per_second: float = 100e9
    network_bytes_per_second: float = 80e9
    launch_seconds: float = 6e-6
    collective_seconds: float = 20e-6
    attention_flops_per_second: float | None = None


class Clocks:
    """The time of the host, of each stream and of the network, in seconds.

    Args:
        rates: How long operators and collectives take.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._order = StreamOrder()  # Events and waits move its clocks, on which the time is one more entry.
        self._network = WorkQueue("the network", "communicator")

    @property
    def host(self) -> float:
        """When the host is free. It may be set, as to `now` where a step begins."""
        return _time(self._order.thread)

    @host.setter
    def host(self, seconds: float) -> None:
        _set_time(self._order.thread, seconds)

    @property
    def now(self) -> float:
        """When all that was launched has ended."""
        return max(map(_time, (self._order.thread, self._network, *self._order.streams())))

    @property
    def stream(self) -> float:
        """When the current stream is free for what the host launches now."""
        return _time(self._order.stream())

    def run(self, seconds: float) -> None:
        """Runs something of this duration on the current stream."""
        self.host += self.rates.launch_seconds
        stream = self._order.stream()
        _set_time(stream, _time(stream) + seconds)

    def send(self, num_bytes: int) -> float:
        """Runs a collective after the current stream; returns when it ends."""
        rates, bandwidth = self.rates, self.rates.network_bytes_per_second
        self.host += rates.launch_seconds
        start = max(_time(self._network), _time(self._order.stream()))
        _set_time(self._network, start + (rates.collective_seconds + num_bytes / bandwidth if bandwidth else 0.0))
        return _time(self._network)

    def wait(self, seconds: float) -> None:
        """The current stream does nothing before this time."""
        stream = self._order.stream()
        _set_time(stream, max(_time(stream), seconds))

    def synchronize(self) -> None:
        """The host waits for the current stream."""
        self.host = max(self.host, _time(self._order.stream()))


_TIME = WorkQueue("time")


def _time(queue: WorkQueue) -> float:
    return queue.clock.get(_TIME, 0)


def _set_time(queue: WorkQueue, seconds: float) -> None:
    clock: Any = queue.clock  # Of numbers of operations, otherwise.
    clock[_TIME] = seconds


@contextmanager
def durations(simulation: Simulation, rates: Rates | None = None) -> Iterator[Clocks]:
    """Inside, operators, collectives and waits of a simulation on `device="sim"` move the clocks that it yields.

    The simulation does not look for races meanwhile.
    """
    clocks = Clocks(rates or Rates())
    timed = _Timed(clocks, simulation)
    with clocks._order.activated(), compat.watching_waits(timed.wait), timed:
        yield clocks


class _Timed(TorchDispatchMode):
    """Moves the clocks with every operator."""

    def __init__(self, clocks: Clocks, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clocks, self._simulation = clocks, simulation
        self._ends: dict[int, tuple[float, object]] = {}  # By the identity of a handle, or of a result's storage.

    def wait(self, handle: dist.Work | object) -> None:
        """The current stream waits for a collective."""
        if (end := self._ends.pop(id(handle), None)) is not None:
            self._clocks.wait(end[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(compat.is_wrapper, types)):
            return NotImplemented  # Its operators on plain tensors come by afterwards.
        collectives = self._simulation.collectives
        num_collectives = len(collectives)
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if len(collectives) > num_collectives:
            self._run_collective(name, collectives[-1].bytes_sent, args, result)
        elif name == f"{_FUNCTIONAL}wait_tensor":
            self.wait(args[0].untyped_storage())
        elif _has_kernel(func):
            self._run_operator(func, args, kwargs or {}, result)
        return result

    def _run_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        clocks, rates = self._clocks, self._clocks.rates
        tensors = list(tensors_with_memory([args, list(kwargs.values()), result]))
        on_host = [tensor.device.type == "cpu" and tensor.dim() > 0 for tensor in tensors]
        count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if all(tensor.device.type == "cpu" for tensor in tensors):
            clocks.host += operator_bytes(func, args, kwargs, result) / rates.host_memory_bytes_per_second
        elif func.name() in COPIES and any(on_host):
            clocks.run(max(tensor.nbytes for tensor in tensors) / rates.host_link_bytes_per_second)
            self._wait_for_copy(func.name(), args, kwargs)
        elif count is not None:
            seconds = count(*args, **kwargs, out_val=result) / rates.flops_per_second
            if (is_causal := _is_causal(func, args, kwargs)) is not None:
                seconds *= rates.flops_per_second / (rates.attention_flops_per_second or rates.flops_per_second)
                seconds /= 2 if is_causal else 1
            clocks.run(seconds)
        else:
            clocks.run(operator_bytes(func, args, kwargs, result) / rates.memory_bytes_per_second)

    def _run_collective(self, name: str, num_bytes: int, args: Any, result: Any) -> None:
        end = self._clocks.send(num_bytes)
        if name.startswith(_FUNCTIONAL):
            for tensor in tensors_with_memory(result):
                storage = tensor.untyped_storage()
                self._ends[id(storage)] = (end, storage)
        else:
            work = compat.work_of(result[-1] if isinstance(result, list | tuple) else result)
            self._ends[id(work)] = (end, work)

    def _wait_for_copy(self, name: str, args: Any, kwargs: Any) -> None:
        """The host waits for a copy that blocks, for example to print a loss."""
        position = 6 if name == "aten::_to_copy" else 2
        if not kwargs.get("non_blocking", args[position] if len(args) > position else False):
            self._clocks.synchronize()


def operator_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The bytes that an operator reads and writes; 0 for a view or a collective."""
    if not _has_kernel(func):
        return 0
    if func.name() in ("aten::copy_", "aten::_foreach_copy_"):
        return sum(tensor.nbytes for tensor in tensors_with_memory(args[:2]))  # The target is written, and not read.
    read = tensors_with_memory([args, [value for name, value in kwargs.items() if name != "out"]])
    written = list(tensors_with_memory(result))  # What it returns, or what it has been given to write to.
    written = written or [tensor for tensor, is_written in accesses(func, args, kwargs) if is_written]
    return sum(tensor.nbytes for tensor in (*read, *written))


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Whether each position of an attention kernel sees the earlier ones only; None for other operators."""
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return None
    position = names.index("is_causal")
    return bool(kwargs.get("is_causal", args[position] if len(args) > position else False))


def _has_kernel(func: Any) -> bool:
    return not (func.is_view or func.name().startswith((*_NO_KERNEL, "c10d::", _FUNCTIONAL)))
