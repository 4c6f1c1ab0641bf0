"""`AsyncPipe`, one process for each stage: refused, with what to write."""

from __future__ import annotations

from torch import nn

from fairscale._warnings import Refused

__all__ = ["AsyncPipe"]


class AsyncPipe(Refused, nn.Module):
    """FairScale's pipeline of several processes."""

    why = (
        "its forward returned outputs on one rank and unfinished micro-batches on the others, whose backward "
        "`back_helper` then drove, and that half step does not exist here"
    )
    instead = (
        'pipe = scale_pipe.DistributedPipe(module, "gpipe", balance=balance, chunks=chunks) on all ranks, and '
        "loss = pipe.step(batch, target=target, loss_fn=loss_fn); in place of LazyModule build the model under "
        'torch.device("meta") and fill pipe.stages'
    )
