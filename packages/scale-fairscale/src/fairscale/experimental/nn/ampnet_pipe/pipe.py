"""`AMPnetPipe`: refused, with what to write."""

from __future__ import annotations

from fairscale._warnings import Refused

__all__ = ["AMPnetPipe"]


class AMPnetPipe(Refused):
    """FairScale's pipeline without synchronisation (AMPNet, arXiv 1705.09786)."""

    why = (
        "it computes gradients with weights that have changed since the forward, so its numbers are not those of plain "
        "PyTorch"
    )
    instead = (
        'scale_pipe.DistributedPipe(module, "zb_v", balance=balance, chunks=chunks), which is idle as little without '
        "stale weights"
    )
