"""The parameters that a forward has computed with, which its recomputation must find as they were.

A recomputation reads them from the module once more, in the backward pass. By then they may be others: those of
`torch.func.functional_call` are gone from the module, and are put back for it; what was changed in place since is lost,
and an error, as it is in the plain module for all that autograd has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Used(NamedTuple):
    """A tensor of a module, as a forward has left it.

    Attributes:
        module: Which held it.
        name: Its name there.
        is_buffer: Whether it was a buffer.
        tensor: Itself.
        version: How often it had been changed in place.
    """

    module: nn.Module
    name: str
    is_buffer: bool
    tensor: Tensor
    version: int

    @property
    def place(self) -> dict[str, Tensor | None]:
        """Where it stood."""
        place: dict[str, Tensor | None] = self.module._buffers if self.is_buffer else self.module._parameters  # type: ignore[assignment]
        return place


def used_by(parts: Iterable[nn.Module]) -> list[Used]:
    """After a forward: returns all that it may have computed with.

    Args:
        parts: The module and all that it holds.
    """
    used = []
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_inference():
                used.append(Used(part, name, False, parameter, parameter._version))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                used.append(Used(part, name, True, buffer, -1))
    return used


def replaced(used: Iterable[Used]) -> list[Used]:
    """Before a recomputation: returns what a functional call had put into the module, and has taken out since.

    A parameter that another one stands for, as a shard does for the whole, is left to whoever has put it there.

    Raises:
        RuntimeError: A parameter was changed in place since the forward.
    """
    found = []
    for use in used:
        now = use.place.get(use.name)
        is_replaced = now is not use.tensor and _is_to_be_put_back(use, now)
        if (now is use.tensor or is_replaced) and not use.is_buffer and use.tensor._version != use.version:
            raise RuntimeError(
                f"the parameter '{use.name}' {list(use.tensor.shape)} of a {type(use.module).__name__} was changed in "
                "place between the forward and the backward of a checkpointed module, which is computed again with "
                "it: call loss.backward() before optimizer.step(), and change parameters after it"
            )
        if is_replaced:
            found.append(use)
    return found


def _is_to_be_put_back(use: Used, now: Tensor | None) -> bool:
    """Whether a forward's tensor, which the module does not hold any more, is still what it was.

    Engines that gather parameters swap them, too, and see to the recomputation themselves: what they let go of has
    another shape than what stands there now, or no memory.
    """
    then = use.tensor
    if use.is_buffer:
        return type(then) is Tensor
    if not isinstance(now, nn.Parameter):
        return False
    if type(then) is Tensor:
        return True
    alike = (now.shape, now.dtype, now.device) == (then.shape, then.dtype, then.device)
    return alike and (type(then) is not nn.Parameter or _has_memory(then))


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's storage was not given back, as that of a gathered buffer is."""
    return tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


@contextmanager
def put_back(used: Sequence[Used]) -> Iterator[None]:
    """Inside, the modules hold these tensors; afterwards what they held.

    Args:
        used: Of `replaced`.
    """
    held = [use.place.get(use.name) for use in used]
    try:
        for use in used:
            use.place[use.name] = use.tensor
        yield
    finally:
        for use, tensor in zip(used, held, strict=True):
            use.place[use.name] = tensor
