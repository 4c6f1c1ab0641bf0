"""What a piece of work costs one process, from figures that the kernel keeps and that noise does not touch much.

CPU time is that of all threads of the process, the transport's own threads included. Bytes sent are what the process
has written to its sockets, counted by the kernel. Peaks are the kernel's high-water mark of the resident size, which
can be set back, so that a peak belongs to the steps between two calls. Counts of copies and collectives come from a
dispatch mode in a step of its own, since the mode slows a step down.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MB = 1e6

# Operations that copy full tensors, and those of them whose first argument is the list of the tensors that are filled.
_COPIES = {
    "_chunk_cat",
    "_copy_from",
    "_to_copy",
    "all_gather_copy_in",
    "cat",
    "chunk_cat",
    "clone",
    "copy_",
    "split_with_sizes_copy",
    "stack",
}
_LISTED_COPIES = {"_foreach_copy_"}
_RECEIPTS = {"recv_", "recv_any_source_"}


@dataclass
class Spent:
    """What one process spent; filled when the block that it measures has ended.

    Attributes:
        cpu_seconds: Of all threads of this process.
        wall_seconds: From beginning to end.
        bytes_sent: Written to sockets (and files, of which there are none inside a step).
        page_faults: Pages that the kernel had to give to the process, zeroed, before it could use them.
    """

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    bytes_sent: int = 0
    page_faults: int = 0


@contextmanager
def spending() -> Iterator[Spent]:
    """Measures what this process spends inside."""
    spent = Spent()
    sent, faults = bytes_written(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, cpu = time.perf_counter(), time.process_time()
    yield spent
    spent.cpu_seconds = time.process_time() - cpu
    spent.wall_seconds = time.perf_counter() - wall
    spent.bytes_sent = bytes_written() - sent
    spent.page_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def bytes_written() -> int:
    """Returns what this process has written so far, to sockets and files, in bytes."""
    return _field("/proc/self/io", "wchar")


def resident_bytes() -> int:
    """Returns the resident size of this process, in bytes."""
    return _field("/proc/self/status", "VmRSS") * 1024


def reset_peak() -> None:
    """Sets the high-water mark of the resident size back to the present size (Linux: man 5 proc, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the largest resident size since `reset_peak`, in bytes."""
    return _field("/proc/self/status", "VmHWM") * 1024


def _field(path: str, name: str) -> int:
    with open(path) as file:
        for line in file:
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0])
    raise RuntimeError(f"{path} has no line '{name}'")


class OperationCount(TorchDispatchMode):
    """Counts copies and collectives while it is active.

    Attributes:
        copies: Operations that copy tensors; one that fills a list of n tensors counts n times.
        copied_bytes: The size of what they have filled.
        collectives: Of the process group, a point-to-point message that is sent counting as one.
        operations: Every operation by name, views included.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = 0
        self.copied_bytes = 0
        self.collectives: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Counts `func` and runs it."""
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        self.operations[f"{space}::{name}"] += 1
        if space in ("c10d", "_c10d_functional"):
            if name not in _RECEIPTS and name not in ("wait_tensor", "barrier"):
                self.collectives[name] += 1
        elif name in _LISTED_COPIES:
            self.copies += len(args[0])
            self.copied_bytes += sum(tensor.numel() * tensor.itemsize for tensor in args[0])
        elif name in _COPIES:
            self.copies += 1
            filled = args[0] if name == "copy_" else result if isinstance(result, Tensor) else (kwargs or {}).get("out")
            tensors = [filled] if isinstance(filled, Tensor) else list(filled or ())
            self.copied_bytes += sum(t.numel() * t.itemsize for t in tensors if isinstance(t, Tensor))
        return result


def memcpy_seconds(num_bytes: int, repeats: int = 20) -> float:
    """Returns the CPU time of one copy of a buffer of that size into another one, both touched before."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    with spending() as spent:
        for _ in range(repeats):
            target.copy_(source)
    return spent.cpu_seconds / repeats


def has_fairscale() -> bool:
    """Whether the module `fairscale` is FairScale's: the one of scale-fairscale has our layers."""
    ours = any(True for _ in metadata.distributions(name="scale-fairscale"))
    return find_spec("fairscale") is not None and not ours
