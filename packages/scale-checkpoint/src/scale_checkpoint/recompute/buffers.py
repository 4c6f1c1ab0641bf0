"""Buffers that a forward changes, such as a batch norm's statistics: a recomputation must not change them again.

A recomputation is to find what the first forward found, and to leave no trace. So the values from before are kept, of
those buffers only that the forward changes. Which ones these are is learned from each module's first forward, for which
all its buffers are copied; later ones copy what was found to change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from scale_checkpoint.state import Aside


class Seen(NamedTuple):
    """A buffer as it was before a forward."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None


class Changed(NamedTuple):
    """A buffer that a forward has changed.

    Attributes:
        module: Which holds it.
        name: Its name there.
        before: Its values before that forward, of the buffer's shape; nobody else writes to it.
        after: What stood there after it.
        version: Of `after`, at that time.
    """

    module: nn.Module
    name: str
    before: Tensor
    after: Tensor | None = None
    version: int = -1


class Watched:
    """The buffers of a module and of all that it holds, over the calls of its forward."""

    def __init__(self) -> None:
        # By module and mode: a batch norm changes nothing in eval mode. A name that is not listed was never seen.
        self._changing: weakref.WeakKeyDictionary[nn.Module, dict[tuple[bool, str], bool]] = weakref.WeakKeyDictionary()

    def look(self, parts: Iterable[nn.Module]) -> list[Seen]:
        """Before a forward: returns what there is.

        Args:
            parts: The module and all that it holds.
        """
        seen = []
        for part in parts:
            for name, buffer in part._buffers.items():
                if buffer is None:
                    continue
                known = self._changing.get(part)
                changes = True if known is None else known.get((part.training, name), True)
                copy = copy_of(buffer) if changes else None
                seen.append(Seen(part, name, buffer, version_of(buffer), copy))
        return seen

    def changed_since(self, seen: Iterable[Seen]) -> list[Changed]:
        """After a forward: returns what it has changed.

        Raises:
            RuntimeError: It has changed, for the first time, a buffer that it had left alone before.
        """
        changed = []
        for part, name, buffer, version, copy in seen:
            now = part._buffers.get(name)
            replaced = now is not buffer
            # Those of a norm count as changed in eval mode, too: kernels of later forwards write to them unseen.
            has_changed = replaced or version_of(buffer) != version or isinstance(part, _NormBase)
            has_changed = has_changed or (copy is not None and differ(copy, buffer))
            if has_changed and copy is None and not (replaced and version_of(buffer) == version):
                raise RuntimeError(
                    f"the forward of a {part._get_name()} has changed its buffer '{name}' [{list(buffer.shape)}] "
                    "after calls in which it had not, so a recomputation could not begin from what was there before: "
                    "let it be changed in every forward, or leave the module out of the checkpointed one"
                )
            if has_changed:
                # What was replaced is still there as it was; what was changed in place is there as a copy.
                changed.append(Changed(part, name, buffer if copy is None else copy, now, version_of(now)))
            self._changing.setdefault(part, {})[part.training, name] = has_changed or self._was(part, name)
        return changed

    def _was(self, part: nn.Module, name: str) -> bool:
        return self._changing.get(part, {}).get((part.training, name), False)


def differ(copy: Tensor, buffer: Tensor) -> bool:
    """Whether their values differ; what has no values, in a simulation, tells by its version alone."""
    if type(copy) is not Tensor or copy.is_meta:
        return False
    with Aside():
        return not torch.equal(copy, buffer)


def version_of(tensor: Tensor | None) -> int:
    """How often it was written to; -1 of what counts none, as what was made in inference mode."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def copy_of(buffer: Tensor) -> Tensor:
    """Returns a copy, of the buffer's shape and strides."""
    with Aside():
        return buffer.detach().clone(memory_format=torch.preserve_format)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Returns the module and all that it holds, each once; `modules()` in a form that costs little at every call."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())
