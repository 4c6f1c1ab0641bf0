"""collectives.py: ranks that are at different places never read each other's data."""

from __future__ import annotations

import time

import pytest
import torch

from scale_core.comm.collectives import LONGEST_RECORD, UNIT_TAGS, UNTAGGED, all_gather
from scale_core.comm.group import group_of
from scale_core.errors import TransferError


@pytest.mark.ranks(2)
def test_ranks_with_different_tags_time_out() -> None:
    group = group_of()
    output = torch.full((4,), -1.0)
    pending = all_gather(output, torch.full((2,), float(group.rank)), group, tag=5 + group.rank)
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        pending.wait(1.0)
    assert time.monotonic() - began < 60
    other = 1 - group.rank
    assert output[2 * other : 2 * other + 2].tolist() == [-1, -1]  # Nothing of the other's arrived.
    with pytest.raises(TransferError, match="has failed before"):
        pending.wait()
    assert caught.value.op == "all_gather" and caught.value.peer == other
    assert str(caught.value).startswith(f"all_gather with rank {other} failed: ")


def test_tags_of_data_records_and_units_are_disjoint() -> None:
    records = range(1, LONGEST_RECORD + 2)  # One more than the length: a record may be empty.
    assert records[0] > UNTAGGED and records[-1] < UNIT_TAGS[0]
    assert UNIT_TAGS[-1] == (1 << 31) - 1  # Gloo's tags are signed, of 32 bits.
