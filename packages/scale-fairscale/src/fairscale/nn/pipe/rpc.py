"""`PipeRPCWrapper`, a pipeline of several processes that rank 0 drives: refused, with what to write."""

from __future__ import annotations

from torch import nn

from fairscale._warnings import Refused

__all__ = ["PipeRPCWrapper"]


class PipeRPCWrapper(Refused, nn.Module):
    """FairScale's pipeline of several processes, driven from rank 0 over torch's RPC."""

    why = "torch's RPC, by which rank 0 drove the others, is deprecated, and here all ranks run the same program"
    instead = (
        'pipe = scale_pipe.DistributedPipe(module, "gpipe", balance=balance, chunks=chunks) on all ranks, '
        "loss = pipe.step(batch, target=target, loss_fn=loss_fn), and each rank's own optimizer of pipe.parameters() "
        "in place of foreach_worker"
    )
