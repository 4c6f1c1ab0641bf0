"""Live memory: the bytes of all storages that operators have made and that still live, by a dispatch mode.

This is the count that plans, the tracker and the benchmarks mean by memory. It sees every storage that an operator
returns, on the CPU as on any other device, from the call that makes it to the end of its last reference, so it is
exact and the same on every machine. It doesn't see memory that a kernel takes and gives back inside one call, nor how
an allocator rounds and caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """While it is active, counts the live bytes of one device, from zero: earlier memory is not counted."""

    _elsewhere: ClassVar[int] = 0  # how many `not_counted()` are open

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.current_bytes = 0  # live now
        self.peak_bytes = 0  # the most that lived at any one time
        self._numbers: dict[int, int] = {}  # by the identity of the storage, which is stable as long as it lives
        self._sizes: list[int] = []  # by number; 0 where it is not counted or was released
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, *kwargs.values())):
            self.storage_number(tensor)  # An unknown argument was there before: its views are no new memory.
        self.on_operator(func)
        results = func(*args, **kwargs)
        for tensor in _tensors((results,)):
            self._observe(tensor)
        return results

    def on_operator(self, func: Any) -> None:
        """Called before each operator; for subclasses."""

    def on_change(self, number: int, delta: int) -> None:
        """Called after a storage was made, resized or released; for subclasses."""

    def storage_number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage in order of appearance; -1 for a tensor that has none."""
        storage = _storage(tensor)
        if storage is None:
            return -1
        number = self._numbers.get(id(storage))
        return self._enter(storage, 0) if number is None else number

    def num_bytes(self, number: int) -> int:
        """Returns the size of a storage that is counted and lives; 0 otherwise."""
        return self._sizes[number] if number >= 0 else 0

    def live(self) -> list[int]:
        """Returns the numbers of the storages that are counted and live."""
        return [number for number, size in enumerate(self._sizes) if size]

    def close(self) -> None:
        """Stops counting: later releases change nothing."""
        self._refs.clear()
        self._numbers.clear()

    def _observe(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        number = self._numbers.get(id(storage))
        counted = tensor.device == self.device and not LiveMemory._elsewhere
        if number is None:
            size = storage.nbytes() if counted else 0
            number = self._enter(storage, size)
            self._change(number, size)
        elif self._sizes[number] and storage.nbytes() != self._sizes[number]:  # It was resized.
            delta = storage.nbytes() - self._sizes[number]
            self._sizes[number] += delta
            self._change(number, delta)

    def _enter(self, storage: torch.UntypedStorage, size: int) -> int:
        number = len(self._sizes)
        self._sizes.append(size)
        self._numbers[id(storage)] = number
        self._refs[number] = weakref.ref(storage, partial(self._on_release, id(storage), number))
        return number

    def _on_release(self, key: int, number: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key], self._refs[number]
        size, self._sizes[number] = self._sizes[number], 0
        self._change(number, -size)

    def _change(self, number: int, delta: int) -> None:
        if delta:
            self.current_bytes += delta
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
            self.on_change(number, delta)


@contextmanager
def not_counted() -> Iterator[None]:
    """Storages that operators make inside are not counted: the host's memory, where the device is the CPU."""
    LiveMemory._elsewhere += 1
    try:
        yield
    finally:
        LiveMemory._elsewhere -= 1


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    sizes = {id(storage): storage.nbytes() for storage in map(_storage, tensors) if storage is not None}
    return sum(sizes.values())


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results: themselves, or in sequences."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like
        return None
