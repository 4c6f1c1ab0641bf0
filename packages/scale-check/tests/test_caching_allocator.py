"""caching_allocator.py: the memory that torch's allocator reserves on a device, and its use by a simulation."""

from __future__ import annotations

import random
from bisect import insort
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from scale_check.simulate import caching_allocator, simulate
from scale_check.simulate.caching_allocator import CachingAllocator, ReservedBlock

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (200 * MIB - 1, 200 * MIB),
    ],
)
def test_a_size_decides_the_size_of_its_segment(num_bytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert allocator.reserved_bytes == segment


@pytest.mark.parametrize(("num_bytes", "taken"), [(1, 512), (512, 512), (513, 1024), (3 * MIB, 3 * MIB)])
def test_sizes_are_rounded_up_to_512_bytes(num_bytes: int, taken: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert allocator.allocated_bytes == taken


def test_only_its_own_stream_gets_a_freed_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved_bytes == 30 * MIB
    allocator.allocate(30 * MIB, stream=2)
    assert allocator.reserved_bytes == 60 * MIB


def test_a_full_device_gets_cached_segments_back_before_a_new_one() -> None:
    allocator = CachingAllocator(device_memory=100 * MIB)
    kept, cached = (allocator.allocate(size * MIB) for size in (40, 50))
    allocator.free(cached)
    allocator.allocate(60 * MIB)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (100 * MIB, 1)
    allocator.free(kept)
    allocator.restart()
    allocator.allocate(80 * MIB)  # The device has no room, and the model goes on.
    assert (allocator.peak_reserved_bytes, allocator.num_alloc_retries) == (140 * MIB, 1)


def test_a_simulated_accelerator_has_the_memory_that_it_is_given() -> None:
    with simulate(device="sim", device_memory=100 * MIB) as sim:
        torch.empty(50 * MIB, dtype=torch.uint8, device="sim")
        kept = torch.empty(60 * MIB, dtype=torch.uint8, device="sim")
        assert (sim.peak_reserved_bytes, sim.num_alloc_retries) == (60 * MIB, 1)
        sim.restart()
        assert sim.num_alloc_retries == 0 and kept.numel()
    refused = pytest.raises(ValueError, match=r"device_memory= is the memory of an accelerator, .* device='sim'")
    with refused, simulate(device_memory=100 * MIB):
        pass


def test_a_compact_memory_has_no_segments_of_tensors_that_are_gone() -> None:
    with simulate(device="sim") as sim:
        full = torch.empty(40 * MIB, dtype=torch.uint8, device="sim")
        del full
        shard = torch.empty(16 * MIB, dtype=torch.uint8, device="sim")
        sim.empty_cache()
        assert sim.reserved_bytes == 40 * MIB
        sim.compact()
        assert sim.reserved_bytes == shard.numel() == 16 * MIB
        other = torch.empty(16 * MIB, dtype=torch.uint8, device="sim")
        del shard, other
        sim.empty_cache()
        assert sim.reserved_bytes == 0


@pytest.mark.parametrize(("asked", "taken"), [(29, 30), (28, 28)], ids=["1 MiB remains", "2 MiB remain"])
def test_a_large_block_is_split_if_more_than_1_mib_remains(asked: int, taken: int) -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(asked * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (taken * MIB, 30 * MIB)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (50, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(20 * MIB).address == blocks[1].address
    assert allocator.allocate(20 * MIB).address == blocks[2].address


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_free_neighbors_are_merged(order: tuple[int, int]) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]  # One segment of 20 MiB.
    for index in order:
        allocator.free(blocks[index])
    assert allocator.allocate(8 * MIB).address == 0
    assert allocator.reserved_bytes == 20 * MIB


def test_an_emptied_cache_gives_back_only_unused_segments() -> None:
    allocator = CachingAllocator()
    kept, other = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    large = allocator.allocate(40 * MIB)
    allocator.free(other)
    allocator.free(large)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (20 * MIB, 60 * MIB)
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_blocks_in_use_never_overlap() -> None:
    chance, allocator = random.Random(0), CachingAllocator()
    in_use: list[ReservedBlock] = []
    for _ in range(3000):
        if in_use and chance.random() < 0.5:
            allocator.free(in_use.pop(chance.randrange(len(in_use))))
        else:
            in_use.append(allocator.allocate(chance.choice([700, MIB, 3 * MIB, 15 * MIB]), chance.randrange(2)))
        places = sorted((block.address, block.address + block.num_bytes) for block in in_use)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert allocator.allocated_bytes == sum(block.num_bytes for block in in_use) <= allocator.reserved_bytes
    for block in in_use:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@pytest.mark.simulation
def test_a_storage_that_ends_in_the_middle_of_an_allocation_is_free_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a garbage collection ends a storage while its neighbor is cut."""
    with simulate(device="sim") as simulation:
        tensors = [torch.empty(4 * MIB, dtype=torch.uint8, device="sim")]

        def collecting(free: list[Any], entry: Any) -> None:
            tensors.clear()
            insort(free, entry)

        monkeypatch.setattr(caching_allocator, "insort", collecting)
        second = torch.empty(4 * MIB, dtype=torch.uint8, device="sim")
        assert (simulation.current_bytes, simulation.peak_bytes) == (4 * MIB, 8 * MIB)
        others = [torch.empty(4 * MIB, dtype=torch.uint8, device="sim") for _ in range(4)]
        assert (simulation.current_bytes, simulation.reserved_bytes) == (20 * MIB, 20 * MIB)
        del second, others


@pytest.mark.simulation
def test_a_storage_of_a_new_size_is_copied_before_its_old_memory_is_free() -> None:
    with simulate(device="sim") as simulation:
        tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="sim")
        tensor.untyped_storage().resize_(20 * MIB)
        assert (simulation.current_bytes, simulation.reserved_bytes) == (20 * MIB, 50 * MIB)


@pytest.mark.simulation
def test_a_simulation_reserves_by_stream_and_keeps_segments() -> None:
    with simulate(device="sim") as simulation:
        side = torch.Stream(device="sim")
        freed = torch.empty(30 * MIB, dtype=torch.uint8, device="sim")
        del freed
        with side:
            on_side = torch.empty(30 * MIB, dtype=torch.uint8, device="sim")
        assert (simulation.current_bytes, simulation.reserved_bytes) == (30 * MIB, 60 * MIB)
        del on_side
        simulation.restart()
        assert (simulation.peak_bytes, simulation.peak_reserved_bytes) == (0, 60 * MIB)
        simulation.empty_cache()
        simulation.restart()
        assert simulation.peak_reserved_bytes == 0
        assert "reserved by the allocator" in simulation.report()


@pytest.mark.simulation
def test_a_simulation_of_the_host_has_no_allocator() -> None:
    with simulate() as simulation, pytest.raises(ValueError, match="device='sim'"):
        _ = simulation.reserved_bytes


@pytest.mark.simulation
def test_shapes_that_dtensor_asks_for_take_no_memory() -> None:
    with simulate(world_size=4, device="sim") as simulation:
        with simulation.aside():
            mesh = init_device_mesh("sim", (4,))
        tensor = distribute_tensor(torch.zeros(4, 1000, device="sim"), mesh, [Shard(0)])
        simulation.restart()
        result = tensor + 1
        assert simulation.peak_bytes == simulation.current_bytes == 2 * 4000
        del result
