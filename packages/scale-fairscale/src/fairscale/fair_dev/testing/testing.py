"""`DummyProcessGroup` and what else programs take from FairScale's own tests."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scale_tp.megatron import model_parallel_cuda_manual_seed, model_parallel_is_initialized


class DummyProcessGroup:
    """Stands for a group where there is only one rank, and torch.distributed is not initialized.

    Args:
        rank: What `rank()` returns.
        size: What `size()` returns.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """The rank that was given."""
        return self._rank

    def size(self) -> int:
        """The size that was given."""
        return self._size


def dist_init(rank: int, world_size: int, filename: str, filename_rpc: str = "", backend: str | None = None) -> bool:
    """Initializes torch.distributed over a file; returns whether it was.

    Args:
        rank: Of this process.
        world_size: How many there are.
        filename: That all of them can reach, and that does not exist yet.
        filename_rpc: Without effect: nothing here needs RPC.
        backend: None is NCCL where there are as many devices as ranks, or else gloo.
    """
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=f"file://{filename}")
    return True


def set_random_seed(seed: int, model_parallel: bool = True) -> None:
    """Seeds Python's and torch's generators, and numpy's where that is imported.

    Args:
        seed: The seed.
        model_parallel: Whether to seed the generators of divided layers, too, where ranks divide some.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if model_parallel and model_parallel_is_initialized():
        model_parallel_cuda_manual_seed(seed)


def teardown() -> None:
    """Ends torch.distributed, if it is initialized."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def temp_files_ctx(num: int) -> Iterator[tuple[str, ...]]:
    """Yields the paths of so many empty files, and removes them."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(num)]
        for path in paths:
            path.touch()
        yield tuple(map(str, paths))


def objects_are_equal(a: Any, b: Any, raise_exception: bool = False, dict_key: str | None = None) -> bool:
    """Compares containers and tensors, values and dtypes.

    Args:
        a: One.
        b: The other.
        raise_exception: Raise an AssertionError in place of returning False.
        dict_key: Where they are, for the error.
    """
    if type(a) is not type(b):
        equal, subject = False, f"types {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, dict):
        if a.keys() == b.keys():
            return all(objects_are_equal(a[key], b[key], raise_exception, str(key)) for key in a)
        equal, subject = False, f"keys {sorted(map(str, a.keys() ^ b.keys()))}"
    elif isinstance(a, list | tuple | set):
        if len(a) == len(b):
            return all(objects_are_equal(one, other, raise_exception) for one, other in zip(a, b, strict=True))
        equal, subject = False, f"lengths {len(a)} and {len(b)}"
    elif isinstance(a, Tensor):
        try:
            torch.testing.assert_close(a, b)
            equal, subject = True, ""
        except AssertionError as error:
            equal, subject = False, str(error)
    else:
        equal, subject = bool(a == b), f"{a!r} and {b!r}"
    if not equal and raise_exception:
        raise AssertionError(f"differ{f' at {dict_key}' if dict_key else ''}: {subject}")
    return equal


def _skip_if(condition: bool, reason: str) -> Any:
    import pytest  # Only where tests run.

    return pytest.mark.skipif(condition, reason=reason)


def skip_if_no_cuda(test: Any) -> Any:
    """Marks a test that needs a CUDA device."""
    return _skip_if(not torch.cuda.is_available(), "CUDA required")(test)


def skip_if_single_gpu(test: Any) -> Any:
    """Marks a test that needs two CUDA devices."""
    return _skip_if(torch.cuda.device_count() < 2, "multiple GPUs required")(test)


__all__ = [
    "DummyProcessGroup",
    "dist_init",
    "objects_are_equal",
    "set_random_seed",
    "skip_if_no_cuda",
    "skip_if_single_gpu",
    "teardown",
    "temp_files_ctx",
]
