"""Saved tensors that leave the device until the backward pass comes back to them: which of them do, and which stay.

What is a parameter's or a buffer's own memory stays, and so does what is too small, or no plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from scale_checkpoint.offload.storage import Target, place_for
from scale_checkpoint.offload.store import Packed, store_for
from scale_checkpoint.offload.streams import lanes_of
from scale_checkpoint.saved_tensors import Stayed, operator_that_saves
from scale_checkpoint.state import Aside

MIN_BYTES = 1 << 16
"""Storages below this stay where they are: a copy of its own would cost more than it saves."""

_MOST_OVER_OWN = 4  # times its own bytes may a tensor's storage have: a third of a joint projection travels as a whole
_PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer))


class offload_activations(saved_tensors_hooks):  # noqa: N801  # a context manager, as torch names them
    """Inside, what autograd saves goes to the host or to a file, and comes back in the backward pass.

        >>> import torch
        >>> from scale_checkpoint import offload_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
        >>> with offload_activations(model):
        ...     loss = model(torch.randn(512, 64)).mean()
        >>> loss.backward()

    Args:
        *modules: Those that run inside: their parameters and buffers stay where they are.
        to: "host", pinned where that lets copies run beside the computation, or the path of a folder.
        min_bytes: Smaller storages stay.

    Raises:
        ValueError: `to` is another word, or `min_bytes` is negative.
        NotADirectoryError: There is no such folder.
    """

    def __init__(self, *modules: nn.Module, to: Target = "host", min_bytes: int = MIN_BYTES) -> None:
        check_target(to, min_bytes)
        self._waiting = _Waiting(Sender(modules, to, min_bytes))
        super().__init__(self._waiting.pack, _Leaving.unpack)

    def __exit__(self, *error: object) -> None:
        """Lets go of the hooks, and sends what waits, unless an exception is on its way."""
        super().__exit__(*error)
        if not any(error):
            self._waiting.send()


class _Waiting:
    """What one operator has saved: it leaves when the operator has run, since some write into what they have saved.

    `rrelu` does: it saves its noise, and then draws it.

    Args:
        sender: Sends tensors away.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._operator = -1
        self._leaving: list[_Leaving] = []

    def pack(self, tensor: Tensor) -> _Leaving:
        """Takes a tensor that autograd saves, and sends those that other operators have saved before."""
        operator = operator_that_saves()
        if operator != self._operator:
            self._operator = operator
            self.send()
        leaving = _Leaving(tensor)
        if self._sender.may_leave(tensor):
            self._leaving.append(leaving)
        return leaving

    def send(self) -> None:
        """Sends what waits."""
        waiting, self._leaving = self._leaving, []
        for leaving in waiting:
            leaving.leave(self._sender)


def offload_inputs(module: nn.Module, to: Target, min_bytes: int) -> saved_tensors_hooks:
    """Returns hooks for a module that is computed again: what autograd saves for it, its inputs, leaves at once.

    Args:
        module: Whose parameters and buffers stay.
        to: "host" or the path of a folder.
        min_bytes: Smaller storages stay.
    """
    sender = Sender([module], to, min_bytes)

    def pack(tensor: Tensor) -> _Leaving:
        leaving = _Leaving(tensor)
        leaving.leave(sender)
        return leaving

    return saved_tensors_hooks(pack, _Leaving.unpack)


class _Leaving:
    """What autograd holds of a tensor that may leave.

    Args:
        tensor: As it is saved.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._here: Stayed | None = Stayed(tensor)
        self._sent: Packed | None = None

    def leave(self, sender: Sender) -> None:
        """Sends it away; not what was changed in place meanwhile, which is an error if autograd comes back to it."""
        if self._here is not None and self._here.is_intact:
            self._sent = sender.send(self._here.tensor)
            if self._sent is not None:
                self._here = None

    def unpack(self) -> Tensor:
        if self._sent is not None:
            return self._sent.unpack()
        assert self._here is not None
        return self._here.unpack()


def check_target(to: Target, min_bytes: int) -> None:
    """Checks what offloading is told.

    Args:
        to: "host" or the path of a folder.
        min_bytes: Smaller storages stay.

    Raises:
        ValueError: `to` is another word, or `min_bytes` is negative.
        NotADirectoryError: There is no such folder.
    """
    place_for(to)
    if min_bytes < 0:
        raise ValueError(f"min_bytes: expected 0 or more, got {min_bytes}")


class Sender:
    """Sends tensors away, but for those of the modules themselves and those that are too small.

    Args:
        modules: Whose parameters and buffers stay.
        to: "host" or the path of a folder.
        min_bytes: Smaller storages stay.

    Raises:
        ValueError: `to` is another word.
        NotADirectoryError: There is no such folder.
    """

    def __init__(self, modules: Sequence[nn.Module], to: Target, min_bytes: int) -> None:
        self._modules, self._store, self._min_bytes = modules, store_for(to), min_bytes
        self._staying: set[int] = set()
        self._knows_all = False

    def may_leave(self, tensor: Tensor) -> bool:
        """Whether a tensor leaves unless it is a module's own: it is a plain one with enough memory of its own."""
        return _may_leave(tensor, self._min_bytes)

    def send(self, tensor: Tensor) -> Packed | None:
        """Starts to move a tensor away; returns None where it stays."""
        if not self.may_leave(tensor) or self._is_own(tensor):
            return None
        with Aside():
            return self._store.pack(tensor)

    def _is_own(self, tensor: Tensor) -> bool:
        if not self._knows_all:
            # Looked up late: a sharded module has its memory only while it runs, a lazy one only after.
            own = [each for module in self._modules for each in (*module.parameters(), *module.buffers())]
            self._knows_all = not any(map(is_lazy, own))
            self._staying.update(_storages(each for each in own if not is_lazy(each)))
        return tensor.untyped_storage()._cdata in self._staying


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


def _may_leave(tensor: Tensor, min_bytes: int) -> bool:
    """Whether it is a plain tensor with memory of its own, and enough of it."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        return False
    # A piece of something large that stays anyhow: its storage would travel for the sake of the piece.
    num_bytes = tensor.untyped_storage().nbytes()
    return min_bytes <= num_bytes <= _MOST_OVER_OWN * tensor.numel() * tensor.itemsize


def fetched_early(sizes: Sequence[int], device: torch.device) -> int:
    """Returns how much of what left last is fetched while the backward pass is still behind it.

    Args:
        sizes: Of the storages that leave, in order, in bytes.
        device: Which they leave.
    """
    most, num_bytes = lanes_of(device)[1].ahead_bytes, 0
    for size in reversed([size for size in sizes if size >= MIN_BYTES]):
        if num_bytes and num_bytes + size > most:
            break
        num_bytes += size
    return num_bytes
