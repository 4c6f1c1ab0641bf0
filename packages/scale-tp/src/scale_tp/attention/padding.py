"""Padding of a divided sequence: each rank's mask of its own keys, put together over the ranks.

A mask over this rank's queries and keys can't say which keys of other ranks a query sees. But a mask that marks
padding alone says the same of a key to all queries, besides that a causal one hides later keys. So it is read back into
one bit for each key, which is all that has to be sent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scale_core import compat
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_tp.attention.load_balance import join_sequence

_WHAT = "scaled_dot_product_attention inside of context_parallel: expected "
_INSTEAD = (
    "for a causal model pass is_causal=True and no mask; for a model of transformers pass what "
    "scale_tp.get_batch_on_this_cp_rank(batch) returns"
)


class Padding(NamedTuple):
    """The meaning of all ranks' masks."""

    hidden: Tensor  # [batch, length] bool: keys of the full sequence that no query sees
    is_causal: bool  # no query sees a later key


def padding_mask(hidden: Tensor, *, is_causal: bool) -> Tensor:
    """A mask for `scaled_dot_product_attention` that hides these keys: True where a query sees a key.

    Args:
        hidden: [batch, keys] bool.
        is_causal: Query i sees the keys 0 to i alone.

    Returns:
        [batch, 1, keys, keys] bool; [batch, 1, 1, keys] if all queries see the same.
    """
    seen = ~hidden[:, None, None, :]
    return seen.expand(-1, -1, hidden.shape[1], -1).tril() if is_causal else seen


def gather_padding(mask: Tensor, batch: int, num_queries: int, ranks: Group) -> Padding:
    """Returns the padding of the full sequence from the ranks' masks, each of its own queries and keys.

    All ranks call it: one bit for each key is gathered.

    Args:
        mask: [queries, keys] with up to two dimensions before, or one query for all: bool, True where a query sees a
            key; or floating point, 0 there and -inf elsewhere.
        batch: Of the queries.
        num_queries: On this rank, as many as keys.
        ranks: The ranks that divide the sequence.

    Raises:
        ValueError: On all ranks: a mask of one of them says more than which keys are padding, or masks can't be
            distinguished apart from causal ones.
    """
    seen, marks_keys = _seen_of(mask)
    real = seen[:, 0, -1, :]
    rows = real[:, None, None, :]
    causal_rows = rows.expand(-1, seen.shape[1], num_queries, -1).tril()
    is_full = marks_keys & (seen == rows).all()
    is_causal = (
        marks_keys & (seen == causal_rows).all() if causal_rows.shape == seen.shape else torch.zeros_like(is_full)
    )
    flags = compat.values_of(torch.stack([is_full, is_causal]), simulated=[1.0, 0.0])  # One wait for the device.
    may_be_full, may_be_causal = map(bool, flags)
    replies = exchange([may_be_full, may_be_causal], ranks)
    full, causal = (all(row[index] for row in replies) for index in range(2))
    if full == causal:
        wrong = [str(rank) for rank, row in enumerate(replies) if not any(row)]
        problem = (
            f"{_WHAT}an attn_mask that marks padding alone, the same keys for all queries or with causal=True for all "
            f"later ones, got {list(mask.shape)} {mask.dtype}, and the mask of rank {' and '.join(wrong) or 'each'} "
        )
        raise ValueError(f"{problem}{'says more' if wrong else 'can be either'}: {_INSTEAD}")
    full_mask = join_sequence(real.expand(batch, -1).to(torch.uint8), ranks, dim=1)
    return Padding(full_mask == 0, causal)


def _seen_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that each query sees, [batch or 1, heads or 1, queries or 1, keys]; and [], whether it says no more."""
    mask = mask.detach().reshape((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype == torch.bool:
        return mask, mask.new_ones(())
    seen = mask == 0
    return seen, (seen | (mask == -torch.inf)).all()
