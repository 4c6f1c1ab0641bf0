"""Techniques in one loop have no race: three steps of each pair on simulated streams.

The parity of these pairs with one process stands in the files beside this one; here it is the order of their streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_arguments import shard_arguments
from test_races_of_the_table import WIDTH, Block, without_attention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.optim import SGD, AdamW, Optimizer

import scale_core
import scale_tp
from scale_adascale import AdaScale
from scale_check.simulate import Simulation, simulate
from scale_checkpoint import checkpoint_wrapper
from scale_core.comm.group import Group
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_fsdp import OffloadOptimizer, fully_shard
from scale_moe import MoE, average_replicated_gradients
from scale_oss import OSS, LocalSGD, OuterStep, ShardedDataParallel
from scale_pipe import Pipe
from scale_snapshot import load_pretrained, save_pretrained
from scale_snapshot.format import reads

pytestmark = [
    pytest.mark.simulation,
    # AdaScale asks where a gradient stands; in a simulation it stands nowhere.
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

STEPS = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two axes of two ranks each, in a simulation that looks for races."""
    with simulate(world_size=4, device="sim", races=True) as simulation:
        yield two_axes(simulation)


def two_axes(simulation: Simulation) -> DeviceMesh:
    with simulation.aside():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def blocks(device: str = "sim") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(Block(None, without_attention) for _ in range(3)))


def batch() -> Tensor:
    return torch.randn(2, 8, WIDTH, device="sim", requires_grad=True)


def shard(model: nn.Sequential, axis: DeviceMesh | None = None, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **shard_arguments(mesh=axis, **options))
    return fully_shard(model, **shard_arguments(mesh=axis, **options))


def divide(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    plan: Any = {"*.up": "colwise", "*.down": "rowwise"}
    scale_tp.parallelize(model, plan, mesh["model"], sync_module_states=False)
    return model


def checkpointed(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        checkpoint_wrapper(block, offload_to_cpu=True, min_bytes=0)
    return model


def adamw(params: Iterable[Tensor]) -> Optimizer:
    return AdamW(params, lr=1e-3, foreach=True)


def train(model: nn.Module, optimizer: Any, before_step: Callable[[], object] = int) -> None:
    for _ in range(STEPS):
        model(batch()).sum().backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def test_checkpointed_blocks_in_sharded_ones(mesh: DeviceMesh) -> None:
    model = shard(checkpointed(blocks()))
    train(model, adamw(model.parameters()), lambda: scale_core.clip_grad_norm_(model.parameters(), 1.0))


def test_checkpointed_blocks_with_shards_on_the_host(mesh: DeviceMesh) -> None:
    model = shard(checkpointed(blocks("cpu")), mp_policy=BF16, offload_policy=CPUOffloadPolicy(), compute_device="sim")
    train(model, adamw(model.parameters()))


def test_checkpointed_blocks_with_an_optimizer_on_the_host(mesh: DeviceMesh) -> None:
    model = shard(checkpointed(blocks()), mp_policy=BF16)
    train(model, OffloadOptimizer(AdamW, model.parameters(), lr=1e-3, foreach=False, overlap_step=True))


def test_checkpointed_blocks_in_sharded_data_parallel(mesh: DeviceMesh) -> None:
    model = checkpointed(blocks())
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    train(ShardedDataParallel(model, optimizer), optimizer)


def test_an_optimizer_of_full_tensors_over_shards(mesh: DeviceMesh) -> None:
    model = shard(blocks())
    train(model, OSS(model.parameters(), optim=AdamW, lr=1e-3))


@pytest.mark.parametrize("offloads", [False, True])
def test_divided_layers_that_are_sharded(offloads: bool, mesh: DeviceMesh) -> None:
    model = shard(checkpointed(divide(blocks(), mesh)) if offloads else divide(blocks(), mesh), mesh["data"])
    train(model, adamw(model.parameters()), lambda: scale_core.clip_grad_norm_(model.parameters(), 1.0))


def test_divided_layers_in_sharded_data_parallel(mesh: DeviceMesh) -> None:
    model, data = divide(blocks(), mesh), mesh["data"].get_group()
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3, process_group=data)
    train(ShardedDataParallel(model, optimizer, process_group=data), optimizer)


@pytest.mark.parametrize("attend", [scale_tp.ring_attention, scale_tp.ulysses_attention])
def test_divided_sequences_in_sharded_blocks(attend: Callable[..., Tensor], mesh: DeviceMesh) -> None:
    model = blocks()
    for block in model:
        assert isinstance(block, Block)
        block.attend = partial(attend, process_group=mesh["model"])
    sharded = shard(model)
    train(sharded, adamw(sharded.parameters()))


def test_experts_in_sharded_blocks(mesh: DeviceMesh) -> None:
    with torch.device("sim"):
        experts = MoE(WIDTH, 2 * WIDTH, 4, process_group=mesh["model"])
    fully_shard(experts.experts, mesh=mesh["data"])
    fully_shard(experts)
    train(experts, adamw(experts.parameters()))


def test_experts_in_sharded_data_parallel(mesh: DeviceMesh) -> None:
    with torch.device("sim"):
        experts = MoE(WIDTH, 2 * WIDTH, 4, process_group=mesh["model"])
    data = mesh["data"].get_group()
    optimizer = OSS(experts.parameters(), optim=AdamW, lr=1e-3, process_group=data)
    wrapped = ShardedDataParallel(experts, optimizer, process_group=data)
    train(wrapped, optimizer, lambda: average_replicated_gradients(experts, mesh["model"]))


def test_local_sgd_over_sharded_replicas(mesh: DeviceMesh) -> None:
    model = shard(blocks(), mesh["data"])
    optimizer = SGD(model.parameters(), lr=0.1)
    averaging = LocalSGD(
        model, optimizer, sync_every=2, outer=OuterStep(momentum=0.9), process_group=mesh["model"].get_group()
    )
    train(model, optimizer)
    averaging.sync()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gains_over_shards(micro_batches: int, mesh: DeviceMesh) -> None:
    model = shard(checkpointed(blocks()))
    adascale = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=micro_batches)
    for _ in range(STEPS):
        for _ in range(micro_batches):
            model(batch()).sum().backward()
        adascale.step()
        adascale.zero_grad()


def test_gains_in_sharded_data_parallel(mesh: DeviceMesh) -> None:
    model = blocks()
    adascale = AdaScale(OSS(model.parameters(), optim=SGD, lr=0.1))
    train(ShardedDataParallel(model, adascale), adascale)


def test_scaled_gradients_of_shards(mesh: DeviceMesh) -> None:
    model = shard(blocks(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer, scaler = adamw(model.parameters()), ShardedGradScaler("sim")
    for _ in range(STEPS):
        scaler.scale(model(batch()).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_partitions_in_one_process(checkpoint: Any, mesh: DeviceMesh) -> None:
    model = blocks()
    pipe = Pipe(model, balance=[1, 2], chunks=2, devices=["sim", "sim"], checkpoint=checkpoint)
    train(pipe, adamw(model.parameters()))


def test_every_pair_in_a_backward_thread() -> None:
    with simulate(world_size=4, device="sim", races=True, backward_thread=True) as simulation:
        mesh = two_axes(simulation)
        model = shard(checkpointed(divide(blocks(), mesh)), mesh["data"])
        train(model, OffloadOptimizer(AdamW, model.parameters(), lr=1e-3, foreach=False, overlap_step=True))


def test_pretrained_weights_in_sharded_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of a file is a write to the host's memory, which has no address here."""
    save_pretrained(blocks("cpu"), tmp_path, process_group=Group())
    monkeypatch.setattr(reads, "memory_of", lambda tensor: memoryview(bytearray(tensor.zero_().nbytes)))
    with simulate(world_size=4, device="sim", races=True) as simulation:
        model = shard(blocks("meta"), mp_policy=BF16, init=False)
        load_pretrained(model, tmp_path)
        load_pretrained(model, tmp_path, cast=True)  # Over values that a step has not used, and those that it has.
        train(model, adamw(model.parameters()))
        load_pretrained(model, tmp_path)
        train(model, adamw(model.parameters()))
        assert {collective.op for collective in simulation.collectives} >= {"all_gather", "reduce_scatter"}
