"""A transport for what is on the host, for groups that have none.

A group of NCCL alone moves nothing on the host. But ranks tell each other numbers and words, shards may be kept on the
host with their gradients, and a model may be built there: none of that should need a device, least of all a wait for
one. So such a group gets a twin: the same ranks over gloo, made when the host is needed first, by all of them together.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from scale_core import compat
from scale_core.group import Group
from scale_core.pending import TransferError

# None where a group reaches the host by itself: what stands here must not keep its own key alive.
_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()


def torch_group(group: Group) -> dist.ProcessGroup:
    """The process group of a group that has more than one rank."""
    assert group.process_group is not None
    return group.process_group


def group_for(device: torch.device, group: Group) -> dist.ProcessGroup:
    """Returns the process group that moves tensors on this device: the group's own or, for the host, its twin.

    The first time that a group needs its twin, all its ranks have to be here together, and wait for each other as long
    as the group's own limit says.

    Raises:
        TransferError: A rank did not come.
        RuntimeError: The group does not reach the host, and this torch has no gloo.
    """
    own = torch_group(group)
    if device.type != "cpu":
        return own
    if own not in _twins:
        _twins[own] = None if compat.reaches_host(own) else _made(own, group)
    return _twins[own] or own


def _made(own: dist.ProcessGroup, group: Group) -> dist.ProcessGroup:
    if not dist.is_gloo_available():
        raise RuntimeError(
            f"the ranks {list(group.ranks)} have to tell each other something on the host, but their group is one of "
            f"{group.backend} alone, and this torch was built without gloo: install one that was built with it"
        )
    try:
        return compat.gloo_twin(own)
    except RuntimeError as error:
        raise TransferError("to meet on the host", None, str(error).splitlines()[0]) from error
