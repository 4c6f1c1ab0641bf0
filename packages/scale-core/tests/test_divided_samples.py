"""Whether ranks have parts of the same samples."""

from __future__ import annotations

import pytest

from scale_core import divided_samples
from scale_core.comm.group import Group
from scale_core.divided_samples import divide_samples


def test_the_ranks_are_known_inside_of_the_block_alone_also_after_an_error() -> None:
    outer, inner = Group(0, 2, None, "fake", (0, 1)), Group(0, 2, None, "fake", (0, 2))
    with divide_samples(outer):
        with pytest.raises(KeyError), divide_samples(inner):
            assert divided_samples.active_group is inner
            raise KeyError
        assert divided_samples.active_group is outer
    assert divided_samples.active_group is None
