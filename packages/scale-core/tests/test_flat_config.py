"""config.py: where nothing is said, a buffer is where its parameters are."""

from __future__ import annotations

import pytest
import torch

from scale_core.comm.group import Group
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy, ShardGroups
from scale_core.flat.layout import FlatLayout

CPU, META = torch.device("cpu"), torch.device("meta")  # Any second device will do.


@pytest.mark.parametrize(
    "given, shard, compute, reduced",
    [
        (DevicePolicy(), META, META, META),
        (DevicePolicy(shard=CPU), CPU, META, CPU),
        (DevicePolicy(shard=CPU, reduced=META), CPU, META, META),
        (DevicePolicy(compute=CPU), META, CPU, META),
    ],
)
def test_reduced_gradients_are_where_the_shard_is_by_default(
    given: DevicePolicy, shard: torch.device, compute: torch.device, reduced: torch.device
) -> None:
    assert given.resolved(META) == DevicePolicy(shard, compute, reduced)


def test_without_a_word_a_buffer_is_shared_with_nobody() -> None:
    assert ShardGroups() == ShardGroups(Group(), Group(), None)


def test_a_buffer_takes_a_group_or_one_for_shards_and_copies() -> None:
    params = [torch.nn.Parameter(torch.randn(3, 2))]
    layout = FlatLayout.plan(["weight"], [(3, 2)], 1)
    for groups in (Group(), ShardGroups(Group(), Group())):
        buffer = FlatBuffer(["weight"], params, layout, groups)
        assert buffer.groups == ShardGroups(Group(), Group())
