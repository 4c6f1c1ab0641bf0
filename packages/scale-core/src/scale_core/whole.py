"""A parameter that a module computes with, whose memory comes and goes.

Between a release and the next gather there is nothing behind it, and torch would end the process where it reads that:
to print a traceback with the local variables of each frame, as test runners do, is enough. Views that a module has made
of a parameter are plain tensors of torch's, and can't be saved from that.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Whole(nn.Parameter):
    """A view of a full buffer, in a parameter's full shape; printed without its values while these are released."""

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # Tensor's own takes keywords that vary
        if not self.numel() or self.untyped_storage().nbytes():
            return repr(nn.Parameter(self.data, self.requires_grad))  # Not by a name that nobody has written.
        return f"<a released parameter of shape {tuple(self.shape)}, {self.dtype}: it has values while its unit runs>"
