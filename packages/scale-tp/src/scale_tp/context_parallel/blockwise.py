"""Attention of some queries over some keys, so that the results over several sets of keys can be merged.

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


class Attended(NamedTuple):
    """What queries have seen so far.

    Attributes:
        output: [batch, key-value heads, queries per key-value head, query positions, value size], fp32 or wider: the
            mean of the values, weighted by softmax.
        log_sum: The same without the last dimension: the log of the sum of the exponentials of the scores; -inf where
            nothing has been seen.
    """

    output: Tensor
    log_sum: Tensor


def check_attention_inputs(what: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuses shapes and dtypes that do not fit each other, before anything is sent.

    Raises:
        ValueError: They do not.
    """
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{what}: expected [batch, heads, positions, head size] each, got {shapes}")
    alike = key.shape[:3] == value.shape[:3] and query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]
    if not alike:
        raise ValueError(f"{what}: expected one batch, the same positions and one head size, got {shapes}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"{what}: expected heads that are a multiple of the key-value heads, got {shapes}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(
            f"{what}: expected one floating-point dtype, got query {query.dtype}, key {key.dtype}, value {value.dtype}"
        )


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, diagonal: bool) -> Attended:
    """Lets queries look at keys.

    Args:
        query: [batch, key-value heads, queries per key-value head, query positions, head size], fp32 or wider.
        key: [batch, key-value heads, key positions, head size], of that dtype.
        value: [batch, key-value heads, key positions, value size], of that dtype.
        scale: What the scores are multiplied by.
        diagonal: Query number i sees the keys 0 to i alone; then there are as many of these as of those.
    """
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    log_sum = query.new_empty(query.shape[:-1])
    for rows, seen in _pieces(query, key, diagonal):
        scores = _scores(query, key, rows, seen, scale, diagonal)
        log_sum[..., rows] = scores.logsumexp(-1)
        scores.sub_(log_sum[..., rows, None]).exp_()
        output[..., rows, :] = scores @ value[:, :, None, :seen]
    return Attended(output, log_sum)


def merge(total: Attended, rows: slice, part: Attended) -> None:
    """Adds what the queries `rows` have seen in another set of keys to what they have seen before, in place."""
    output, log_sum = total.output[..., rows, :], total.log_sum[..., rows]
    merged = torch.logaddexp(log_sum, part.log_sum)
    output.mul_((log_sum - merged).exp_()[..., None]).add_(part.output * (part.log_sum - merged).exp_()[..., None])
    log_sum.copy_(merged)


def attend_backward(
    gradient: Tensor,
    offset: Tensor,
    log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what a block contributes to the gradients, from the merged results over all keys.

    Args:
        gradient: [batch, key-value heads, queries per key-value head, query positions, value size], the gradient of
            the merged output.
        offset: The same without the last dimension: the sum of `gradient` times the merged output over that.
        log_sum: The same: as merged.
        query: As in `attend`.
        key: As in `attend`.
        value: As in `attend`.
        scale: As in `attend`.
        diagonal: As in `attend`.

    Returns:
        The gradients of the query, the key and the value, in their shapes.
    """
    of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, seen in _pieces(query, key, diagonal):
        weights = _scores(query, key, rows, seen, scale, diagonal).sub_(log_sum[..., rows, None]).exp_()
        given = gradient[..., rows, :]
        # The heads that share a key sum into it.
        of_value[:, :, :seen] += (weights.transpose(-1, -2) @ given).sum(2)
        of_scores = (given @ value[:, :, None, :seen].transpose(-1, -2)).sub_(offset[..., rows, None])
        of_scores.mul_(weights).mul_(scale)
        of_query[..., rows, :] = of_scores @ key[:, :, None, :seen]
        of_key[:, :, :seen] += (of_scores.transpose(-1, -2) @ query[..., rows, :]).sum(2)
    return of_query, of_key, of_value


def _scores(query: Tensor, key: Tensor, rows: slice, seen: int, scale: float, diagonal: bool) -> Tensor:
    scores = (query[..., rows, :] @ key[:, :, None, :seen].transpose(-1, -2)).mul_(scale)
    if diagonal:
        # Of the keys that the piece sees, all but the last ones are seen by each of its queries.
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + rows.start)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _pieces(query: Tensor, key: Tensor, diagonal: bool) -> Iterator[tuple[slice, int]]:
    """Stretches of the queries, and how many keys the last query of each sees."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    heads = max(1, query.shape[0] * query.shape[1] * query.shape[2])
    length = max(1, min(num_queries, _PIECE // (heads * max(1, num_keys))))
    if diagonal:
        length = max(1, min(length, -(-num_queries // 4)))  # The later keys are then not computed for the first ones.
    for start in range(0, num_queries, length):
        stop = min(start + length, num_queries)
        yield slice(start, stop), stop if diagonal else num_keys
