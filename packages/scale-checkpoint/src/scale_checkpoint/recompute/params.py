"""The parameters and buffers that a forward has computed with, which its recomputation must find as they were.

A recomputation reads them from the module once more, in the backward pass. By then they may be others: those of
`torch.func.functional_call` are gone from the module, and are put back for it, as are those that were frozen meanwhile;
what was changed in place since is lost, and an error, as it is in the plain module for all that autograd has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from scale_checkpoint.recompute.buffers import Changed


class Used(NamedTuple):
    """A tensor of a module, as a forward has left it.

    Attributes:
        module: Which held it.
        place: Where it stood: the module's parameters or buffers.
        name: Its name there.
        tensor: Itself, of any shape and dtype.
        version: How often it had been changed in place; -1 where that does not matter.
        requires_grad: Whether a gradient was asked of it.
    """

    module: nn.Module
    place: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    version: int
    requires_grad: bool

    @property
    def is_buffer(self) -> bool:
        """Whether it was a buffer, and not a parameter."""
        return self.place is self.module._buffers


Row: TypeAlias = tuple[nn.Module, dict[str, Tensor | None], str, Tensor, int, bool]
"""The fields of `Used` in a plain tuple: each forward makes one for every tensor, and few are ever looked at."""


def used_by(parts: Iterable[nn.Module], changed: Iterable[Changed] = ()) -> list[Row]:
    """After a forward: returns all that it may have computed with.

    Args:
        parts: The module and all that it holds.
        changed: The buffers that the forward has changed, of which there are copies.
    """
    copied = {(change.module, change.name) for change in changed}
    used: list[Row] = []
    for part in parts:
        parameters: dict[str, Tensor | None] = part._parameters  # type: ignore[assignment]
        for name, tensor in parameters.items():
            if tensor is not None and not tensor.is_inference():
                used.append((part, parameters, name, tensor, tensor._version, tensor.requires_grad))
        for name, tensor in part._buffers.items():
            if tensor is not None:
                # Those of a norm change with each of its forwards, and a recomputation in training reads none of them.
                is_free = isinstance(part, _NormBase) or tensor.is_inference() or (part, name) in copied
                version = -1 if is_free else tensor._version
                used.append((part, part._buffers, name, tensor, version, tensor.requires_grad))
    return used


def replaced(used: Iterable[Row]) -> list[Used]:
    """Before a recomputation: returns what is not as it was, and can be put back.

    That is what a functional call had put into the module, and has taken out since, what was assigned anew, and what
    was frozen or thawed. A parameter that another one stands for, as a shard does for the whole, is left to whoever
    has put it there.

    Args:
        used: Of `used_by`.

    Raises:
        RuntimeError: A parameter or buffer was changed in place since the forward.
    """
    found = []
    for row in used:
        _, place, name, tensor, version, requires_grad = row
        now = place.get(name)
        is_there = now is tensor
        if is_there or _is_to_be_put_back(Used(*row), now):
            if version >= 0 and tensor._version != version:
                raise RuntimeError(_changed(Used(*row)))
            if not is_there or tensor.requires_grad is not requires_grad:
                found.append(Used(*row))
    return found


def ask_for_gradients(used: Iterable[Row]) -> Iterator[bool]:
    """Yields of each tensor whether a gradient is asked of it.

    Args:
        used: Of `used_by`.
    """
    return (row[-1] for row in used)


def _changed(use: Used) -> str:
    kind, mend = "parameter", "call loss.backward() before optimizer.step(), and change parameters after it"
    if use.is_buffer:
        kind, mend = "buffer", f"change it after loss.backward(), or assign a new tensor, module.{use.name} = ..."
    return (
        f"the {kind} '{use.name}' {list(use.tensor.shape)} of a {use.module._get_name()} was changed in place "
        f"between the forward and the backward of a checkpointed module, which is computed again with it: {mend}"
    )


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
    """Inside, the modules hold these tensors, and gradients are asked of them as they were; afterwards as before.

    Args:
        used: Of `replaced`.
    """
    held = [(use, use.place.get(use.name), use.tensor.requires_grad) for use in used]
    try:
        for use in used:
            use.place[use.name] = use.tensor
            if use.tensor.requires_grad is not use.requires_grad:
                use.tensor.requires_grad = use.requires_grad
        yield
    finally:
        for use, tensor, requires_grad in held:
            use.place[use.name] = tensor
            if use.tensor.requires_grad is not requires_grad:
                use.tensor.requires_grad = requires_grad
