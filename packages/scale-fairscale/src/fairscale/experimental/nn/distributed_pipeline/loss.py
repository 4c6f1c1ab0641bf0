"""`DistributedLoss`: refused, with what to write."""

from __future__ import annotations

from torch import nn

from fairscale._warnings import Refused

__all__ = ["DistributedLoss"]


class DistributedLoss(Refused, nn.Module):
    """FairScale's loss of an output in another process."""

    why = "the output of the last stage does not leave its rank, where the loss is computed"
    instead = "loss = pipe.step(batch, target=target, loss_fn=loss_fn), which is the same scalar on all ranks"
