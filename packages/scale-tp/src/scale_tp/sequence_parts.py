"""How long the parts of a sequence are that the ranks hold between two layers.

A rank sees the length of its own part alone, and of 2 elements it can't tell whether the whole has 3 or 4. Whoever
divides a sequence knows, and tells it here; whoever puts it together asks here. Ranks run the same layers in the same
order, so all know the same. Only where the own part fits several sequences that were divided lately, on whatever rank,
all ask each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from scale_core.compat import untraced
from scale_core.exchange import exchange
from scale_core.group import Group

# So many divisions are remembered: those of a layer or two, which a batch of another length has soon replaced.
_NUM_REMEMBERED = 16

_divided: WeakKeyDictionary[dist.ProcessGroup, deque[tuple[int, ...]]] = WeakKeyDictionary()


@untraced
def tell_parts(group: Group, sizes: Sequence[int]) -> None:
    """Records that a sequence has been divided into parts of these lengths, by rank. All ranks of the group do."""
    if group.process_group is not None:
        _divided.setdefault(group.process_group, deque(maxlen=_NUM_REMEMBERED)).append(tuple(sizes))


@untraced
def parts_held(group: Group, own: int) -> tuple[int, ...]:
    """Returns the lengths of all parts of a sequence, by rank, of which this rank holds `own` elements.

    Raises:
        TransferError: The ranks had to ask each other, and one did not answer.
    """
    if group.process_group is None:
        return (own,)
    known = list(dict.fromkeys(_divided.get(group.process_group, ())))
    found = [sizes for sizes in known if sizes[group.rank] == own]
    if len(found) == 1 and not may_be_confused(known):
        return found[0]
    return tuple(row[0] for row in exchange([own], group))


def may_be_confused(known: Sequence[Sequence[int]]) -> bool:
    """Whether some rank can't tell by its own part which sequence it is of. The answer is the same on all ranks.

    Example:
        >>> may_be_confused([(2, 1), (3, 2)]), may_be_confused([(2, 1), (2, 2)])
        (False, True)
    """
    return any(len(set(own)) < len(own) for own in zip(*known, strict=True))
