"""`DistributedPipeline`: refused, with what to write."""

from __future__ import annotations

from torch import nn

from fairscale._warnings import Refused

__all__ = ["DistributedPipeline"]


class DistributedPipeline(Refused, nn.Module):
    """FairScale's pipeline over a graph of remote modules, driven from one process."""

    why = (
        "it drove modules in other processes over torch's RPC and dist_autograd, which are deprecated, and here all "
        "ranks run the same program"
    )
    instead = (
        'pipe = scale_pipe.DistributedPipe(stages, "1f1b", chunks=chunks) on all ranks, and '
        "loss = pipe.step(batch, target=target, loss_fn=loss_fn)"
    )
