"""Cross entropy over logits divided along the vocabulary, without the full logits on any rank.

With m the largest logit and s the sum of exp(logit - m) over the vocabulary, the loss of a token is m + log(s) - its
target's logit. Each rank computes these three for its own shard, in fp32, some rows at a time; one message exchanges
them. The gradient, softmax minus one at the target, is computed from the logits as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, GroupLike
from scale_core.compat import untraced
from scale_core.device.streams import has_streams
from scale_tp.comm import accumulation_dtype, all_gather_along, to_accumulation_dtype
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.split import Split, check_size

Reduction: TypeAlias = Literal["none", "mean", "sum"]

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
    process_group: GroupLike = None,
) -> Tensor:
    """Returns the cross entropy of logits whose last dimension is divided between ranks.

    Args:
        vocab_parallel_logits: [..., words of this rank], as a `ColumnParallelLinear` without `gather_output`
            gives, or a slice of it, for example `logits[:, :-1]`. They are not changed or copied. Logits of
            all words, the same on all ranks as with `gather_output`, are an error.
        target: [...] of integers: words of the full vocabulary; the same on all ranks.
        weight: [vocabulary size], floating point, the same on all ranks. The loss of a target is multiplied by the
            weight of its word, and "mean" divides by the sum of these weights. Not together with label smoothing or a
            z-loss.
        ignore_index: Where the target is this, the loss is 0, and `"mean"` does not count it.
        label_smoothing: From 0 to 1, as in `torch.nn.functional.cross_entropy`.
        reduction: "none" gives a loss for each target, "sum" adds them, "mean" divides by those that count.
        z_loss: Factor of log(sum of exp(logits))^2, which is added to keep logits from drifting away.
        vocabulary_size: How many words all ranks have, divided as evenly as can be. None asks the other ranks for their
            numbers with one more small message, and raises if the logits are the same on all ranks.
        process_group: The ranks; None is the model axis of `initialize_model_parallel`, or only this process.

    Returns:
        [...], or a scalar; fp32, or fp64 where the logits are.

    Raises:
        TypeError: An argument that has to be a tensor or a number is none.
        ValueError: The shapes don't fit, options are invalid or contradict each other, or all ranks have the same
            logits of all words (on CUDA an error of the device).
        IndexError: A target is not a word (on CUDA, as in torch, an error of the device).

    Examples:
        >>> import torch
        >>> from scale_tp import vocab_parallel_cross_entropy
        >>> logits, target = torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=torch.long)
        >>> vocab_parallel_cross_entropy(logits, target, reduction="mean")
        tensor(2.0794)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ranks = tensor_parallel_group(process_group)
    check_logits(vocab_parallel_logits, target)
    check_options(label_smoothing, z_loss, ignore_index, reduction)
    if vocabulary_size is not None:
        check_size("vocabulary_size", vocabulary_size)
    width = vocab_parallel_logits.shape[-1]
    split = vocab_split(width, vocabulary_size, ranks)
    chunk_rows = max(1, _CHUNK_ELEMENTS // max(width, 1))
    ((start, _),) = split.ranges[ranks.rank]
    may_be_whole = vocabulary_size is None  # Else a rank with logits of all words is refused by their number.
    terms = LossTerms(ranks, start, split.total, ignore_index, label_smoothing, z_loss, chunk_rows, may_be_whole)
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


class LossTerms(NamedTuple):
    """The inputs of the loss in addition to the logits and the target."""

    group: Group
    start: int  # the first word of this rank
    vocabulary: int  # words of all ranks
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk_rows: int  # rows that are widened at once
    may_be_whole: bool = True  # whether the ranks may hold the same logits, of all words


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, terms: LossTerms) -> Tensor:
        counts = target != terms.ignore_index
        width = logits.shape[-1] if terms.may_be_whole else 0
        stats = local_stats(logits, target, counts, terms)
        largest, total, chosen, summed = reduce_stats(stats, terms.group, width)
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
        terms: LossTerms = ctx.terms
        width = logits.shape[-1]
        factor = grad.to(log_total.dtype).masked_fill(target == terms.ignore_index, 0)
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        local = target - terms.start
        is_local = (local >= 0) & (local < width) & (target != terms.ignore_index)
        for rows, chunk in row_chunks(logits, terms.chunk_rows):
            part = (chunk - log_total[rows, None]).exp_()
            if terms.z_loss:
                part.mul_(1 + 2 * terms.z_loss * log_total[rows, None])
            if terms.label_smoothing:
                part.sub_(terms.label_smoothing / terms.vocabulary)
            if width:
                hit = is_local[rows].to(part.dtype).mul_(terms.label_smoothing - 1).unsqueeze(1)
                part.scatter_add_(1, local[rows].masked_fill(~is_local[rows], 0).unsqueeze(1), hit)
            result.view(len(target), width)[rows] = part.mul_(factor[rows, None])
        return result, None, None


def local_stats(logits: Tensor, target: Tensor, counts: Tensor, terms: LossTerms) -> Tensor:
    """Returns [4, rows] of this rank's words: largest logit, sum of exponentials, target's logit, sum of logits."""
    width = logits.shape[-1]
    stats = logits.new_zeros(4, len(target), dtype=accumulation_dtype(logits.dtype))
    stats[0].fill_(-torch.inf)
    local = target - terms.start
    is_local = (local >= 0) & (local < width) & counts
    # A target that is no word is looked up out of range: torch raises, on this device as on any.
    no_word = counts & ((target < 0) | (target >= terms.vocabulary))
    column = local.masked_fill(~is_local, 0).masked_fill(no_word, max(width, 1))
    for rows, chunk in row_chunks(logits, terms.chunk_rows):
        part = to_accumulation_dtype(chunk)
        if width == 0:  # A rank without words takes part with one that can't come.
            part = part.new_full((len(part), 1), -torch.inf)
        elif terms.label_smoothing:
            stats[3, rows] = part.sum(1)
        stats[0, rows] = largest = part.amax(1)
        stats[2, rows] = _looked_up(part, column[rows], terms).masked_fill(~is_local[rows], 0)
        stats[1, rows] = (part - largest.masked_fill(largest == -torch.inf, 0).unsqueeze(1)).exp_().sum(1)
    return stats


def _looked_up(part: Tensor, place: Tensor, terms: LossTerms) -> Tensor:
    try:
        return part.gather(1, place.unsqueeze(1)).squeeze(1)
    except RuntimeError as error:  # The row has no such element.
        raise IndexError(
            f"expected targets to be words from 0 to {terms.vocabulary - 1}, or ignore_index={terms.ignore_index}, got "
            "another one"
        ) from error


def reduce_stats(own: Tensor, group: Group, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the same of all words; the ranks are added in their order. A `width` of 0 is not checked."""
    if group.size == 1:
        largest, total, chosen, summed = own
        return largest, total, chosen, summed
    by_rank = all_gather_along(own.unsqueeze(0), group, 0, [1] * group.size)
    if width and group.backend != "fake":
        check_not_gathered(by_rank, width, group)
    largest = by_rank[:, 0].amax(0)
    total, chosen, summed = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
    for its_largest, its_total, its_chosen, its_sum in by_rank:
        total = total + its_total * (its_largest - largest).exp()
        chosen, summed = chosen + its_chosen, summed + its_sum
    return largest, total, chosen, summed


def check_not_gathered(by_rank: Tensor, width: int, group: Group) -> None:
    """Refuses logits of all words, which are the same on all ranks: each word would count once for each rank.

    `by_rank` has the results of `local_stats`, [ranks, 4, rows]. Logits that are all equal, as of a head of zeros, tell
    nothing: there the sum of exponentials is the number of words.
    """
    stats = by_rank[:, :2]
    differ = (stats != stats[0]).any() | (stats[0, 1] == width).all()
    message = (
        f"expected logits of the words that rank {group.rank} of {group.size} has, got the same logits on all ranks, "
        f"of {width} words, as from a layer that gathers its output: build it with gather_output=False (in a plan, "
        "'colwise'), or take torch.nn.functional.cross_entropy; where they are parts, pass vocabulary_size"
    )
    if has_streams(by_rank.device):  # To look at the answer would wait for the device.
        torch._assert_async(differ, message)
    elif not bool(differ):
        raise ValueError(message)


def row_chunks(logits: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields `size` rows at a time of logits [..., words]: which rows, and a chunk [rows, words] not to be written to.

    A chunk is a view where the memory allows it. If rows are not contiguous, as in `logits[:, :-1]`, each chunk is
    copied separately, so that never all logits are copied at once.
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


def check_logits(logits: Tensor, target: Tensor) -> None:
    """Refuses logits and a target whose shapes, dtypes or devices do not fit each other."""
    for subject, value in (("logits", logits), ("a target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"expected {subject} to be a tensor, got {type(value).__name__}")
    if logits.dim() < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"expected logits [..., words of this rank] and a target [...], got {list(logits.shape)} and "
            f"{list(target.shape)}"
        )
    # Those of 8 bits are for products of matrices; torch computes nothing else with them.
    if not logits.is_floating_point() or logits.dtype.itemsize < 2:
        raise ValueError(f"expected logits of floating point, of 16 bits or more, got {logits.dtype}")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"expected a target of integers, the words, got {target.dtype}")
    if logits.device != target.device:
        raise ValueError(
            f"expected a target on the device of the logits, {logits.device}, got {target.device}: call target.to(...)"
        )


def check_options(label_smoothing: float, z_loss: float, ignore_index: int, reduction: str) -> None:
    """Refuses options of another type, or out of their range."""
    for option, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if not _is_number(value, Real):
            raise TypeError(f"expected {option} to be a number, got {value!r}")
    if not _is_number(ignore_index, Integral):
        raise TypeError(
            f"expected ignore_index to be an integer, got {ignore_index!r}: leave it out where every target counts"
        )
    if not math.isfinite(z_loss):
        raise ValueError(f"expected z_loss to be finite, got {z_loss}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"expected label_smoothing from 0 to 1, got {label_smoothing}")
    if reduction not in get_args(Reduction):
        raise ValueError(f"expected reduction to be one of {', '.join(get_args(Reduction))}, got {reduction!r}")


def _is_number(given: object, kind: type) -> bool:
    return isinstance(given, kind) and not isinstance(given, bool)


def vocab_split(width: int, vocabulary_size: int | None, group: Group) -> Split:
    """Returns the words of each rank; this one has `width` of them."""
    if vocabulary_size is None:
        if group.process_group is None:
            return Split.even(width, 1)
        # As many words here may be of another vocabulary than the last time, which only another rank can tell.
        return Split.of_sizes([row[0] for row in exchange([width], group)])
    split = Split.even(vocabulary_size, group.size)
    if split.sizes[group.rank] != width:
        raise ValueError(
            f"expected logits of {split.sizes[group.rank]} words on rank {group.rank}, of the {vocabulary_size} that "
            f"{group.size} ranks have, got {width}: divide the last layer in the same way, or leave vocabulary_size out"
        )
    return split


def check_weight(weight: Tensor, terms: LossTerms) -> None:
    """Refuses a weight of another shape or dtype, or together with label smoothing or a z-loss."""
    argument: object = weight
    if not isinstance(argument, Tensor):
        raise TypeError(f"expected weight to be a tensor, got {type(argument).__name__}")
    if weight.shape != (terms.vocabulary,) or not weight.is_floating_point():
        raise ValueError(
            f"expected weight to be [{terms.vocabulary}] of floating point, one number for each word of all ranks, got "
            f"{list(weight.shape)} of {weight.dtype}"
        )
    if terms.label_smoothing or terms.z_loss:
        argument = f"{terms.label_smoothing} and {terms.z_loss}"
        raise ValueError(f"expected weight without label_smoothing and z_loss, got {argument}: leave them out")
