"""How much memory a rank holds, how much it would hold without sharding, and whether the machine has it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core.shard import full_shape
from scale_train.errors import InputError
from scale_train.model import GPT, num_parameters
from scale_train.options import Options, model_config

_LIMIT_OF_THE_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank had at one time.

    On CUDA what tensors took; on CPU the whole process, of which Python and torch themselves are some 300 MB.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes(params: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Parameters, gradients and optimizer state of this rank in a step; a released gradient counts too."""
    total = 0
    for param in params:
        total += _bytes(param) + _bytes(param if param.grad is None else param.grad)
        total += sum(_bytes(value) for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor))
    return total


def replicated_bytes(params: Iterable[Tensor], optimizer: Optimizer) -> int:
    """The same, if this rank held every parameter whole, as DDP does."""
    total = 0
    for param in params:
        numel = full_shape(param).numel()
        state = optimizer.state.get(param, {}).values()
        # What has the parameter's own shape grows with it; the rest (a step count) does not.
        alike = sum(value.element_size() for value in state if isinstance(value, Tensor) and value.shape == param.shape)
        rest = sum(_bytes(value) for value in state if isinstance(value, Tensor) and value.shape != param.shape)
        total += numel * (2 * param.element_size() + alike) + rest
    return total


def check_fits(options: Options, local_ranks: int) -> None:
    """Finds out whether the ranks of a machine can make the model: each makes it whole, in fp32, before it is sharded.

    Raises:
        InputError: The machine has not memory enough.
    """
    with torch.device("meta"):
        count = num_parameters(GPT(model_config(options)))
    needed, there = count * 4 * local_ranks, machine_bytes()
    if there is not None and needed > there:
        raise InputError(
            f"--size {options.model.size}: {count / 1e6:.0f} M parameters x 4 bytes x {local_ranks} local "
            f"rank{'s' if local_ranks > 1 else ''} are {in_words(needed)}, and this machine has {in_words(there)}; "
            f"take a smaller --size or fewer --ranks"
        )


def machine_bytes() -> int | None:
    """The machine's memory, or what its container may have of it; None where the system does not say."""
    found = []
    with suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ValueError, OSError):  # "max" is no number: no limit
        found.append(int(_LIMIT_OF_THE_CONTAINER.read_text()))
    return min(found, default=None)


def in_words(num_bytes: float) -> str:
    """Bytes in decimal units, two or three digits: 3.4 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
