"""Memory of a rank: held, without sharding, and of the machine."""

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

from scale_core.shard import full_shape, on_local_tensors
from scale_train.configuration.derived import model_shape
from scale_train.configuration.resolve import model_config, pipeline_shape
from scale_train.errors import InputError
from scale_train.huggingface.model import TransformersSource
from scale_train.model.gpt import GPT, num_parameters
from scale_train.options import Options

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@on_local_tensors
def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank had at one time.

    On CUDA the memory of tensors; on CPU the memory of the process, of which Python and torch take some 300 MB.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@on_local_tensors
def held_bytes(params: Iterable[Tensor], with_gradients: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state of this rank in a step; released gradients count too.

    `with_gradients` are the parameters that have gradients when the optimizer steps.
    """
    total = sum(map(_bytes, params)) + sum(_bytes(p if p.grad is None else p.grad) for p in with_gradients)
    return total + sum(map(_bytes, state_tensors(optimizer)))


@on_local_tensors
def replicated_bytes(params: Iterable[Tensor], optimizer: Optimizer) -> int:
    """The same, if this rank held every full parameter, as DDP does.

    The optimizer keeps the same for each parameter, so the state of one parameter tells the size of the others.
    """
    inner: Any = optimizer  # The one on this rank's shards, where shapes of parameters and states are equal.
    while (wrapped := getattr(inner, "optimizer", None) or getattr(inner, "optim", None)) is not None:
        inner = wrapped
    states = ((param, state) for param, state in inner.state.items() if param.numel() and state)
    param, state = next(states, (torch.empty(0), {}))
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # State of the parameter's own shape grows with it; the rest (a step count) does not.
    bytes_per_element = sum(value.element_size() for value in tensors if value.shape == param.shape)
    other_bytes = sum(_bytes(value) for value in tensors if value.shape != param.shape)
    return sum(
        full_shape(param).numel() * (2 * param.element_size() + bytes_per_element) + other_bytes for param in params
    )


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields every tensor of this rank's optimizer state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@on_local_tensors
def check_fits(options: Options, local_ranks: int, world_size: int | None = None) -> None:
    """Raises InputError where the machine lacks memory for its ranks' models in fp32, full or sharded.

    `world_size` is None where all ranks are on this machine.
    """
    count = count_parameters(options)
    parts = num_ranks = max(world_size or 0, local_ranks)
    sharded = options.parallel.parallel in ("fsdp", "pipe") and options.parallel.tensor_parallel == 1
    if options.parallel.parallel == "pipe":
        parts = pipeline_shape(options.parallel, num_ranks).ranks
    if not sharded or options.parallel.parallel == "pipe":  # Experts that ranks divide are on each of these in part.
        divided = _expert_parameters(options)
        count -= divided - divided // (options.parallel.expert_parallel * options.parallel.tensor_parallel)
    needed = count * 4 * local_ranks // (parts if sharded else 1)
    available = machine_bytes()
    if available is not None and needed > available:
        raise InputError(
            f"{model_flag(options)}: {count / 1e6:.0f} M parameters x 4 bytes"
            f"{' divided among the ranks' if sharded else ''} x {local_ranks} local "
            f"rank{'s' if local_ranks > 1 else ''} are {format_bytes(needed)}, and this machine has "
            f"{format_bytes(available)}; take a smaller --size{'' if sharded else ', fewer --ranks or --parallel fsdp'}"
        )
    _check_batch_fits(options, local_ranks, num_ranks, available)


@on_local_tensors
def _check_batch_fits(options: Options, local_ranks: int, num_ranks: int, available: int | None) -> None:
    """Refuses a batch if one tensor of activations, the input of the first block, would fill the machine."""
    data = options.data
    tokens = data.batch * data.sequence * local_ranks // (num_ranks * options.parallel.accumulate)
    needed = 4 * tokens * model_shape(options).width
    if available is not None and needed > available:
        raise InputError(
            f"--batch {data.batch} x --sequence {data.sequence}: the input of one block of all local ranks is "
            f"{format_bytes(needed)}, and this machine has {format_bytes(available)}; take fewer tokens, or a larger "
            "--accumulate"
        )


@on_local_tensors
def model_flag(options: Options) -> str:
    """Returns the option that names the model, for messages."""
    return f"--model {options.model.model}" if options.model.model else f"--size {options.model.size}"


@on_local_tensors
def count_parameters(options: Options) -> int:
    """Returns how many parameters the model has."""
    if options.model.model is not None:
        return num_parameters(TransformersSource(options.model.model, 0).build_on_meta())
    with torch.device("meta"):
        return num_parameters(GPT(model_config(options)))


@on_local_tensors
def count_active_parameters(options: Options) -> int:
    """Returns how many parameters a token passes: of experts, those that it goes to."""
    model = options.model
    unused = max(0, model.experts - model.top_k)
    return count_parameters(options) - _expert_parameters(options) * unused // max(1, model.experts)


@on_local_tensors
def _expert_parameters(options: Options) -> int:
    return 0 if options.model.model is not None else model_config(options).expert_parameters


@on_local_tensors
def machine_bytes() -> int | None:
    """The machine's memory, or the limit of its container; None where the system does not give it."""
    limits = []
    with suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ValueError, OSError):  # "max" is no number: no limit
        limits.append(int(_CGROUP_LIMIT.read_text()))
    return min(limits, default=None)


@on_local_tensors
def format_bytes(num_bytes: float) -> str:
    """Returns bytes in decimal units, two or three digits: 3.4 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


@on_local_tensors
def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
