"""durations.py: which work runs beside which, by clocks with round rates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_check.simulate import simulate
from scale_check.simulate.durations import Clocks, Rates, durations
from scale_core.device.streams import worker_for

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

# A product of 64 x 64 takes 0.5 s, a pass over its 16384 bytes 16 s, a sum over 2 ranks 1 s, a copy to the host 2 s.
RATES = Rates(
    flops_per_second=2**20,
    memory_bytes_per_second=2**10,
    host_link_bytes_per_second=2**13,
    host_memory_bytes_per_second=2**12,
    network_bytes_per_second=2**14,
    launch_seconds=0.0,
    collective_seconds=0.0,
)


@contextmanager
def timed(rates: Rates = RATES) -> Iterator[tuple[Clocks, Tensor]]:
    with simulate(world_size=2, device="sim") as simulation:
        weight = torch.empty(64, 64, device="sim")
        with durations(simulation, rates) as clocks:
            yield clocks, weight


def test_a_product_and_other_operators_run_one_after_the_other() -> None:
    with timed() as (clocks, weight):
        result = weight @ weight
        assert clocks.now == 0.5 and clocks.host == 0.0
        result.add_(1)  # Reads, and writes.
        assert clocks.now == 0.5 + 2 * 16


@pytest.mark.parametrize("is_causal, seconds", [(False, 2.0), (True, 1.0)])
def test_attention_has_a_rate_of_its_own_and_half_of_it_is_causal(is_causal: bool, seconds: float) -> None:
    with timed(replace(RATES, attention_flops_per_second=2**19)) as (clocks, weight):
        query = weight.to(torch.bfloat16)[None, None]
        begin = clocks.now
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=is_causal)
        assert clocks.now == begin + seconds  # Two products of 2^19 operations.


def test_what_is_written_only_counts_once() -> None:
    with timed() as (clocks, weight):
        target = torch.empty(64, 64, device="sim")
        for write in (lambda: target.copy_(weight), lambda: torch._foreach_copy_([target], [weight])):
            begin = clocks.now
            write()
            assert clocks.now == begin + 32
        torch.add(weight, weight, out=target)
        assert clocks.now == begin + 32 + 48
        torch._foreach_add_([target], 1)
        assert clocks.now == begin + 32 + 48 + 32


def test_a_collective_runs_beside_computation_until_waited_for() -> None:
    with timed() as (clocks, weight):
        work = dist.all_reduce(weight, async_op=True)
        other = torch.empty(64, 64, device="sim")
        other @ other
        assert clocks.now == 1.0 and clocks.stream == 0.5
        work.wait()
        other @ other
        assert clocks.now == 1.5
        summed = functional.all_reduce(other, "sum", dist.group.WORLD)
        assert clocks.now == 2.5
        functional.wait_tensor(summed) @ other
        assert clocks.now == 3.0


def test_a_side_stream_runs_beside_the_default_one() -> None:
    with timed() as (clocks, weight):
        module: Any = torch.get_device_module("sim")
        side = module.Stream()
        with module.stream(side):
            weight @ weight
        weight @ weight
        assert clocks.now == 0.5
        module.current_stream().wait_stream(side)
        weight @ weight
        assert clocks.now == 1.0


@pytest.mark.parametrize("blocks, host", [(True, 2.5), (False, 0.0)])
def test_the_host_waits_for_a_copy_that_blocks(blocks: bool, host: float) -> None:
    with timed() as (clocks, weight):
        target = torch.empty(64, 64, pin_memory=True)
        weight @ weight
        target.copy_(weight, non_blocking=not blocks)
        assert clocks.now == 2.5 and clocks.host == host


def test_a_worker_thread_computes_beside_the_main_thread() -> None:
    with timed() as (clocks, _):
        memory = torch.empty(64, 64)
        future = worker_for(torch.device("sim", 0)).submit(memory.add_, 1)  # 8 s of the host's memory.
        assert clocks.host == 0.0
        future.result()
        assert clocks.host == 8.0


def test_the_host_takes_its_time_to_launch() -> None:
    with timed(Rates(1e30, 1e30, network_bytes_per_second=0.0, launch_seconds=1.0)) as (clocks, weight):
        weight @ weight
        dist.all_reduce(weight)
        assert clocks.host == 2.0


@pytest.mark.parametrize("num_buckets, seconds", [(1, 3 * 2.0), (3, 2.0)])
def test_buckets_of_ddp_are_averaged_during_the_backward(num_buckets: int, seconds: float) -> None:
    """Of three layers, each as large as the network sends in two seconds; products take long, all else nothing."""
    rates = Rates(2**18, 1e30, network_bytes_per_second=2**13, launch_seconds=0.0, collective_seconds=0.0)
    with simulate(world_size=2, device="sim") as simulation, durations(simulation, rates) as clocks:
        with torch.device("sim"):
            layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        cap = {1: 25.0, 3: 0.01}[num_buckets]
        model = DistributedDataParallel(layers, init_sync=False, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        for _ in range(2):
            clocks.host = begin = clocks.now
            model(torch.empty(64, 64, device="sim")).sum().backward()
    products = (3 + 2 + 3) * 2.0
    assert clocks.now - begin == pytest.approx(products + seconds)
    assert len(simulation.collectives) == 1 + num_buckets


def test_autocast_casts_products_down_and_norms_up() -> None:
    with simulate(device="sim"), torch.device("sim"):
        layer, norm, x = nn.Linear(8, 8), nn.LayerNorm(8), torch.randn(2, 8)
        with torch.autocast("sim", torch.bfloat16):
            product = layer(x)
            assert product.dtype == torch.bfloat16 and norm(product).dtype == torch.float32
        product.float().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
        assert layer(x).dtype == torch.float32
