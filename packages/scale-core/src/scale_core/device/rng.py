"""Random number generators: which of them a computation has drawn from, and their states set back to draw again.

Every generator of the process is looked at, that of each device, whatever devices a module's tensors are on; inside of
`only_device` those that belong to other threads are left out. Only those that were drawn from are kept, so a module
without dropout keeps nothing and replays nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class GeneratorState(NamedTuple):
    """The state of a generator before a computation."""

    generator: torch.Generator
    state: Tensor  # uint8, on the host


class _Limit(threading.local):
    device: torch.device | None = None  # in addition to the host; None is all


_limit = _Limit()


@contextmanager
def only_device(device: torch.device) -> Iterator[None]:
    """Inside, in this thread, the generators are those of the host and of one device: others have theirs in use."""
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


def _generators() -> list[torch.Generator]:
    """Those of the host and of each initialized accelerator; the others have not drawn yet."""
    found = [torch.default_generator]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            found += getattr(accelerator, "default_generators", ())
    only = _limit.device
    if only is None:
        return found
    devices = {only, torch.device("cpu")}
    return [one for one in found if one.device in devices or torch.device(one.device.type) in devices]


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
