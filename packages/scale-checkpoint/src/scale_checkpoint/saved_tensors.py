"""Version counters of saved tensors: what must be as it was when autograd comes back to it.

Autograd itself sees a saved tensor that was changed in place, and raises; but not where hooks pack it, as those
of torch's checkpointing and of an offload do. So these compare versions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from scale_checkpoint.state import InternalOps


class KeptTensor:
    """What autograd holds of a saved tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        if tensor.requires_grad:  # It would hold the node that saves it.
            with InternalOps():
                tensor = tensor.detach()
        self.tensor = tensor

    @property
    def is_intact(self) -> bool:
        """Whether it was not changed in place since."""
        return self.tensor._version == self._version

    def unpack(self) -> Tensor:
        """Returns the tensor; an error if it was changed in place since."""
        if not self.is_intact:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that autograd has saved where activations are offloaded was "
                "modified by an inplace operation before its backward, and has stayed on the device: it is small or a "
                "parameter, or was changed at once; change it after loss.backward(), or change a copy"
            )
        return self.tensor


def alias_of(tensor: Tensor) -> Tensor:
    """Returns the same values with the same version counter and without a history, in dispatch modes, too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def current_operator() -> int:
    """Returns the number of the operator that saves tensors now, for hooks on these: each has a node of its own."""
    return torch._C._autograd._get_sequence_nr()


def version_counter(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory that shares its version counter with `tensor`."""
    with InternalOps():
        counter = alias_of(tensor)
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def shares_version_counter(tensor: Tensor, counter: Tensor) -> bool:
    """Whether a tensor has this version counter, as its views have.

    Not so the pieces of `unsafe_chunk`, into which recurrent layers cut the gates of one storage: each counts its own
    changes in place.
    """
    before = counter._version
    with _unsafe_preserve_version_counter(tensor):
        increment_version(tensor)
        return counter._version != before
