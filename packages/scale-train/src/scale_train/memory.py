"""How much memory a rank holds, how much it would hold without sharding, and whether the machine has it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core.shard import full_shape
from scale_train.config.options import Options
from scale_train.config.resolve import model_config, pipeline_shape
from scale_train.errors import InputError
from scale_train.model import GPT, num_parameters

_LIMIT_OF_THE_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank had at one time.

    On CUDA what tensors took; on CPU the whole process, of which Python and torch themselves are some 300 MB.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes(params: Iterable[Tensor], with_gradients: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Parameters, gradients and optimizer state of this rank in a step; a released gradient counts too.

    Args:
        params: The parameters, or this rank's shards of them.
        with_gradients: What has the averaged gradients in a step: these, or the parts that an optimizer works on.
        optimizer: Whose state it is.
    """
    total = sum(map(_bytes, params)) + sum(_bytes(p if p.grad is None else p.grad) for p in with_gradients)
    return total + sum(map(_bytes, state_tensors(optimizer)))


def replicated_bytes(params: Iterable[Tensor], optimizer: Optimizer) -> int:
    """The same, if this rank held every parameter whole, as DDP does.

    The optimizer keeps the same of each parameter. So its state of one of them says what it needs of those too that
    other ranks update.
    """
    inner: Any = optimizer  # What steps on this rank's parts, so that shapes of parameters and states are alike.
    while (held := getattr(inner, "optimizer", None) or getattr(inner, "optim", None)) is not None:
        inner = held
    known = ((param, state) for param, state in inner.state.items() if param.numel() and state)
    param, state = next(known, (torch.empty(0), {}))
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # What has the parameter's own shape grows with it; the rest (a step count) does not.
    alike = sum(value.element_size() for value in tensors if value.shape == param.shape)
    rest = sum(_bytes(value) for value in tensors if value.shape != param.shape)
    return sum(full_shape(each).numel() * (2 * each.element_size() + alike) + rest for each in params)


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields every tensor of this rank's optimizer state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def check_fits(options: Options, local_ranks: int, world_size: int | None = None) -> None:
    """Finds out whether the ranks of a machine can make the model: each holds all of it in fp32, or its part.

    Args:
        options: What was asked for.
        local_ranks: On this machine.
        world_size: On all machines; None is this one alone.

    Raises:
        InputError: The machine has not memory enough.
    """
    with torch.device("meta"):
        count = num_parameters(GPT(model_config(options)))
    parts = num_ranks = max(world_size or 0, local_ranks)
    sharded = options.parallel.parallel in ("fsdp", "pipe") and options.parallel.tensor_parallel == 1
    if options.parallel.parallel == "pipe":
        parts = pipeline_shape(options.parallel, num_ranks).ranks
    needed = count * 4 * local_ranks // (parts if sharded else 1)
    there = machine_bytes()
    if there is not None and needed > there:
        raise InputError(
            f"--size {options.model.size}: {count / 1e6:.0f} M parameters x 4 bytes"
            f"{' divided among the ranks' if sharded else ''} x {local_ranks} local "
            f"rank{'s' if local_ranks > 1 else ''} are {in_words(needed)}, and this machine has {in_words(there)}; "
            f"take a smaller --size{'' if sharded else ', fewer --ranks or --parallel fsdp'}"
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
