"""bucket.py: the user's parameters are views of one buffer, and pieces of it are updated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.compat import fake_tensors
from scale_core.device import buffer_pool
from scale_core.shard import Placement, shard_of
from scale_oss import OSS, OSSOptions
from scale_oss.buckets.bucket import Bucket
from scale_oss.buckets.partition import BucketPartition, assign_whole, cut_evenly

SHAPES: list[tuple[int, ...]] = [(5, 3), (4,), (), (2, 2)]


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def partition(world_size: int, whole: bool) -> BucketPartition:
    names = ["weight", "bias", "scale", "matrix"]
    if whole:
        return assign_whole(names, SHAPES, [index % world_size for index in range(4)], world_size)
    return cut_evenly(names, SHAPES, world_size)


def update_and_publish(whole: bool, wire_dtype: torch.dtype | None) -> None:
    group, mine, before = group_of(), params(), params()
    bucket = Bucket(mine, partition(group.size, whole), group)
    for step in (1, 2):
        with torch.no_grad():
            for piece in bucket.pieces:
                piece.add_(1 / 3)
        for index, param in enumerate(mine):
            param.grad = None if index == 2 else torch.ones_like(param)
        bucket.shard_full_grads()
        versions = [param._version for param in mine]
        bucket.all_gather(1 << 21, wire_dtype)
        bucket.wait()
        bucket.wait()  # Nothing to do.
        # What has no gradient is as it was, and autograd may still use what it has saved of it; rounded, all change.
        changed = [param._version > version for param, version in zip(mine, versions, strict=True)]
        assert changed == [True, True, wire_dtype is not None, True]
        for param, old in zip(mine, before, strict=True):
            expected = old.detach()
            for _ in range(step):
                expected = expected + 1 / 3
            assert torch.equal(param, expected if wire_dtype is None else expected.to(wire_dtype).float())
    with torch.no_grad():
        mine[0].fill_(0.7)
    bucket.sync_master()
    bucket.all_gather(1 << 21)  # Unrounded again: what was sent rounded was kept as it is.
    bucket.wait()
    assert bool((mine[0] == 0.7).all())
    for param, old in zip(mine[1:], before[1:], strict=True):
        assert torch.equal(param, old.detach() + 1 / 3 + 1 / 3)


@pytest.mark.ranks(2)
def test_the_memory_of_reduced_gradients_is_not_kept() -> None:
    """What a bucket's gradients took is free when they are reduced: other buckets differ in size, and can't take it."""
    group, mine = group_of(), [nn.Parameter(torch.zeros(1 << 19)) for _ in range(2)]
    bucket = Bucket(mine, cut_evenly(["first", "second"], [(1 << 19,)] * 2, group.size), group)
    for index, param in enumerate(mine):
        param.grad = torch.ones_like(param)
        bucket.gradient.accumulate(index)
    flat = bucket.gradient.flat
    assert flat is not None and flat.nbytes >= buffer_pool.SMALLEST_BYTES
    address = flat.data_ptr()
    del flat
    bucket.reduce(1 << 22)
    bucket.commit()
    assert all(storage.data_ptr() != address for storage in buffer_pool._idle)


def storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def test_parameters_and_pieces_are_in_one_buffer_and_marked() -> None:
    mine, before = params(), params()
    group = Group(rank=1, size=2)
    bucket = Bucket(mine, partition(2, False), group)
    assert storages([*bucket.pieces]) == storages([bucket.full])
    assert len(storages([param.data for param in mine])) == len(mine)  # What savers would otherwise take for tied.
    for index, (param, old, piece, span) in enumerate(zip(mine, before, bucket.pieces, bucket.spans, strict=True)):
        assert param.data_ptr() == bucket.view(index).data_ptr() and param._version == 0
        assert param.untyped_storage().nbytes() == param.nbytes
        assert torch.equal(param, old)
        assert torch.equal(piece.reshape(-1), old.reshape(-1)[span.start : span.stop])
        shard = shard_of(piece)
        assert shard is not None and (shard.start, shard.stop, shard.shape) == (span.start, span.stop, tuple(old.shape))
        assert [(axis.placement, axis.group) for axis in shard.axes] == [(Placement.SHARD, group)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.ranks(3, in_turn=True)
def test_updated_parts_reach_all_ranks(whole: bool) -> None:
    update_and_publish(whole, None)


@pytest.mark.ranks(2)
def test_parts_sent_rounded_are_kept_unrounded_by_their_owner() -> None:
    update_and_publish(False, torch.float16)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.ranks(3, in_turn=True)
def test_gradients_are_averaged_into_the_pieces(whole: bool) -> None:
    group, mine = group_of(), params()
    bucket = Bucket(mine, partition(group.size, whole), group)
    for times in (1, 2):
        for index, param in enumerate(mine):
            if index != 2:
                param.grad = torch.full_like(param, float(group.rank + index))
                bucket.gradient.accumulate(index)
                assert param.grad is None
        bucket.reduce(1 << 22)
        bucket.commit()
        for index, piece in enumerate(bucket.pieces):
            mean = 0.0 if index == 2 else sum(rank + index for rank in range(group.size)) / group.size
            assert piece.grad is not None and bool((piece.grad == times * mean).all())


def test_pieces_take_their_part_of_a_full_or_sparse_gradient() -> None:
    mine = params()
    bucket = Bucket(mine, partition(2, False), Group(rank=0, size=2))
    mine[0].grad = torch.arange(15.0).view(5, 3).to_sparse()
    mine[3].grad = torch.ones(2, 2).t()
    bucket.shard_full_grads()
    span = bucket.spans[0]
    piece = bucket.pieces[0]
    assert piece.grad is not None
    assert torch.equal(piece.grad.reshape(-1), torch.arange(float(span.start), float(span.stop)))
    assert bucket.pieces[1].grad is None


def test_a_parameter_whose_data_was_replaced_is_taken_back() -> None:
    mine = params()
    bucket = Bucket(mine, partition(1, False), Group())
    assert bucket.moved_indices() == []
    mine[1].data = torch.zeros(4)
    assert bucket.moved_indices() == [1]
    bucket.flatten([1])
    assert bucket.moved_indices() == [] and not bucket.pieces[1].any()
    mine[1].data.share_memory_()  # Other memory in the same storage.
    assert bucket.moved_indices() == [1]


@pytest.mark.simulation
def test_simulated_parameters_are_views() -> None:
    with fake_tensors():
        mine = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        bucket = Bucket(mine, partition(1, False), Group())
        assert storages([param.data for param in mine]) == storages([bucket.full]) and bucket.moved_indices() == []
        mine[1].data = torch.zeros(4)
        assert bucket.moved_indices() == [1]


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.ranks(3, in_turn=True)
def test_parameters_and_their_pieces_start_at_16_bytes(elementwise: bool) -> None:
    shapes = ((3,), (5, 2), (7, 3, 2), (1,))
    params = [
        nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes for dtype in (torch.float32, torch.bfloat16)
    ]
    optimizer = OSS(params, torch.optim.SGD, lr=0.1, options=OSSOptions(elementwise=elementwise))
    pieces = [piece for bucket in optimizer.buckets for piece in bucket.pieces if piece.numel()]
    found = [tensor.data_ptr() % 16 for tensor in (*params, *pieces)]
    assert set(found) == {0}
