"""Tensors that autograd has saved, and that must be as they were when it comes back to them.

Autograd itself sees a saved tensor that was changed in place, and raises; but not where hooks stand between, as those
of torch's checkpointing and of an offload do. So whoever hooks compares the tensor's version, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError

from scale_checkpoint.state import Aside


class Stayed:
    """What autograd holds of a tensor that was not moved away.

    Args:
        tensor: As it is saved.

    Attributes:
        tensor: The same, sharing its memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        if tensor.requires_grad:  # It would hold the node that saves it.
            with Aside():
                tensor = tensor.detach()
        self.tensor = tensor

    @property
    def is_intact(self) -> bool:
        """Whether it was not changed in place since."""
        return self.tensor._version == self._version

    def unpack(self) -> Tensor:
        """Returns the tensor.

        Raises:
            RuntimeError: It was changed in place since.
        """
        if not self.is_intact:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that autograd has saved where activations are offloaded was "
                "modified by an inplace operation before its backward, and has stayed where it is: it is small or a "
                "parameter, or was changed at once; change it after loss.backward(), or change a copy"
            )
        return self.tensor


def alias_of(tensor: Tensor) -> Tensor:
    """Returns the same values with the same version counter and without a history, in dispatch modes, too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def operator_that_saves() -> int:
    """Returns the number of the operator that saves tensors now, for hooks on these: each has a node of its own."""
    return torch._C._autograd._get_sequence_nr()


def counter_of(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory that shares its version counter with `tensor`."""
    with Aside():
        counter = alias_of(tensor)
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def have_one_counter(tensor: Tensor, counter: Tensor) -> bool:
    """Whether two tensors have one version counter, as a tensor and its views have.

    Not so the pieces of `unsafe_chunk`, into which recurrent layers cut the gates of one storage: each counts for
    itself what is changed in place, and of another one's changes says nothing.

    Args:
        tensor: Of any shape.
        counter: Of `counter_of`.
    """
    before = counter._version
    with _unsafe_preserve_version_counter(tensor):
        increment_version(tensor)
        return counter._version != before


class Watch:
    """Watches what one call's recomputation saves until autograd has taken it.

    Args:
        title: The module's class, for errors.
        strangers: Returns the classes of what the call was given that could not be taken apart, for errors.
    """

    def __init__(self, title: str, strangers: Callable[[], Sequence[str]]) -> None:
        self._title, self._strangers = title, strangers
        # By the identity of the tensor that torch's checkpointing holds, so that the forward need not number them.
        self._versions: dict[int, int] = {}
        # By what autograd holds for it until the node that has saved it is done, in which backward it was unpacked.
        self._read: WeakKeyDictionary[Any, tuple[int, Tensor]] = WeakKeyDictionary()

    def forward(self) -> saved_tensors_hooks:
        """Returns hooks for the forward, around those of torch's checkpointing, which stand there already."""
        pack, unpack = _standing_hooks()
        versions = self._versions

        def compared(packed: Any) -> Tensor:
            try:
                tensor = self._read_by_function(packed, unpack)  # This is where it is recomputed.
            except Exception as error:
                error.add_note(self._note(error))
                raise
            if tensor._version != versions[id(tensor)]:
                raise RuntimeError(
                    f"the forward of a {self._title}, which is checkpointed, modifies a tensor {list(tensor.shape)} by "
                    "an inplace operation after autograd has saved it: let it change a copy (inplace=False where a "
                    "layer has that), as it would have to without checkpointing"
                )
            return tensor

        return saved_tensors_hooks(pack, compared)

    def _read_by_function(self, packed: Any, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Unpacks what the backward of a user's own `autograd.Function` may read again, and torch gives away once.

        It lives as long as in the plain module: until autograd lets go of what the node has saved.
        """
        if not isinstance(torch._C._current_autograd_node(), torch._C._FunctionBase):  # Operators read each once.
            return unpack(packed)
        backward = torch._C._current_graph_task_id()
        found = self._read.get(packed)
        if found is None or found[0] != backward:
            found = self._read[packed] = backward, unpack(packed)
        return found[1]

    def _note(self, error: Exception) -> str:
        told = f"This happened while the forward of a {self._title} was computed again."
        strangers = self._strangers()
        if not strangers and isinstance(error, CheckpointError):  # It says debug=True, of torch's own function.
            return (
                f"{told} `with scale_checkpoint.check_recomputation(model):` around forward and backward says in which "
                "module and operator the two begin to differ."
            )
        if not strangers:
            return told
        return (
            f"{told} It was given a {' and a '.join(strangers)}, which the recomputation gets as it is by now: if the "
            "forward has changed it, as it changes a cache, do without (model.config.use_cache = False in "
            "transformers, or use_cache=False in the call, as for T5), or register its class with torch.utils._pytree, "
            "so that it is given as it was."
        )

    def recomputation(
        self, whole: bool = False, read: Mapping[int, Tensor] = MappingProxyType({})
    ) -> saved_tensors_hooks:
        """Returns hooks for the recomputation, around those of torch's checkpointing.

        Args:
            whole: The forward runs to its end, also when all that is saved is there, which is where torch ends it.
            read: By the identity of a tensor that is saved, the one that the backward reads in its place.
        """
        pack, unpack = _standing_hooks()
        versions = self._versions

        def noted(tensor: Tensor) -> Any:
            tensor = read.get(id(tensor), tensor)
            if tensor.requires_grad:
                tensor = tensor.detach()  # As torch would: what it is given here is what it holds.
            version = tensor._version
            if versions.setdefault(id(tensor), version) != version:
                # Saved before, at another version; or the number is that of a tensor which is gone.
                tensor = tensor.detach()
                versions[id(tensor)] = version
            return pack(tensor)

        return saved_tensors_hooks(_until_it_may_end(noted, whole), unpack)


def _until_it_may_end(pack: Callable[[Tensor], Any], whole: bool) -> Callable[[Tensor], Any]:
    """Keeps torch from ending a recomputation too early.

    To what is saved when all that is needed is there, only a backward inside of the recomputation comes back.
    """
    is_there, unwritten = False, -1

    def packed(tensor: Tensor) -> Any:
        nonlocal is_there, unwritten
        if not is_there:
            if _may_be_unwritten(tensor):
                unwritten = operator_that_saves()
            try:
                return pack(tensor)
            except _StopRecomputationError:
                if not whole and unwritten != operator_that_saves():
                    raise
                is_there = True
        return tensor.detach() if tensor.requires_grad else tensor

    return packed


def _may_be_unwritten(tensor: Tensor) -> bool:
    """Whether the operator that saves a tensor may write to it after that: `rrelu` saves its noise, then draws it."""
    is_fresh = tensor.grad_fn is None and not tensor.requires_grad and not tensor._is_view() and tensor._version == 0
    return is_fresh and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)


def _standing_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The hooks on saved tensors that stand now; ours are called in their place, and call them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
