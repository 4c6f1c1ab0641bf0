"""Cross entropy over logits of which each rank has some words, without the whole logits on any rank.

With m the largest logit and s the sum of exp(logit - m) over all words, the loss of a token is m + log(s) - its
target's logit. Each rank finds these three for its own words, in fp32, some rows at a time; one message tells them to
the others. The gradient, softmax minus one at the target, is computed from the logits as they are: nobody has written
to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.compat import untraced
from scale_core.group import GroupLike
from scale_tp.cross_entropy_checks import (
    Reduction,
    check_logits,
    check_options,
    check_weight,
    refuse_gathered,
    words_of_all,
)
from scale_tp.cross_entropy_terms import Terms, all_words, chunks, own_words
from scale_tp.groups import layer_group
from scale_tp.split_sizes import check_size

_CHUNK_ELEMENTS = 1 << 22
"""So many logits are widened at once, 16 MB of them, unless a row is longer."""


@untraced
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "none",
    z_loss: float = 0.0,
    vocabulary_size: int | None = None,
    chunk_rows: int | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Returns the cross entropy of logits whose last dimension is divided between ranks.

    Args:
        vocab_parallel_logits: [..., words of this rank], such as a `ColumnParallelLinear` without `gather_output`
            gives, or a slice of it such as `logits[:, :-1]`. They are not changed, and not copied as a whole. Logits of
            all words, as with `gather_output`, are refused where autograd knows of it: under `no_grad` nobody can tell
            them from those of a rank, and the loss would be of each word several times.
        target: [...] of integers: words of the whole vocabulary; the same on all ranks.
        weight: [words of all ranks], floating point, the same on all ranks: the loss of a target is multiplied by that
            of its word, and "mean" divides by the sum of them. Not together with label smoothing or a z-loss.
        ignore_index: Where the target is this, the loss is 0, and `"mean"` does not count it.
        label_smoothing: From 0 to 1, as in `torch.nn.functional.cross_entropy`.
        reduction: "none" gives a loss for each target, "sum" adds them, "mean" divides by those that count.
        z_loss: Adds so many times log(sum of exp(logits))^2, which keeps logits from drifting away.
        vocabulary_size: How many words all ranks have, divided as evenly as can be. None asks the other ranks how many
            they have, in one small message more.
        chunk_rows: How many rows are widened to fp32 at once; None is as many as take 16 MB.
        group: The ranks; None is the model axis of `initialize_model_parallel`, or this process alone.

    Returns:
        [...], or a scalar; fp32, or fp64 where the logits are.

    Raises:
        TypeError: What has to be a tensor or a number is none.
        ValueError: The shapes don't fit, or an option makes no sense, alone or with another one.
        IndexError: A target is no word (on CUDA, as in torch, an error of the device).
    """
    ranks = layer_group(group)
    check_logits(vocab_parallel_logits, target)
    check_options(label_smoothing, z_loss, ignore_index, reduction)
    for what, size, least in (("chunk_rows", chunk_rows, 1), ("vocabulary_size", vocabulary_size, 0)):
        if size is not None:
            check_size(what, size, least)
    refuse_gathered(vocab_parallel_logits, ranks)
    width = vocab_parallel_logits.shape[-1]
    split = words_of_all(width, vocabulary_size, ranks)
    chunk = chunk_rows or max(1, _CHUNK_ELEMENTS // max(width, 1))
    ((start, _),) = split.ranges[ranks.rank]
    terms = Terms(ranks, start, split.total, ignore_index, label_smoothing, z_loss, chunk)
    if weight is not None:
        check_weight(weight, terms)
    target = target.long()  # As torch looks words up; smaller integers may not reach a rank's number of words.
    losses: Tensor = _CrossEntropy.apply(vocab_parallel_logits, target.reshape(-1), terms)  # type: ignore[no-untyped-call]
    counts = target.reshape(-1) != ignore_index
    if weight is not None:
        counts = weight.to(losses.dtype)[target.reshape(-1).masked_fill(~counts, 0)].masked_fill(~counts, 0)
        losses = losses * counts
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / counts.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, terms: Terms) -> Tensor:
        counts = target != terms.ignore_index
        largest, total, chosen, summed = all_words(own_words(logits, target, counts, terms), terms.group)
        log_total = largest + total.log()
        losses = log_total - chosen
        if terms.label_smoothing:
            even = log_total - summed / terms.vocabulary
            losses = (1 - terms.label_smoothing) * losses + terms.label_smoothing * even
        if terms.z_loss:
            losses = losses + terms.z_loss * log_total.square()
        ctx.save_for_backward(logits, target, log_total)
        ctx.terms = terms
        return losses.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, target, log_total = ctx.saved_tensors
        terms: Terms = ctx.terms
        width = logits.shape[-1]
        factor = grad.to(log_total.dtype).masked_fill(target == terms.ignore_index, 0)
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        local = target - terms.start
        own = (local >= 0) & (local < width) & (target != terms.ignore_index)
        for rows, chunk in chunks(logits, terms.chunk):
            part = (chunk - log_total[rows, None]).exp_()
            if terms.z_loss:
                part.mul_(1 + 2 * terms.z_loss * log_total[rows, None])
            if terms.label_smoothing:
                part.sub_(terms.label_smoothing / terms.vocabulary)
            if width:
                hit = own[rows].to(part.dtype).mul_(terms.label_smoothing - 1).unsqueeze(1)
                part.scatter_add_(1, local[rows].masked_fill(~own[rows], 0).unsqueeze(1), hit)
            result.view(len(target), width)[rows] = part.mul_(factor[rows, None])
        return result, None, None
