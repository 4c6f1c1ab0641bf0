"""The ranks that have parts of the same samples: of sequences, in context parallelism.

Measurements of gradients by sample ask for it: the gradient of a part belongs to no sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from scale_core.comm.group import Group
from scale_core.compat import graph_task_id


class PartsBackward(NamedTuple):
    """A backward pass through parts of samples."""

    task: int | None  # autograd's number of it
    ranks: tuple[int, ...]  # that had the parts


active_group: Group | None = None  # The ranks with parts of the same samples; None: each rank has full ones.
last_backward = PartsBackward(None, ())  # Each is a new object.


@contextmanager
def set_context_parallel_group(group: Group) -> Iterator[None]:
    """Inside, around forward and backward, the ranks of the group have parts of the same samples."""
    global active_group
    outer, active_group = active_group, group
    try:
        yield
    finally:
        active_group = outer


def note_backward(group: Group) -> None:
    """Called in a backward pass that goes through parts of samples, inside of the block or behind it."""
    global last_backward
    last_backward = PartsBackward(graph_task_id(), tuple(group.ranks))
