"""How long the parts of a sequence are that the ranks hold between two layers.

A rank sees the length of its own part alone, and of 2 elements it can't tell whether the whole has 3 or 4. Whoever
divides a sequence knows, and tells it here; whoever puts it together asks here. Ranks run the same layers in the same
order, so all know the same. Only where the own part fits several sequences that were divided lately, on whatever rank,
all ask each other. Lately is long: what has been divided in a forward is asked for again where it is recomputed, and
one rank that has forgotten it would ask alone.

What a loader of data has divided nobody has told of, and it may have as many elements here as what was told. Autograd
knows it: such a part was not computed, position by position, from anything that divides. So all ask. Under `no_grad`,
and so in the forward of a reentrant checkpoint, nobody can tell. Whether to ask must not depend on one rank's length,
or one would ask alone; where it can't be helped, the error that ends the waiting says what it may come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_core.compat import untraced
from scale_tp.autograd_regions import division_of

T = TypeVar("T")

# Lengths that none of so many divisions had are forgotten: more than those of all that waits for its backward, so that
# a batch of an odd length does not make the ranks ask for ever.
_NUM_REMEMBERED = 1 << 16


@dataclass
class _Divided:
    """What a group has divided.

    Attributes:
        number: How many divisions there were.
        last: The lengths of the parts, by rank, with the number of the last division that had them; the oldest first.
        by_own: For each length on this rank, the lengths on all, if no rank can confuse them; None if one can, or if
            `is_known` is false.
        is_known: Whether `by_own` fits `last`.
    """

    number: int = 0
    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    by_own: dict[int, tuple[int, ...]] | None = None
    is_known: bool = False

    def tell(self, sizes: tuple[int, ...]) -> None:
        self.number += 1
        is_new = self.last.pop(sizes, None) is None
        self.last[sizes] = self.number
        oldest = next(iter(self.last))
        is_old = self.last[oldest] <= self.number - _NUM_REMEMBERED
        if is_old:  # One more comes with each division at most, so one goes.
            del self.last[oldest]
        self.is_known = self.is_known and not is_new and not is_old

    def found(self, rank: int, own: int) -> tuple[int, ...] | None:
        if not self.is_known:
            confused = may_be_confused(list(self.last))
            self.by_own = None if confused else {sizes[rank]: sizes for sizes in self.last}
            self.is_known = True
        return None if self.by_own is None else self.by_own.get(own)


_divided: WeakKeyDictionary[dist.ProcessGroup, _Divided] = WeakKeyDictionary()


def sequence_dim_of(what: str, name: str, shape: Sequence[int], dim: int) -> int:
    """Returns the dimension of the sequence, counted from the first.

    Args:
        what: What it is for, in an error.
        name: What its argument is called there.
        shape: Of the input, whose last dimension are the features.
        dim: The dimension; negative counts from the last.

    Raises:
        ValueError: There is none, or it is that of the features.
    """
    if not -len(shape) <= dim < len(shape) or dim % len(shape) == len(shape) - 1:
        raise ValueError(
            f"{what}: expected {name} to be one of the input's dimensions before its last, which are the features, got "
            f"{name}={dim} for an input {list(shape)}"
        )
    return dim % len(shape)


@untraced
def tell_parts(group: Group, sizes: Sequence[int]) -> None:
    """Records that a sequence has been divided into parts of these lengths, by rank. All ranks of the group do."""
    if group.process_group is not None:
        _divided.setdefault(group.process_group, _Divided()).tell(tuple(sizes))


@untraced
def parts_held(group: Group, part: Tensor, dim: int) -> tuple[int, ...]:
    """Returns the lengths of all parts of a sequence, by rank.

    Args:
        group: The ranks.
        part: [..., positions of this rank, ...].
        dim: The dimension of the sequence.

    Raises:
        TransferError: The ranks had to ask each other, and one did not answer.
        ValueError: The part was computed from one that was divided, and has another length than that.
    """
    own = part.shape[dim]
    if group.process_group is None:
        return (own,)
    known = _known_unasked(group, part, dim)
    if known is None:
        return _asked(group, own)
    if known[group.rank] != own:  # The others, whose length may fit, do not ask.
        raise ValueError(
            f"rank {group.rank} has {own} positions of what was computed from a sequence that was divided into "
            f"{list(known)} between the ranks: compute position by position with parts of one sequence, or gather what "
            "is of another one before, by scale_tp.gather_from_sequence_parallel_region"
        )
    return known


def _known_unasked(group: Group, part: Tensor, dim: int) -> tuple[int, ...] | None:
    """The lengths of all parts as far as they are known without a message: by autograd or, without it, by memory."""
    if torch.is_grad_enabled() and group.backend != "fake":
        return division_of(part, group, dim)
    return parts_remembered(group, part.shape[dim])


@untraced
def explained(gather: Callable[[], T], group: Group, part: Tensor, dim: int, sizes: Sequence[int]) -> T:
    """Gathers a sequence; where a rank did not come, and this one has not asked it before, the error says why.

    Args:
        gather: What gathers.
        group: The ranks.
        part: [..., positions of this rank, ...].
        dim: The dimension of the sequence.
        sizes: How many positions each rank has.
    """
    try:
        return gather()
    except TransferError as error:
        if _known_unasked(group, part, dim) == tuple(sizes):
            error.add_note(
                f"rank {group.rank} has {part.shape[dim]} positions of a sequence that was divided into {list(sizes)}, "
                f"as far as it knows without asking the others. {_cause()}"
            )
        raise


def parts_remembered(group: Group, own: int) -> tuple[int, ...] | None:
    """Returns the lengths of the only sequence of which this rank has held as much; None where all have to ask."""
    known = None if group.process_group is None else _divided.get(group.process_group)
    return None if known is None else known.found(group.rank, own)


def _asked(group: Group, own: int) -> tuple[int, ...]:
    try:
        return tuple(row[0] for row in exchange([own], group))
    except TransferError as error:
        error.add_note(
            f"rank {group.rank} asked how long the parts of a sequence are, of which it has {own}. Others may have "
            f"gone on by a sequence that they know. {_cause()}"
        )
        raise


def _cause() -> str:
    """Why one rank may ask, and another one not."""
    if torch.is_grad_enabled():
        return (
            "All ranks have to compute alike what they gather: one that cuts or lengthens its part alone, or puts "
            "another one in its place, is not seen by the others. Do so on all ranks, or before the sequence is divided"
        )
    return (
        "Without a graph, as under torch.no_grad() and in the forward of a reentrant checkpoint, ranks can't see that "
        "parts are new, such as those that a loader of data has divided. Divide by "
        "scale_tp.scatter_to_sequence_parallel_region, give all parts one length, or checkpoint with "
        "use_reentrant=False"
    )


def may_be_confused(known: Sequence[Sequence[int]]) -> bool:
    """Whether some rank can't tell by its own part which sequence it is of. The answer is the same on all ranks.

    Example:
        >>> may_be_confused([(2, 1), (3, 2)]), may_be_confused([(2, 1), (2, 2)])
        (False, True)
    """
    return any(len(set(own)) < len(own) for own in zip(*known, strict=True))
