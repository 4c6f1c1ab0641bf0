"""context_parallel_group.py: the ranks that have parts of the same samples."""

from __future__ import annotations

import pytest

from scale_core.comm import context_parallel_group
from scale_core.comm.context_parallel_group import set_context_parallel_group
from scale_core.comm.group import Group


def test_the_ranks_are_known_inside_of_the_block_only() -> None:
    outer, inner = Group(0, 2, None, "fake", (0, 1)), Group(0, 2, None, "fake", (0, 2))
    with set_context_parallel_group(outer):
        with pytest.raises(KeyError), set_context_parallel_group(inner):
            assert context_parallel_group.active_group is inner
            raise KeyError
        assert context_parallel_group.active_group is outer
    assert context_parallel_group.active_group is None
