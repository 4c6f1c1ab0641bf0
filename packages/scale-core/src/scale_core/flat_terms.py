"""What one flat buffer is to be, in words: in which dtypes, on which devices, shared by whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scale_core.group import Group


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one flat buffer; None is that of the parameters themselves.

    Attributes:
        compute: Of the gathered parameters and of their gradients.
        reduce: Of the gradients on their way from rank to rank.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True)
class Devices:
    """Where a flat buffer lives; None is the device of the parameters themselves.

    Attributes:
        shard: The shard, and so the gradients and the state that an optimizer sees.
        compute: The gathered parameters, and gradients until they are reduced.
        reduced: Reduced gradients until the backward pass is over; None is that of the shard.
    """

    shard: torch.device | None = None
    compute: torch.device | None = None
    reduced: torch.device | None = None

    def resolved(self, here: torch.device) -> Devices:
        """The same with every device named, given that of the parameters."""
        shard = self.shard or here
        return Devices(shard, self.compute or here, self.reduced or shard)


@dataclass(frozen=True)
class Groups:
    """Who shares a flat buffer.

    Attributes:
        shard: The W ranks between which it is cut.
        replicas: The ranks that hold the same shard, one for each copy of the model: hybrid sharding.
        part: Some of the ranks of `shard`, neighbours in it, between which `release(keep_part=True)` leaves the full
            buffer, so that the next gather stays among them. Its size divides W.
    """

    shard: Group = field(default_factory=Group)
    replicas: Group = field(default_factory=Group)
    part: Group | None = None
