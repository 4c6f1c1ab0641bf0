"""Cross entropy over logits of which each rank has some words, without the whole logits on any rank.

With m the largest logit and s the sum of exp(logit - m) over all words, the loss of a token is m + log(s) - its
target's logit. Each rank finds these three for its own words, in fp32, some rows at a time; one message tells them to
the others. The gradient, softmax minus one at the target, is computed from the logits as they are: nobody has written
to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group, GroupLike
from scale_core.compat import untraced
from scale_tp.autograd_regions import Leaving, is_elementwise
from scale_tp.comm import gather_along, wide, wide_dtype
from scale_tp.parallel_state import layer_group
from scale_tp.split import Split, check_size

# What ranks tell each other of their words for a cross entropy: arithmetic on logits, and one message.
#
# Some rows are widened at a time. With m the largest logit and s the sum of exp(logit - m), these two are found for
# each rank's words, with the target's logit and the sum of logits; and from those of all ranks the same of all words.


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


Reduction = Literal["none", "mean", "sum"]

_JOINING = ("CatBackward0", "StackBackward0", "IndexBackward0")
"""What puts rows of several tensors beside each other, or picks some, as autograd calls it."""


def check_logits(logits: Tensor, target: Tensor) -> None:
    """Refuses logits and a target that do not fit each other.

    Raises:
        TypeError: One is no tensor.
        ValueError: Their shapes, dtypes or devices do not fit.
    """
    for what, given in (("logits", logits), ("a target", target)):
        if not isinstance(given, Tensor):
            raise TypeError(f"expected {what} to be a tensor, got {type(given).__name__}")
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
    """Refuses options that make no sense.

    Raises:
        TypeError: One is no number.
        ValueError: One is out of its range.
    """
    for what, given in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if not _is_number(given, Real):
            raise TypeError(f"expected {what} to be a number, got {given!r}")
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


def refuse_gathered(logits: Tensor, group: Group) -> None:
    """Refuses logits of all words, as far as autograd knows: each word would count once for each rank."""
    seen: set[Any] = set()
    waiting: list[Any] = [logits.grad_fn] if group.size > 1 else []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if issubclass(getattr(node, "_forward_cls", object), Leaving):
            dim, sizes = getattr(node, "place", (None, ()))
            if dim == -1 and sum(sizes) == logits.shape[-1] and node.ranks.ranks == group.ranks:
                raise ValueError(
                    f"expected logits of the words that rank {group.rank} of {group.size} has, got all {sum(sizes)}, "
                    "from a layer that gathers its output: build it with gather_output=False (in a plan, 'colwise'), "
                    "or take torch.nn.functional.cross_entropy"
                )
        # What changes shape, dtype or scale, chooses or joins, and no product of matrices.
        elif len(node.next_functions) == 1 or is_elementwise(node) or node.name() in _JOINING:
            waiting += [before for before, _ in node.next_functions]


def words_of_all(width: int, vocabulary_size: int | None, group: Group) -> Split:
    """Which words each rank has, of which this one has `width`."""
    if vocabulary_size is None:
        if group.process_group is None:
            return Split.even(width, 1)
        # As many words here may be of another vocabulary than the last time, which only another rank can tell.
        return Split.of_sizes([row[0] for row in exchange([width], group)])
    split = Split.even(vocabulary_size, group.size)
    if split.sizes[group.rank] != width:
        raise ValueError(
            f"expected logits of {split.sizes[group.rank]} words on rank {group.rank}, of the {vocabulary_size} that "
            f"{group.size} ranks have, got {width}: divide the last layer alike, or leave vocabulary_size out"
        )
    return split


def check_weight(weight: Tensor, terms: Terms) -> None:
    """Refuses weights of words that are none, or that stand beside options with which they have no meaning.

    Raises:
        TypeError: They are no tensor.
        ValueError: They are not one number for each word, or an option stands beside them.
    """
    given: object = weight
    if not isinstance(given, Tensor):
        raise TypeError(f"expected weight to be a tensor, got {type(given).__name__}")
    if weight.shape != (terms.vocabulary,) or not weight.is_floating_point():
        raise ValueError(
            f"expected weight to be [{terms.vocabulary}] of floating point, one number for each word of all ranks, got "
            f"{list(weight.shape)} of {weight.dtype}"
        )
    if terms.label_smoothing or terms.z_loss:
        raise ValueError(
            f"expected weight without label_smoothing and z_loss, got {terms.label_smoothing} and {terms.z_loss}: "
            "leave them out"
        )


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
