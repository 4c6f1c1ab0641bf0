"""The way of modules that exist already into the divided region.

Modules that read the same input, such as the projections to queries, keys and values, go into it together: so their
gradients are summed once.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from scale_core.autograd_hooks import in_backward
from scale_core.comm.group import Group
from scale_core.part_hooks import ForEachPart
from scale_tp.async_tp.lazy_input import Arrival
from scale_tp.layers.linear_ops import enter

SEQUENCE_DIM = 1
"""The dimension of the sequence in what the modules of transformers hand on: [batch, sequence, width]."""


class Entrance(ForEachPart):
    """The way into the divided region, which modules that read the same tensor take together.

    Args:
        group: The ranks.
        num_readers: How many modules read it.
        way: "copy" what all ranks have; "gather" the sequence, of which each has a part; or "inside", where what comes
            is in the region already.
        overlap_pieces: Into how many pieces each part is cut, to overlap the communication; None does not.
    """

    def __init__(
        self,
        group: Group,
        num_readers: int,
        way: Literal["copy", "gather", "inside"],
        overlap_pieces: int | None = None,
    ) -> None:
        self.group, self.num_readers, self.way, self.overlap_pieces = group, num_readers, way, overlap_pieces
        self._inside: tuple[object, Tensor, Tensor | Arrival] | None = None
        self._num_left = 0
        self._first_readers: WeakSet[nn.Module] = WeakSet()  # of some input each, in the last forward

    def enter(self, input: Tensor, reader: nn.Module) -> Tensor | Arrival:
        """Returns the input inside of the region; the same tensor for each module that brings the same input."""
        if self.way == "inside":
            return input
        # A tensor that was changed, or is used for another purpose, is another one.
        state = (input._version if not input.is_inference() else 0, torch.is_grad_enabled())
        known, self._inside = self._inside, None
        # Where a checkpoint computes some of them again, each does what it did in the forward.
        is_first_again = in_backward() and reader in self._first_readers
        if known is not None and known[0] == state and known[1] is input and not is_first_again:
            inside = known[2]
            if not in_backward():
                self._first_readers.discard(reader)
        else:
            inside, self._num_left = self._entered(input, reader), self.num_readers
        self._num_left -= 1
        if self._num_left > 0:  # The last one leaves nothing behind.
            self._inside = (state, input, inside)
        return inside

    def forget(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the module that holds the readers: some of them may not have read."""
        self._inside = None

    def _entered(self, input: Tensor, reader: nn.Module) -> Tensor | Arrival:
        overlap_pieces = self.overlap_pieces
        if not in_backward():
            self._first_readers.add(reader)
        elif reader not in self._first_readers:  # A checkpoint of it alone: the forward did not overlap it either.
            overlap_pieces = None
        return enter(input, self.group, None if self.way == "copy" else SEQUENCE_DIM, overlap_pieces)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_first_readers"}
        return {**kept, "_inside": None, "_num_left": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _first_readers=WeakSet())
