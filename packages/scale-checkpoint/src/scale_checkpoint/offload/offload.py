"""Offload of saved tensors: which of them leave the device until the backward, and which stay.

A parameter's or a buffer's own memory stays, and so do small tensors, and those that are no plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from scale_checkpoint.offload.storage import Target, backend_for, copy_streams
from scale_checkpoint.offload.store import PackedTensor, store_for
from scale_checkpoint.state import InternalOps
from scale_core.arguments import checked_arguments
from scale_core.compat import is_fake

MIN_BYTES = 1 << 16
"""Storages below this stay: a copy of its own would cost more than it saves."""

_MOST_OVER_OWN = 4  # times its own bytes may a tensor's storage have: a third of a joint projection moves with the rest
_PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer))


class offload_activations(saved_tensors_hooks):  # noqa: N801  # a context manager, as torch names them
    """Inside, tensors that autograd saves go to the host or to a file, and comes back in the backward pass.

        >>> import torch
        >>> from scale_checkpoint import offload_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
        >>> with offload_activations(model):
        ...     loss = model(torch.randn(512, 64)).mean()
        >>> loss.backward()

    Args:
        *modules: Those that run inside: their parameters and buffers stay on the device.
        to: "host", pinned if that lets copies overlap with the computation, or the path of a folder.
        min_bytes: Smaller storages stay.

    Raises:
        ValueError: `to` is not one of these values, or `min_bytes` is negative.
        NotADirectoryError: The folder does not exist.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """

    @checked_arguments
    def __init__(self, *modules: nn.Module, to: Target = "host", min_bytes: int = MIN_BYTES) -> None:
        check_target(to, min_bytes)
        self._operator = _OperatorTensors(Sender(modules, to, min_bytes))
        super().__init__(self._operator.pack, _OffloadableTensor.unpack)

    def __exit__(self, *error: object) -> None:
        """Removes the hooks, and sends the tensors that the last operator has saved, unless an exception is raised."""
        super().__exit__(*error)
        if not any(error):
            self._operator.send()


class _OperatorTensors:
    """The tensors that one operator has saved: sent when it has run, because some operators write into them.

    `rrelu` does: it saves its noise, and then draws it.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._operator = -1
        self._waiting: list[_OffloadableTensor] = []

    def pack(self, tensor: Tensor) -> _OffloadableTensor:
        operator = torch._C._autograd._get_sequence_nr()  # Each has a node of its own.
        if operator != self._operator:
            self._operator = operator
            self.send()
        packed = _OffloadableTensor(tensor)
        if self._sender.can_send(tensor):
            self._waiting.append(packed)
        return packed

    def send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for packed in waiting:
            packed.send(self._sender)


def offload_inputs(module: nn.Module, to: Target, min_bytes: int) -> saved_tensors_hooks:
    """Returns hooks for a recomputed module: its inputs, which autograd saves for it, are sent at once."""
    sender = Sender([module], to, min_bytes)

    def pack(tensor: Tensor) -> _OffloadableTensor:
        packed = _OffloadableTensor(tensor)
        packed.send(sender)
        return packed

    return saved_tensors_hooks(pack, _OffloadableTensor.unpack)


class _OffloadableTensor:
    """The object that autograd holds in the place of a tensor, on the device or offloaded.

    Autograd itself sees a saved tensor that was changed in place, and raises; but not where hooks pack it. So this
    compares versions.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        if tensor.requires_grad:  # It would hold the node that saves it.
            with InternalOps():
                tensor = tensor.detach()
        self._held: Tensor | PackedTensor = tensor

    def send(self, sender: Sender) -> None:
        """Sends it, unless it was changed in place meanwhile, which is an error if autograd comes back to it."""
        if isinstance(self._held, Tensor) and self._held._version == self._version:
            self._held = sender.send(self._held) or self._held

    def unpack(self) -> Tensor:
        if isinstance(self._held, PackedTensor):
            return self._held.unpack()
        if self._held._version != self._version:
            raise RuntimeError(
                f"a tensor {list(self._held.shape)} that autograd has saved for an offloaded module was modified by an "
                "inplace operation before its backward. It was on the device, because it is small, a parameter, or was "
                "changed at once: change it after loss.backward(), or change a copy"
            )
        return self._held


def check_target(to: Target, min_bytes: int) -> None:
    """Raises ValueError or NotADirectoryError where a target or a size is none."""
    backend_for(to)
    if min_bytes < 0:
        raise ValueError(f"min_bytes: expected 0 or more, got {min_bytes}")


class Sender:
    """Sends tensors to the host or a folder, but for parameters and buffers of `modules` and small tensors."""

    def __init__(self, modules: Sequence[nn.Module], to: Target, min_bytes: int) -> None:
        self._modules, self._store, self._min_bytes = modules, store_for(to), min_bytes
        self._own_storages: set[int] = set()
        self._knows_all = False

    def can_send(self, tensor: Tensor) -> bool:
        """Whether it is a plain tensor with memory of its own, and enough of it."""
        is_plain = type(tensor) in _PLAIN or is_fake(tensor)
        if not is_plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
            return False
        # A piece of something large that stays anyhow: its storage would be copied for the sake of the piece.
        num_bytes = tensor.untyped_storage().nbytes()
        return self._min_bytes <= num_bytes <= _MOST_OVER_OWN * tensor.numel() * tensor.itemsize

    def send(self, tensor: Tensor) -> PackedTensor | None:
        """Starts to move a tensor away; returns None where it stays."""
        if not self.can_send(tensor) or self._is_own(tensor):
            return None
        with InternalOps():
            return self._store.pack(tensor)

    def _is_own(self, tensor: Tensor) -> bool:
        if not self._knows_all:
            # Looked up late: a sharded module has its memory only while it runs, a lazy one only after.
            tensors = [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]
            self._knows_all = not any(map(is_lazy, tensors))
            strided = (tensor for tensor in tensors if not is_lazy(tensor) and tensor.layout is torch.strided)
            self._own_storages.update(tensor.untyped_storage()._cdata for tensor in strided)
        return tensor.untyped_storage()._cdata in self._own_storages


def prefetched_bytes(sizes: Sequence[int], device: torch.device) -> int:
    """Returns how much is fetched before the backward needs it, of storages of these bytes that left in this order."""
    most, num_bytes = copy_streams(device).prefetch_bytes, 0
    for size in reversed([size for size in sizes if size >= MIN_BYTES]):
        if num_bytes and num_bytes + size > most:
            break
        num_bytes += size
    return num_bytes
