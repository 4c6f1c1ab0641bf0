"""shard_storage.py: where nothing is said, a buffer is where its parameters are."""

from __future__ import annotations

import pytest
import torch

from scale_core.comm.group import Group
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.layout import FlatLayout
from scale_core.flat.shard_storage import Devices, Groups

CPU, META = torch.device("cpu"), torch.device("meta")  # Any second device will do.


@pytest.mark.parametrize(
    "given, shard, compute, reduced",
    [
        (Devices(), META, META, META),
        (Devices(shard=CPU), CPU, META, CPU),
        (Devices(shard=CPU, reduced=META), CPU, META, META),
        (Devices(compute=CPU), META, CPU, META),
    ],
)
def test_reduced_gradients_are_where_the_shard_is_unless_it_is_said_otherwise(
    given: Devices, shard: torch.device, compute: torch.device, reduced: torch.device
) -> None:
    assert given.resolved(META) == Devices(shard, compute, reduced)


def test_without_a_word_a_buffer_is_shared_with_nobody() -> None:
    assert Groups() == Groups(Group(), Group(), None)


def test_a_buffer_takes_one_group_or_what_says_who_shards_and_who_copies() -> None:
    params = [torch.nn.Parameter(torch.randn(3, 2))]
    layout = FlatLayout.plan(["weight"], [(3, 2)], 1)
    for groups in (Group(), Groups(Group(), Group())):
        buffer = FlatBuffer(["weight"], params, layout, groups)
        assert buffer.groups == Groups(Group(), Group())
