"""Attention over blocks of keys, with results that can be merged (online softmax).

Softmax over all keys is a weighted mean of the softmaxes over parts of them, and the weights follow from the log of
each part's sum of exponentials. (Online softmax, arXiv 1805.02867; ring attention, arXiv 2310.01889.) So a block
returns both, and its backward needs no more than the merged ones.

All is computed in fp32 at least. The queries are taken in pieces, so that the scores of a block never exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Scores of one piece: 4 Mi elements are 16 MiB of fp32, up to which a CPU's temporaries cost nothing extra.
_PIECE = 1 << 22


class PartialAttention(NamedTuple):
    """The attention of queries over the keys so far."""

    # [batch, key-value heads, queries per key-value head, query positions, value size], fp32 or wider: the mean of
    # the values, weighted by softmax.
    output: Tensor
    lse: Tensor


def check_attention_inputs(what: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuses shapes and dtypes that do not fit each other, before anything is sent."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{what}: expected [batch, heads, positions, head size] each, got {shapes}")
    fits = key.shape[:3] == value.shape[:3] and query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]
    if not fits:
        raise ValueError(f"{what}: expected one batch, the same positions and one head size, got {shapes}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"{what}: expected heads that are a multiple of the key-value heads, got {shapes}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(
            f"{what}: expected one floating-point dtype, got query {query.dtype}, key {key.dtype}, value {value.dtype}"
        )


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, diagonal: bool, hidden: Tensor | None = None
) -> PartialAttention:
    """Attention of a query block [batch, key-value heads, queries per key-value head, positions, head size] over keys.

    Keys and values are [batch, key-value heads, key positions, head or value size]; all have one dtype, fp32 or wider.
    `diagonal`: query number i sees the keys 0 to i alone. `hidden` [batch, key positions] are keys that none sees; a
    query that sees no key has the output 0, as in torch.
    """
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    lse = query.new_empty(query.shape[:-1])
    for rows, seen in _pieces(query, key, diagonal):
        scores = _scores(query, key, rows, seen, scale, diagonal, hidden)
        lse[..., rows] = scores.logsumexp(-1)
        scores.sub_(_finite(lse[..., rows, None])).exp_()
        output[..., rows, :] = scores @ value[:, :, None, :seen]
    return PartialAttention(output, lse)


def merge_partial(total: PartialAttention, rows: slice, part: PartialAttention) -> None:
    """Merges the attention of the queries `rows` over another block of keys into the total, in place."""
    output, lse = total.output[..., rows, :], total.lse[..., rows]
    merged = torch.logaddexp(lse, part.lse)
    finite = _finite(merged)
    output.mul_((lse - finite).exp_()[..., None]).add_(part.output * (part.lse - finite).exp_()[..., None])
    lse.copy_(merged)


def block_attention_backward(
    gradient: Tensor,
    offset: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    diagonal: bool,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a block's share of the gradients of query, key and value, from the merged results over all keys.

    `gradient` is the gradient of the merged output, `offset` the sum of `gradient` times that output over the last
    dimension, and `lse` as merged.
    """
    of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, seen in _pieces(query, key, diagonal):
        scores = _scores(query, key, rows, seen, scale, diagonal, hidden)
        weights = scores.sub_(_finite(lse[..., rows, None])).exp_()
        grad_rows = gradient[..., rows, :]
        # The heads that share a key sum into it.
        of_value[:, :, :seen] += (weights.transpose(-1, -2) @ grad_rows).sum(2)
        of_scores = (grad_rows @ value[:, :, None, :seen].transpose(-1, -2)).sub_(offset[..., rows, None])
        of_scores.mul_(weights).mul_(scale)
        of_query[..., rows, :] = of_scores @ key[:, :, None, :seen]
        of_key[:, :, :seen] += (of_scores.transpose(-1, -2) @ query[..., rows, :]).sum(2)
    return of_query, of_key, of_value


def _finite(lse: Tensor) -> Tensor:
    """With 0 in the place of the -inf of queries that have seen no key, whose scores are -inf as well."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _scores(
    query: Tensor, key: Tensor, rows: slice, seen: int, scale: float, diagonal: bool, hidden: Tensor | None
) -> Tensor:
    scores = (query[..., rows, :] @ key[:, :, None, :seen].transpose(-1, -2)).mul_(scale)
    if diagonal:
        # Of the keys that the piece sees, all but the last ones are seen by each of its queries.
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + rows.start)
        scores.masked_fill_(later, -torch.inf)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None, None, None, :seen], -torch.inf)
    return scores


def _pieces(query: Tensor, key: Tensor, diagonal: bool) -> Iterator[tuple[slice, int]]:
    """Slices of the queries, and how many keys the last query of each sees."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    heads = max(1, query.shape[0] * query.shape[1] * query.shape[2])
    length = max(1, min(num_queries, _PIECE // (heads * max(1, num_keys))))
    if diagonal:
        length = max(1, min(length, -(-num_queries // 4)))  # The later keys are then not computed for the first ones.
    for start in range(0, num_queries, length):
        stop = min(start + length, num_queries)
        yield slice(start, stop), stop if diagonal else num_keys
