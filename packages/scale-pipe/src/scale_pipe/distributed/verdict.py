"""How a pass ends: all ranks tell each other how it went, and what the loss is, in a few integers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core.exchange import exchange
from scale_core.group import Group
from scale_core.samples import Terms
from scale_pipe.distributed.messages import Share

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Verdict(NamedTuple):
    """What all ranks know after a pass.

    Attributes:
        failed: The ranks on which it was given up.
        loss: Its mean loss; None where nobody has one.
        dtype: That of the loss.
        heard: The ranks on which somebody measures gradients by micro-batch.
        is_heard_alike: It is done on the same terms on all ranks.
        steps_late: Some rank is to step its stages now that all are through.
    """

    failed: list[int]
    loss: float | None
    dtype: torch.dtype
    heard: list[int]
    is_heard_alike: bool
    steps_late: bool

    def loss_on(self, device: torch.device) -> Tensor | None:
        """Returns the loss as a scalar.

        Args:
            device: Where it is wanted.
        """
        return None if self.loss is None else torch.tensor(self.loss, dtype=self.dtype, device=device)


def agree_on_end(
    group: Group,
    *,
    failed: bool,
    loss: Tensor | None,
    heard: bool,
    terms: Sequence[Terms],
    steps_late: bool,
    limit_seconds: float | None,
) -> Verdict:
    """Tells all ranks how the pass went here; the one place where a step waits for what a device has computed.

    Args:
        group: All ranks, which are all here.
        failed: It was given up here.
        loss: A scalar, on the rank of the last stage.
        heard: Somebody measures gradients by micro-batch here.
        terms: Of those who do.
        steps_late: Stages of this rank are to be stepped when all are through.
        limit_seconds: How long to wait for another rank.

    Raises:
        TransferError: A rank did not come.
    """
    bits, dtype = 0, -1  # Records of other lengths, as those of a contract, are never taken for these five integers.
    if loss is not None and not failed:
        (bits,) = struct.unpack("<q", struct.pack("<d", float(loss)))
        dtype = _DTYPES.index(loss.dtype) if loss.dtype in _DTYPES else 0
    fingerprint = zlib.crc32(repr([tuple(each) for each in terms]).encode()) if terms else 0
    rows = exchange(
        [int(failed), bits, dtype, int(heard) + 2 * int(steps_late), fingerprint], group, limit_seconds=limit_seconds
    )
    known = next((row for row in rows if row[2] >= 0), None)
    value = None if known is None else struct.unpack("<d", struct.pack("<q", known[1]))[0]
    return Verdict(
        failed=[rank for rank, row in enumerate(rows) if row[0]],
        loss=value,
        dtype=_DTYPES[known[2]] if known else torch.float32,
        heard=[rank for rank, row in enumerate(rows) if row[3] & 1],
        is_heard_alike=len({row[4] for row in rows}) == 1,
        steps_late=any(row[3] & 2 for row in rows),
    )


def mean_loss(losses: Mapping[int, Tensor], shares: Mapping[int, Share]) -> Tensor:
    """Returns the mean over the samples of all micro-batches, added up in their order.

    Args:
        losses: Means of one element, by micro-batch; one at least.
        shares: Which parts of the mini-batch these are.
    """
    total: Tensor | None = None
    for number in sorted(losses):
        part = losses[number].reshape(()) * shares[number].weight
        total = part if total is None else total + part
    assert total is not None
    return total
