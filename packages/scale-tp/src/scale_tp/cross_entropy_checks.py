"""What `vocab_parallel_cross_entropy` refuses, before anything is computed, and how many words each rank has."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from scale_core.exchange import exchange
from scale_core.group import Group
from scale_tp.cross_entropy_terms import Terms
from scale_tp.crossings import Leaving, is_elementwise
from scale_tp.split_sizes import Split

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
