"""buffer_pool.py: full buffers of one size take turns in one memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from scale_core import buffer_pool, compat
from scale_core.buffer_pool import MAX_IDLE, SMALLEST_BYTES, fill, free
from scale_core.flat import FlatBuffer
from scale_core.group import group_of
from scale_core.layout import FlatLayout
from scale_core.testing import run_ranks

NUMEL = SMALLEST_BYTES // 4

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
        fill(full)
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
        fill(tensor)
        places.append(tensor.data_ptr())
        free(tensor)
    assert len(set(places)) == 1


@swaps
def test_memory_in_use_is_given_to_nobody_else() -> None:
    one, two = torch.empty(NUMEL), torch.empty(NUMEL)
    free(one)
    fill(one)
    one.fill_(3.0)
    free(two)
    fill(two)
    two.fill_(7.0)
    assert one.unique().tolist() == [3.0] and one.data_ptr() != two.data_ptr()


@swaps
def test_two_are_kept_of_all_sizes_and_none_after_a_trim() -> None:
    tensors: list[Tensor] = [torch.empty(size * NUMEL) for size in (1, 2, 4)]
    for tensor in tensors:
        free(tensor)
    assert kept() == [2, 4] and len(kept()) == MAX_IDLE
    fill(tensors[0])
    assert kept() == [2, 4], "expected new memory for another size"
    fill(tensors[1])
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


def test_small_tensors_and_those_of_other_devices_are_left_to_torch() -> None:
    for tensor in (torch.empty(NUMEL - 1), torch.empty(NUMEL, device="meta")):
        free(tensor)
        fill(tensor)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
    assert kept() == []


@pytest.mark.simulation
def test_tensors_of_a_simulation_are_left_to_torch() -> None:
    with compat.fake_tensors():
        fake = torch.empty(NUMEL)
        free(fake)
        fill(fake)
        assert fake.untyped_storage().nbytes() == 4 * NUMEL
    assert kept() == []


def take_steps() -> None:
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
            torch.stack([(whole * factor).sum() for whole in buffer.wholes]).sum().backward()
            places.append(buffer.full.data_ptr())
            for index in range(len(shapes)):
                buffer.gradient.pack(index)
            buffer.release()
            buffer.reduce()
        for buffer in buffers:
            buffer.commit()
        for param in (param for buffer in buffers for param in buffer.exposed):
            assert param.grad is not None
            assert param.grad.unique().tolist() == ([1.5 + step] if param.numel() else [])
            param.grad = None
    if compat.can_swap_memory():
        assert len(set(places[3:])) <= MAX_IDLE, "expected steady steps to gather into memory that is there"


def test_steady_steps_gather_into_the_same_memory_and_mix_nothing_up() -> None:
    run_ranks(take_steps, 2)
