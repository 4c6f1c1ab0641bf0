"""Buffers in a recomputation: those that the forward has changed have the values from before, and it changes the same.

Where an attribute of Python decides whether a buffer is changed, as a counter or the length that a table has grown to,
the recomputation decides otherwise than the forward, and computes with other values. So what it changes is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import _StopRecomputationError

from scale_checkpoint.recompute.buffers import Changed, copy_of, differ, version_of


class Standing(NamedTuple):
    """A buffer that a forward has left alone.

    Attributes:
        module: Which holds it.
        name: Its name there.
    """

    module: nn.Module
    name: str


def standing_in(parts: Iterable[nn.Module], changed: Iterable[Changed]) -> list[Standing]:
    """After a forward: returns the buffers that it has left alone, but for those of norms, which count as changed.

    Args:
        parts: The module and all that it holds.
        changed: The buffers that it has changed.
    """
    others = {(change.module, change.name) for change in changed}
    return [
        Standing(part, name)
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None and (part, name) not in others and not isinstance(part, _NormBase)
    ]


def decides_results(change: Changed) -> bool:
    """Whether a forward may compute with what it changes there; a norm, which changes its statistics, doesn't."""
    return not isinstance(change.module, _NormBase)


class _Given(NamedTuple):
    """A buffer in a recomputation.

    Attributes:
        place: Where it stands.
        tensor: What stands there when the recomputation begins.
        version: Of it, at that time.
        held: What the module holds otherwise.
        before: Its values, where it is one that the forward has changed.
    """

    place: Changed | Standing
    tensor: Tensor | None
    version: int
    held: Tensor | None
    before: Tensor | None

    @property
    def is_untouched(self) -> bool:
        now = self.place.module._buffers.get(self.place.name)
        if now is not self.tensor or now is None:
            return now is self.tensor
        return version_of(now) == self.version and (self.before is None or not differ(self.before, now))


class Replay(AbstractContextManager[None]):
    """Around a recomputation: changed buffers have the values from before; afterwards modules hold what they held.

    Args:
        changed: What the forward has changed. If one of them `decides_results`, the recomputation runs to its end.
        standing: What the forward has left alone.

    Attributes:
        read: By the identity of the copy of a norm's buffer, that buffer as it is by now. The backward of the plain
            module reads it then, and so does that of this one.

    Raises:
        RuntimeError: When it is left: the recomputation has changed other buffers than the forward.
    """

    def __init__(self, changed: Sequence[Changed], standing: Sequence[Standing]) -> None:
        self._changed, self._standing = changed, standing
        self.read: dict[int, Tensor] = {}

    def __enter__(self) -> None:
        self._given: list[_Given] = []
        for place in self._standing:
            now = place.module._buffers.get(place.name)
            self._given.append(_Given(place, now, version_of(now), now, None))
        for change in self._changed:
            held, copy = change.module._buffers.get(change.name), copy_of(change.before)
            self._given.append(_Given(change, copy, version_of(copy), held, change.before))
            change.module._buffers[change.name] = copy
            is_as_left = held is change.after and version_of(held) == change.version
            if held is not None and is_as_left and not decides_results(change):
                self.read[id(copy)] = held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        given, self._given = self._given, []
        unlike = None
        for one in given:
            if isinstance(one.place, Standing):
                unlike = unlike if one.is_untouched else _told(one, "left alone", "changed")
            elif decides_results(one.place) and not isinstance(error, _StopRecomputationError) and one.is_untouched:
                unlike = _told(one, "changed", "left alone")
            one.place.module._buffers[one.place.name] = one.held
        if unlike is None:
            return
        if error is None or isinstance(error, _StopRecomputationError):
            raise RuntimeError(unlike)
        error.add_note(unlike)


def _told(given: _Given, then: str, now: str) -> str:
    title = type(given.place.module).__name__
    return (
        f"the forward of a {title} has {then} its buffer '{given.place.name}', which its recomputation has {now}: let "
        "inputs, parameters and buffers alone decide that, and no attribute, counter or clock; let a table that grows "
        "look at its own shape, or grow it once before training, or leave the module out of the checkpointed one"
    )
