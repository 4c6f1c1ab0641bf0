"""`AMPnetPipe`: can be imported, and is not offered."""

from torch import nn

from fairscale._warnings import Refused


class AMPnetPipe(Refused, nn.Module):
    """FairScale's pipeline that computes with stale gradients."""

    why = "its stages update on gradients of older weights, so that no run equals plain PyTorch"
    instead = "scale_pipe.DistributedPipe with schedule='1f1b', whose stages work at the same time, too"


__all__ = ["AMPnetPipe"]
