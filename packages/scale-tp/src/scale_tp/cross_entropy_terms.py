"""What ranks tell each other of their words for a cross entropy: arithmetic on logits, and one message.

Some rows are widened at a time. With m the largest logit and s the sum of exp(logit - m), these two are found for each
rank's words, with the target's logit and the sum of logits; and from those of all ranks the same of all words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core.group import Group
from scale_tp.moves import gather_along
from scale_tp.wide import wide, wide_dtype


class Terms(NamedTuple):
    """What the loss is made of beside the logits.

    Attributes:
        group: The ranks.
        start: The first word of this rank.
        vocabulary: How many words all ranks have.
        ignore_index: A target that means no word.
        label_smoothing: How much of the target is spread evenly over all words.
        z_loss: The factor of log(s)^2.
        chunk: How many rows are widened at once.
    """

    group: Group
    start: int
    vocabulary: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk: int


def own_words(logits: Tensor, target: Tensor, counts: Tensor, terms: Terms) -> Tensor:
    """Largest logit, sum of exponentials, target's logit and sum of logits, of this rank's words: [4, rows], wide."""
    width = logits.shape[-1]
    found = logits.new_zeros(4, len(target), dtype=wide_dtype(logits.dtype))
    found[0].fill_(-torch.inf)
    local = target - terms.start
    own = (local >= 0) & (local < width) & counts
    # A target that is no word is looked up where there is nothing: torch says so, on this device as on any.
    no_word = counts & ((target < 0) | (target >= terms.vocabulary))
    place = local.masked_fill(~own, 0).masked_fill(no_word, max(width, 1))
    for rows, chunk in chunks(logits, terms.chunk):
        part = wide(chunk)
        if width == 0:  # A rank without words takes part with one that can't come.
            part = part.new_full((len(part), 1), -torch.inf)
        elif terms.label_smoothing:
            found[3, rows] = part.sum(1)
        found[0, rows] = largest = part.amax(1)
        found[2, rows] = _looked_up(part, place[rows], terms).masked_fill(~own[rows], 0)
        found[1, rows] = (part - largest.masked_fill(largest == -torch.inf, 0).unsqueeze(1)).exp_().sum(1)
    return found


def _looked_up(part: Tensor, place: Tensor, terms: Terms) -> Tensor:
    try:
        return part.gather(1, place.unsqueeze(1)).squeeze(1)
    except RuntimeError as error:  # torch tells of a place that there is not.
        raise IndexError(
            f"expected targets to be words from 0 to {terms.vocabulary - 1}, or ignore_index={terms.ignore_index}, got "
            "another one"
        ) from error


def all_words(own: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of all words, from that of each rank's; the ranks are added in their order."""
    if group.size == 1:
        largest, total, chosen, summed = own
        return largest, total, chosen, summed
    by_rank = gather_along(own.unsqueeze(0), group, 0, [1] * group.size)
    largest = by_rank[:, 0].amax(0)
    total, chosen, summed = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
    for its_largest, its_total, its_chosen, its_sum in by_rank:
        total = total + its_total * (its_largest - largest).exp()
        chosen, summed = chosen + its_chosen, summed + its_sum
    return largest, total, chosen, summed


def chunks(logits: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """So many rows at a time of logits [..., words]: which rows, and the chunk [rows, words], not to be written to.

    A chunk is a view where the memory allows it. Of logits like `logits[:, :-1]`, whose rows do not stand behind each
    other, each chunk is collected by itself, so that all of them are never copied at once.
    """
    *outer, width = logits.shape
    total = math.prod(outer)
    try:
        flat: Tensor | None = logits.view(total, width)
    except RuntimeError:  # torch's answer to whether there is such a view.
        flat = None
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        if flat is not None:
            yield rows, flat[rows]
        else:
            numbers = torch.arange(rows.start, rows.stop, device=logits.device)
            yield rows, logits[torch.unravel_index(numbers, outer)]
