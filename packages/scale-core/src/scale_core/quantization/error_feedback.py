"""Error feedback: what rounding has taken from one step's message is added to the next one's.

So what is lost is late and not gone (Seide et al., 2014; Karimireddy et al., arXiv 1901.09847). A step that is aborted
leaves the error as it was: what a pass has added counts only from `commit` on.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """The error that one rank has made in messages of one size, fp32, in the shape of their values."""

    def __init__(self) -> None:
        self.error: Tensor | None = None  # of the passes that have succeeded
        self._next: Tensor | None = None  # of the pass that runs

    def add_to(self, values: Tensor) -> Tensor:
        """Returns values of a floating-point dtype plus the error that waits, in fp32; may change them in place."""
        wide = values.float()
        error = self.error if self._next is None else self._next
        return wide if error is None else wide.add_(error.view(wide.shape))

    def keep(self, values: Tensor, sent: Tensor) -> None:
        """Keeps what `sent`, which this may change, lacks of `values`; nothing where either is not finite."""
        self._next = torch.sub(values, sent, out=sent).nan_to_num_(0.0, 0.0, 0.0)

    def commit(self) -> None:
        """The pass has succeeded."""
        if self._next is not None:
            self.error, self._next = self._next, None

    def rollback(self) -> None:
        """The pass has failed."""
        self._next = None
