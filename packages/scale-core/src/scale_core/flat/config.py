"""Where a flat buffer is, in which dtypes, and between which ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scale_core.comm.group import Group
from scale_core.flat.layout import alignment_of


@dataclass(frozen=True)
class DtypePolicy:
    """The dtypes of one flat buffer; None is the dtype of the parameters themselves.

    Attributes:
        compute: Of the gathered parameters and of their gradients.
        reduce: Of the gradients on their way from rank to rank; None is the dtype of `compute`.
        reduces_as_stored: Whether None for `reduce` is the dtype of the parameters, which `model.float()` may change.

    Examples:
        >>> import torch
        >>> from scale_core.flat.config import DtypePolicy
        >>> DtypePolicy(compute=torch.bfloat16, reduce=torch.float32)
        DtypePolicy(compute=torch.bfloat16, reduce=torch.float32)

    See also: [the core](../how-the-core-works.md).
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    reduces_as_stored: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class DevicePolicy:
    """The devices of one flat buffer; None is the device of the parameters themselves."""

    shard: torch.device | None = None  # The shard, and so the gradients and the state that an optimizer sees
    compute: torch.device | None = None  # The gathered parameters, and gradients until they are reduced
    reduced: torch.device | None = None  # Reduced gradients until the backward pass is over; None is `shard`
    pin_memory: bool = True  # Of a shard on the host that goes to a GPU: its copies then overlap with the computation

    def resolved(self, here: torch.device) -> DevicePolicy:
        """The same with every device named; `here` is the device of the parameters."""
        shard = self.shard or here
        return DevicePolicy(shard, self.compute or here, self.reduced or shard, self.pin_memory)


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of a group by nodes of L neighbors each: place l in node n is rank n * L + l of N * L."""

    intra_node: Group  # The L ranks of this rank's node
    inter_node: Group  # The N ranks that have this rank's place l in their nodes


@dataclass(frozen=True)
class ShardGroups:
    """The ranks that share a flat buffer."""

    shard: Group = field(default_factory=Group)  # The W ranks between which it is cut
    # The ranks that hold the same shard, one for each copy of the model: hybrid sharding.
    replicas: Group = field(default_factory=Group)
    # Some of the ranks of `shard`, neighbors in it, between which `release(keep_part=True)` leaves the full buffer, so
    # that the next gather stays among them. Its size divides W.
    part: Group | None = None
    nodes: NodeGroups | None = None  # The ranks of `shard` by nodes, where messages between nodes are other ones


def flat_alignment(dtype: torch.dtype, *, gathered_bytes: int | None = None) -> int:
    """Parameters of `dtype` may start at multiples of this number of elements in their flat buffer (`FlatLayout.plan`).

    The layout stays where floating-point numbers are gathered in two bytes, or converted by `model.half()`. Where they
    are gathered in fewer bytes, the alignment is for `gathered_bytes` of each element.
    """
    if gathered_bytes is not None:
        return alignment_of(gathered_bytes)
    return alignment_of(min(dtype.itemsize, 2) if dtype.is_floating_point else dtype.itemsize)
