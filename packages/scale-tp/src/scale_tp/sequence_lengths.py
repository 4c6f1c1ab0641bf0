"""Lengths of the parts of a sequence that ranks hold between two sequence-parallel layers.

A rank sees the length of its own part only: with 2 positions it can't tell whether the sequence has 3 or 4. So every
function and layer that divides a sequence records the lengths by rank, and a gather looks them up by its own.
Ranks run the same layers in the same order, so all of them know the same. Where some rank had as much of two
different sequences, all ranks ask each other, in one small message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, GroupLike
from scale_core.compat import untraced
from scale_core.errors import TransferError
from scale_tp.parallel_state import tensor_parallel_group

# Lengths that none of so many divisions had are forgotten: more divisions than wait for their backward at any time, so
# that one batch of an odd length does not make the ranks ask for ever.
_NUM_REMEMBERED = 1 << 16


@dataclass
class _RecordedLengths:
    """The divisions that a group has recorded."""

    num_divisions: int = 0
    # Lengths by rank, with the number of the last division that had them; the oldest first.
    last_seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    # Lengths by this rank's own; None where they are ambiguous, or `is_current` is false.
    by_own: dict[int, tuple[int, ...]] | None = None
    is_current: bool = False

    def record(self, lengths: tuple[int, ...]) -> None:
        self.num_divisions += 1
        is_new = self.last_seen.pop(lengths, None) is None
        self.last_seen[lengths] = self.num_divisions
        oldest = next(iter(self.last_seen))
        is_stale = self.last_seen[oldest] <= self.num_divisions - _NUM_REMEMBERED
        if is_stale:  # At most one more comes with each division, so one goes.
            del self.last_seen[oldest]
        self.is_current = self.is_current and not is_new and not is_stale

    def lookup(self, rank: int, own: int) -> tuple[int, ...] | None:
        if not self.is_current:
            ambiguous = is_ambiguous(list(self.last_seen))
            self.by_own = None if ambiguous else {lengths[rank]: lengths for lengths in self.last_seen}
            self.is_current = True
        return None if self.by_own is None else self.by_own.get(own)


@checked_arguments
def record_sequence_lengths(lengths: Sequence[int], process_group: GroupLike = None) -> None:
    """Records the lengths of the parts of a sequence that something else has divided, for example a data loader.

    All ranks of the group call it before the forward that gets these parts. It is needed where lengths differ between
    the ranks, or from one batch to the next; sequences that scale-tp divides are recorded already.

    Args:
        lengths: How many positions each rank has, by rank.
        process_group: The ranks that divide the sequence; None is the model axis.

    Raises:
        ValueError: There is not one length for each rank.

    Examples:
        >>> from scale_tp import record_sequence_lengths
        >>> record_sequence_lengths([4])  # on two ranks [4, 3]: 4 positions on rank 0, 3 on rank 1

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ranks = tensor_parallel_group(process_group)
    if len(lengths) != ranks.size:
        raise ValueError(f"expected a length for each of {ranks.size} ranks, got {list(lengths)}")
    record_lengths(ranks, lengths)


@untraced
def record_lengths(group: Group, lengths: Sequence[int]) -> None:
    """Records how many positions each rank has of a sequence."""
    if group.process_group is not None:
        group.state.get_or_create(_RecordedLengths).record(tuple(lengths))


@untraced
def shard_lengths(group: Group, part: Tensor, dim: int) -> tuple[int, ...]:
    """Returns the lengths of all parts of a sequence by rank; `part` [..., positions, ...] is this rank's."""
    local_length = part.shape[dim]
    if group.process_group is None:
        return (local_length,)
    lengths = group.state.get_or_create(_RecordedLengths).lookup(group.rank, local_length)
    if lengths is not None:
        return lengths
    try:
        return tuple(row[0] for row in exchange([local_length], group))
    except TransferError as error:
        error.add_note(lengths_hint(group.rank, local_length))
        raise


def lengths_hint(rank: int, own: int) -> str:
    """Possible mistakes if ranks wait for each other at a gather of a sequence."""
    return (
        f"rank {rank} has {own} positions of the sequence. A rank whose part is as long as one of another sequence "
        "takes it for that, while others ask how long the parts are. Divide by "
        "scale_tp.megatron.scatter_to_sequence_parallel_region; or call scale_tp.record_sequence_lengths(lengths) on "
        "all ranks before parts that something else has divided, such as a loader of data, or that were cut or "
        "lengthened"
    )


def check_sequence_dim(what: str, name: str, shape: Sequence[int], dim: int) -> int:
    """Returns the dimension of the sequence counted from the first; `ValueError` if it has the features."""
    if not -len(shape) <= dim < len(shape) or dim % len(shape) == len(shape) - 1:
        raise ValueError(
            f"{what}: expected {name} to be one of the input's dimensions before its last, which are the features, got "
            f"{name}={dim} for an input {list(shape)}"
        )
    return dim % len(shape)


def is_ambiguous(known: Sequence[Sequence[int]]) -> bool:
    """Whether some rank has as much of two of these sequences; the answer is the same on all ranks.

    Example:
        >>> is_ambiguous([(2, 1), (3, 2)]), is_ambiguous([(2, 1), (2, 2)])
        (False, True)
    """
    return any(len(set(lengths)) < len(lengths) for lengths in zip(*known, strict=True))
