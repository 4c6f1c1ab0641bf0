"""The random numbers that a module has drawn, drawn again when it is recomputed, and by nobody else a second time.

Every generator of the process is looked at, that of each device, whatever devices the module's tensors are on. Only
those that the forward has drawn from are kept: a module without dropout keeps nothing and replays nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Drawn(NamedTuple):
    """A generator that a forward has drawn from.

    Attributes:
        generator: That of a device.
        state: uint8, on the host: where it stood before.
    """

    generator: torch.Generator
    state: Tensor


def states() -> list[Drawn]:
    """Returns where each generator of the process stands."""
    return [Drawn(generator, generator.get_state()) for generator in _generators()]


def drawn_since(before: Iterable[Drawn]) -> list[Drawn]:
    """Returns those of `before` whose generator stands elsewhere by now.

    Raises:
        RuntimeError: An accelerator was initialised since, so that nobody knows where its generators stood.
    """
    known = list(before)
    if len(_generators()) != len(known):
        raise RuntimeError(
            "an accelerator was initialised in the first forward of a checkpointed module, so its random numbers could "
            "not be drawn again: call torch.cuda.init() before the model runs"
        )
    return [drawn for drawn in known if not _same(drawn.state, drawn.generator.get_state())]


@contextmanager
def replaying(drawn: Iterable[Drawn]) -> Iterator[None]:
    """Inside, these generators start from where they stood; afterwards they are where they were."""
    now = [Drawn(generator, generator.get_state()) for generator, _ in drawn]
    try:
        for generator, state in drawn:
            generator.set_state(state)
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)


def _generators() -> list[torch.Generator]:
    """Those of the host and of each device of an accelerator that was used before; the others have not drawn yet."""
    found = [torch.default_generator]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            found += getattr(accelerator, "default_generators", ())
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    # By their bytes: whatever watches torch's operators is not to see this, and on fake tensors it could not be asked.
    num_bytes = one.numel()
    return other.numel() == num_bytes and _compare(one.data_ptr(), other.data_ptr(), num_bytes) == 0


def _comparing() -> Callable[[int, int, int], int]:
    """Returns C's `memcmp`: every forward compares a generator's 5 KB, and copies of them would cost the most of it."""
    compare = ctypes.PyDLL("msvcrt" if os.name == "nt" else None).memcmp
    compare.argtypes, compare.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    return compare


_compare = _comparing()
