"""buffer_pool.py: memory is lent again when nobody reads it any more, and never before."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import Tensor, nn

from scale_core import buffer_pool, compat
from scale_core.buffer_pool import SMALLEST_BYTES, BufferPool
from scale_core.flat import FlatBuffer
from scale_core.group import group_of
from scale_core.layout import FlatLayout
from scale_core.testing import run_ranks

NUMEL = SMALLEST_BYTES // 4


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    own = BufferPool()
    monkeypatch.setattr(buffer_pool, "pool", own)
    return own


def large(scale: int = 1) -> Tensor:
    return buffer_pool.empty(scale * NUMEL, torch.float32, torch.empty(0))


def test_memory_is_lent_again_once_its_last_view_has_died() -> None:
    first = large()
    place, view = first.data_ptr(), first.view(2, -1)[1]
    del first
    assert large().data_ptr() != place
    del view
    assert large().data_ptr() == place


def test_what_autograd_has_saved_is_not_lent_to_another() -> None:
    saved = large().fill_(2.0)
    weight = torch.ones(NUMEL, requires_grad=True)
    product = (weight * saved).sum()
    del saved
    large().fill_(7.0)
    product.backward()
    assert weight.grad is not None and weight.grad.unique().tolist() == [2.0]


def test_a_buffer_is_saved_with_its_own_size() -> None:
    first = large(9)
    place = first.data_ptr()
    del first
    smaller = buffer_pool.empty(8 * NUMEL, torch.float32, torch.empty(0))
    assert smaller.data_ptr() == place, "expected a block that is little larger"
    assert smaller.untyped_storage().nbytes() == 8 * SMALLEST_BYTES
    file = io.BytesIO()
    torch.save(smaller, file)
    assert file.tell() < 8.1 * SMALLEST_BYTES


def test_memory_is_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert buffer_pool.empty(NUMEL, torch.float32, torch.empty(0, device="cpu")).device.type == "cpu"


@pytest.mark.parametrize("swaps", [True, False])
def test_a_tensor_without_memory_gets_some_and_its_views_see_it(monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    if not swaps:
        monkeypatch.setattr(compat, "can_swap_memory", lambda: False)
    elif not compat.can_swap_memory():
        pytest.skip("this torch can't")
    full = torch.empty(2 * NUMEL)
    view = full.view(2, -1)[1]
    for value in (1.0, 2.0):
        buffer_pool.free(full)
        assert full.untyped_storage().nbytes() == 0
        buffer_pool.free(full)  # as a second release does
        buffer_pool.fill(full)
        assert full.untyped_storage().nbytes() == 8 * NUMEL
        full.fill_(value)
        assert view.unique().tolist() == [value]


@pytest.mark.skipif(not compat.can_swap_memory(), reason="this torch can't")
def test_two_tensors_take_turns_in_one_memory() -> None:
    one, two = torch.empty(NUMEL), torch.empty(NUMEL)
    places = []
    for tensor in (one, two, one, two):
        buffer_pool.free(tensor)
        buffer_pool.fill(tensor)
        places.append(tensor.data_ptr())
        buffer_pool.free(tensor)
    assert len(set(places)) == 1


def test_two_idle_blocks_are_kept_of_all_sizes_and_none_after_a_trim(pool: BufferPool) -> None:
    tensors = [large(size) for size in (1, 1, 2, 4, 8)]
    assert len(pool._blocks) == 5
    tensors.clear()
    pool.settle()
    assert [len(block.memory) for block in pool._blocks] == [4 * SMALLEST_BYTES, 8 * SMALLEST_BYTES]
    tensors.append(large(16))
    assert [len(block.memory) // SMALLEST_BYTES for block in pool._blocks] == [8, 16], "one idle beside the new one"
    pool.trim()
    assert len(pool._blocks) == 1, "what is in use stays"
    tensors[0].zero_()


def test_idle_blocks_are_given_back_with_what_they_were_for(pool: BufferPool) -> None:
    class Owner:
        pass

    owner = Owner()
    pool.trim_after(owner)
    large()
    assert len(pool._blocks) == 1
    del owner
    gc.collect()
    assert not pool._blocks


def test_small_tensors_and_those_of_other_devices_are_left_to_torch(pool: BufferPool) -> None:
    assert buffer_pool.empty(NUMEL - 1, torch.float32, torch.empty(0)).shape == (NUMEL - 1,)
    assert buffer_pool.empty(NUMEL, torch.float32, torch.empty(0, device="meta")).is_meta
    if compat.simulation_supported():
        with compat.fake_tensors():
            fake = torch.empty(NUMEL)
            assert compat.is_fake(buffer_pool.empty(NUMEL, torch.float32, fake))
            buffer_pool.free(fake)
            buffer_pool.fill(fake)
            assert fake.untyped_storage().nbytes() == 4 * NUMEL
    assert not pool._blocks


def take_steps() -> None:
    shapes = [(1024, 400), (1024, 200)]
    group = group_of()
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    buffers = [
        FlatBuffer(
            names,
            params,
            FlatLayout.plan(names, shapes, group.size),
            group,
        )
        for names in (["a.weight", "a.bias"], ["b.weight", "b.bias"])
    ]
    blocks = []
    for step in range(5):
        for buffer in buffers:
            buffer.gather()
            buffer.wait_gathered()
            factor = 1.0 + group.rank + step
            torch.stack([(whole * factor).sum() for whole in buffer.wholes]).sum().backward()
            for index in range(len(shapes)):
                buffer.gradient.pack(index)
            buffer.release()
            buffer.reduce()
        for buffer in buffers:
            buffer.commit()
        for param in (param for buffer in buffers for param in buffer.exposed):
            assert param.grad is not None
            expected = [1.5 + step] if param.numel() else []
            assert param.grad.unique().tolist() == expected
            param.grad = None
        blocks.append({block.memory.data_ptr() for block in buffer_pool.pool._blocks})
    assert blocks[1], "expected the buffers to be large enough for the pool"
    assert blocks[1] == blocks[2] == blocks[3] == blocks[4]


def test_steady_steps_take_no_new_memory_and_mix_nothing_up() -> None:
    run_ranks(take_steps, 2)
