"""Random number generators: which of them a computation has drawn from, and their states set back to draw again.

Every generator of the process is looked at, on every device, whatever devices a module's tensors are on; inside of
`only_device` those that belong to other threads are left out. Only those that were drawn from are kept, so a module
without dropout keeps nothing and replays nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from scale_core import compat


class Generator(Protocol):
    """A generator of random numbers, as `torch.Generator` is one."""

    @property
    def device(self) -> torch.device: ...

    def get_state(self) -> Tensor: ...

    def set_state(self, state: Tensor) -> object: ...


class GeneratorState(NamedTuple):
    """The state of a generator before a computation."""

    generator: Generator
    state: Tensor  # uint8, on the host


class _Limit(threading.local):
    device: torch.device | None = None  # in addition to the host; None is all


_limit = _Limit()


@contextmanager
def only_device(device: torch.device) -> Iterator[None]:
    """Inside, this thread uses the generators of the host and of one device: other threads have the others in use."""
    before, _limit.device = _limit.device, device
    try:
        yield
    finally:
        _limit.device = before


def generator_states() -> list[GeneratorState]:
    """Returns the state of each generator of the process, or of those inside of `only_device`."""
    return [GeneratorState(generator, generator.get_state()) for generator in _generators()]


def drawn_since(before: Iterable[GeneratorState]) -> list[GeneratorState]:
    """Returns the states of `before` whose generators have drawn since.

    Raises:
        RuntimeError: An accelerator was initialized since, whose generators' states before are not known.
    """
    known = list(before)
    if not {generator.device.type for generator in _generators()} <= {drawn.generator.device.type for drawn in known}:
        raise RuntimeError(
            "an accelerator was initialized in the first forward of a checkpointed module, so its random numbers "
            "cannot be drawn again: call torch.cuda.init() before the model runs"
        )
    return [drawn for drawn in known if not _same(drawn.state, drawn.generator.get_state())]


def set_states(states: Iterable[GeneratorState]) -> None:
    """Sets generators back to these states."""
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def replayed(states: Iterable[GeneratorState]) -> Iterator[None]:
    """Inside, generators start from these states; afterwards they are as before."""
    states = list(states)
    present = [GeneratorState(generator, generator.get_state()) for generator, _ in states]
    try:
        set_states(states)
        yield
    finally:
        set_states(present)


def get_device_state(device: torch.device) -> Tensor:
    """Returns the state of the generator of an accelerator, uint8 on the host. Raises RuntimeError if it has none."""
    return cast(Tensor, _device_functions(device.type)[0](device))


def set_device_state(device: torch.device, state: Tensor) -> None:
    """Sets the generator of an accelerator to a state of `get_device_state`."""
    _device_functions(device.type)[1](state, device)


class _DeviceGenerator:
    """The generator of a device whose module in torch lists no generators, by the functions for its state."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def get_state(self) -> Tensor:
        return get_device_state(self.device)

    def set_state(self, state: Tensor) -> None:
        set_device_state(self.device, state)


def _device_functions(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    module = torch.get_device_module(kind)
    functions = getattr(module, "get_rng_state", None), getattr(module, "set_rng_state", None)
    if functions[0] is None or functions[1] is None:
        raise RuntimeError(
            f"the random numbers of '{kind}' can't be drawn again: torch.{kind} has no get_rng_state and "
            "set_rng_state. Dropout would differ between a forward and its recomputation: checkpoint with "
            "preserve_rng_state=False, or compute on a device whose random state torch knows, such as cuda"
        )
    return functions[0], functions[1]


def _generators() -> list[Generator]:
    """The generators of the host and of each initialized accelerator; the others have not drawn yet."""
    found: list[Generator] = [torch.default_generator]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            found += getattr(accelerator, "default_generators", ())
    other = torch.accelerator.current_accelerator()
    if other is not None and other.type not in ("cuda", "xpu", compat.STAND_IN):
        found += _generators_of(other.type)
    only = _limit.device
    if only is None:
        return found
    devices = {only, torch.device("cpu")}
    return [one for one in found if one.device in devices or torch.device(one.device.type) in devices]


def _generators_of(kind: str) -> list[Generator]:
    """The generators of another type of accelerator, if it is initialized."""
    module = torch.get_device_module(kind)
    if kind == "mps":  # It has one device, and its functions take none.
        return [cast(Any, module)._get_default_mps_generator()]
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    if hasattr(module, "default_generators"):
        return list(module.default_generators)
    _device_functions(kind)
    return [_DeviceGenerator(torch.device(kind, index)) for index in range(module.device_count())]


def _same(one: Tensor, other: Tensor) -> bool:
    # By their bytes: dispatch modes are not to see this, and fake tensors could not answer.
    num_bytes = one.numel()
    return other.numel() == num_bytes and _memcmp(one.data_ptr(), other.data_ptr(), num_bytes) == 0


def _load_memcmp() -> Callable[[int, int, int], int]:
    # Every checkpointed forward compares a generator's 5 KB; copies of them would cost the most of it.
    compare = ctypes.PyDLL("msvcrt" if os.name == "nt" else None).memcmp
    compare.argtypes, compare.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    return compare


_memcmp = _load_memcmp()
