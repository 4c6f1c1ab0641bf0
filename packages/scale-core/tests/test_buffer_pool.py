"""buffer_pool.py: large buffers of one size take turns in one memory, which stands in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.comm.group import group_of
from scale_core.device import buffer_pool
from scale_core.device.buffer_pool import MAX_IDLE, SMALLEST_BYTES, allocate, empty, free, free_unshared
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.layout import FlatLayout
from scale_core.hooks.gradients import register_local_grad_hook
from scale_core.shard import on_local_tensors

NUMEL = SMALLEST_BYTES // 4
CPU = torch.device("cpu")

swaps = pytest.mark.skipif(not compat.can_swap_memory(), reason="this torch can't exchange memory")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    buffer_pool.trim()
    yield
    buffer_pool.trim()


def kept() -> list[int]:
    return [memory.nbytes() // SMALLEST_BYTES for memory in buffer_pool._idle]


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_tensor_without_memory_gets_some_and_its_views_see_it(
    monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(compat, "can_swap_memory", lambda: False)
    full = torch.empty(2 * NUMEL)
    view = full.view(2, -1)[1]
    for value in (1.0, 2.0):
        free(full)
        assert full.untyped_storage().nbytes() == 0
        free(full)  # as a second release does
        allocate(full)
        assert full.untyped_storage().nbytes() == 8 * NUMEL
        full.fill_(value)
        assert view.unique().tolist() == [value]


@swaps
def test_two_tensors_take_turns_in_one_memory() -> None:
    one, two = torch.empty(NUMEL), torch.empty(NUMEL)
    free(one)
    places = []
    free(two)
    buffer_pool._idle.pop()
    for tensor in (one, two, one, two):
        allocate(tensor)
        places.append(tensor.data_ptr())
        free(tensor)
    assert len(set(places)) == 1


@swaps
def test_memory_in_use_is_given_to_nobody_else() -> None:
    one, two = torch.empty(NUMEL), torch.empty(NUMEL)
    free(one)
    allocate(one)
    one.fill_(3.0)
    free(two)
    allocate(two)
    two.fill_(7.0)
    assert one.unique().tolist() == [3.0] and one.data_ptr() != two.data_ptr()


@swaps
def test_two_are_kept_of_all_sizes_and_none_after_a_trim() -> None:
    tensors: list[Tensor] = [torch.empty(size * NUMEL) for size in (1, 2, 4)]
    for tensor in tensors:
        free(tensor)
    assert kept() == [2, 4] and len(kept()) == MAX_IDLE
    allocate(tensors[0])
    assert kept() == [2, 4], "expected new memory for another size"
    allocate(tensors[1])
    assert kept() == [4]
    buffer_pool.trim()
    assert kept() == []


@swaps
def test_what_is_kept_is_given_back_with_what_it_was_for() -> None:
    class Owner:
        pass

    owner = Owner()
    buffer_pool.trim_after(owner)
    free(torch.empty(NUMEL))
    assert kept() == [1]
    del owner
    assert kept() == []


def test_memory_that_an_array_shares_is_not_taken_from_it() -> None:
    pytest.importorskip("numpy")
    full = torch.full((NUMEL,), 3.0)
    array = full.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        free(full)
    assert array[0] == 3.0 and kept() == []


def test_small_tensors_and_other_devices_are_left_to_torch() -> None:
    for tensor in (torch.empty(NUMEL - 1), torch.empty(NUMEL, device="meta")):
        free(tensor)
        allocate(tensor)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
    assert kept() == []


@swaps
def test_a_new_tensor_takes_kept_memory_of_its_size_only() -> None:
    old = torch.full((NUMEL,), 3.0)
    place = old.data_ptr()
    free_unshared(old)
    assert kept() == [1]
    other, same = empty(2 * NUMEL, torch.float32, CPU), empty(2 * NUMEL, torch.float16, CPU)
    assert other.shape == (2 * NUMEL,) and other.data_ptr() != place
    assert same.shape == (2 * NUMEL,) and same.dtype is torch.float16 and same.data_ptr() == place
    assert kept() == [] and empty(3, torch.float32, CPU).shape == (3,)


@pytest.mark.parametrize("sharing", [lambda full: full[1:], lambda full: full.numpy(), torch.utils.dlpack.to_dlpack])
def test_memory_that_somebody_has_a_view_of_is_left_to_it(sharing: Callable[[Tensor], object]) -> None:
    full = torch.full((NUMEL,), 3.0)
    view = sharing(full)
    free_unshared(full)
    assert kept() == [] and full.unique().tolist() == [3.0]
    del view


def test_new_memory_asks_for_huge_pages_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(buffer_pool, "_madvise", lambda: lambda *what: asked.append(what))
    full = empty(NUMEL, torch.float32, CPU)
    ((start, num_bytes, advice),) = asked
    first, page = full.data_ptr(), mmap.PAGESIZE
    assert first <= start < first + page and first + full.nbytes - page < start + num_bytes <= first + full.nbytes
    assert start % page == num_bytes % page == 0 and advice == mmap.MADV_HUGEPAGE
    empty(NUMEL - 1, torch.float32, CPU)
    assert len(asked) == 1, "expected small tensors to be left to torch"


def test_a_system_without_huge_pages_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer_pool._madvise.cache_clear()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    try:
        assert empty(NUMEL, torch.float32, CPU).fill_(1.0).shape == (NUMEL,)
    finally:
        buffer_pool._madvise.cache_clear()


@pytest.mark.simulation
def test_tensors_of_a_simulation_are_left_to_torch() -> None:
    with compat.fake_tensors():
        fake = torch.empty(NUMEL)
        free(fake)
        allocate(fake)
        assert fake.untyped_storage().nbytes() == 4 * NUMEL
        assert compat.is_fake(empty(NUMEL, torch.float32, CPU))
    assert kept() == []


@pytest.mark.ranks(2)
@on_local_tensors
def test_a_kept_local_gradient_has_its_numbers_later() -> None:
    group, shape = group_of(), (512, 1024)
    buffer = FlatBuffer(["weight"], [nn.Parameter(torch.ones(shape))], FlatLayout.plan(["weight"], [shape], 2), group)
    seen: list[Tensor] = []
    handle = register_local_grad_hook(lambda params, grads: seen.extend(grads))
    try:
        for step in range(3):
            buffer.gather()
            buffer.wait_gathered()
            (buffer.unsharded_params[0] * torch.full(shape, 1.0 + group.rank + step)).sum().backward()
            buffer.gradient.accumulate(0)
            buffer.release()
            buffer.reduce()
            buffer.commit()
            (param,) = buffer.sharded_params
            assert param.grad is not None and param.grad.unique().tolist() == [1.5 + step]
            param.grad = None
    finally:
        handle.remove()
    assert [grad.unique().tolist() for grad in seen] == [[1.0 + group.rank + step] for step in range(3)]


@pytest.mark.ranks(2)
@on_local_tensors
def test_steady_steps_gather_into_the_same_memory() -> None:
    shapes, names = [(1024, 400), (1024, 200)], ["weight", "bias"]
    group = group_of()
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    buffers = [FlatBuffer(names, params, FlatLayout.plan(names, shapes, group.size), group) for _ in range(3)]
    places = []
    for step in range(4):
        for buffer in buffers:
            buffer.gather()
            buffer.wait_gathered()
            factor = 1.0 + group.rank + step
            torch.stack([(whole * factor).sum() for whole in buffer.unsharded_params]).sum().backward()
            places.append(buffer.full.data_ptr())
            for index in range(len(shapes)):
                buffer.gradient.accumulate(index)
            buffer.release()
            buffer.reduce()
            buffer.commit()
        for param in (param for buffer in buffers for param in buffer.sharded_params):
            assert param.grad is not None
            assert param.grad.unique().tolist() == ([1.5 + step] if param.numel() else [])
            param.grad = None
    if compat.can_swap_memory():
        assert len(set(places[3:])) <= MAX_IDLE, "expected steady steps to gather into memory that is there"
