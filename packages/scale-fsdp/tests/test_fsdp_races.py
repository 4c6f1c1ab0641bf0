"""No way to train a sharded model has a race: three steps of each on simulated streams."""

from __future__ import annotations

import _thread
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import Any

import pytest
import torch
from shard_arguments import shard_arguments
from test_transports import ScaledWeight
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.optim import AdamW, Optimizer

import scale_core
from scale_check.simulate import Simulation, simulate
from scale_core.comm.group import group_of
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy
from scale_core.flat.layout import FlatLayout
from scale_core.hooks import autograd as hooks
from scale_core.state.state_dict import load_sharded_state_dict, sharded_state_dict
from scale_fsdp import (
    CommunicationPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    OffloadOptimizer,
    ShardedEMA,
    fully_shard,
)
from scale_fsdp.offload import backward as offload_backward
from scale_fsdp.offload import host_update
from scale_fsdp.runtime.root import Root
from scale_fsdp.transports.policy import WirePolicy

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

WIDTH, LAYERS, STEPS = 32, 3, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
INT8 = CommunicationPolicy(gather="int8", reduce="int8")
ON_HOST: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(), "compute_device": "sim"}


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulate(world_size=4, device="sim", races=True) as simulation:
        yield simulation


def sharded(device: str = "sim", **options: Any) -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, **shard_arguments(**options))
    fully_shard(model, **shard_arguments(**options))
    return model


def adamw(params: Iterable[Tensor], **options: Any) -> Optimizer:
    return AdamW(params, lr=1e-3, foreach=True, **options)


def on_host(params: Iterable[Tensor], **options: Any) -> Optimizer:
    return OffloadOptimizer(AdamW, params, lr=1e-3, foreach=False, **options)


def train(
    model: nn.Module, optimizer: Callable[[Iterable[Tensor]], Optimizer] = adamw, after: Callable[[], object] = id
) -> None:
    steps = optimizer(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(2, WIDTH, device="sim")).sum().backward()
        steps.step()
        steps.zero_grad()
        if after is not id:
            after()


def mesh_of(simulation: Simulation) -> DeviceMesh:
    with simulation.aside():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


CASES: dict[str, Callable[[Simulation], None]] = {
    "plain": lambda _: train(sharded()),
    "bf16": lambda _: train(sharded(mp_policy=BF16)),
    "kept after the forward": lambda _: train(sharded(reshard_after_forward=False)),
    "two ranks after the forward": lambda _: train(sharded(reshard_after_forward=2)),
    "one flat parameter": lambda _: train(sharded(flatten_parameters=True)),
    "hybrid": lambda simulation: train(sharded(mesh=mesh_of(simulation))),
    "int8": lambda _: train(sharded(communication=INT8)),
    "int8, hybrid": lambda simulation: train(sharded(communication=INT8, mesh=mesh_of(simulation))),
    "finite gradients": lambda _: train(sharded(error_if_nonfinite=True)),
    "shards on the host": lambda _: train(sharded("cpu", **ON_HOST)),
    "shards on the host, bf16": lambda _: train(sharded("cpu", mp_policy=BF16, **ON_HOST)),
    "shards on the host, hybrid": lambda simulation: train(sharded("cpu", mesh=mesh_of(simulation), **ON_HOST)),
    "shards on the host, int8": lambda _: train(sharded("cpu", communication=INT8, **ON_HOST)),
    "shards on the host, not pinned": lambda _: train(
        sharded("cpu", compute_device="sim", offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "optimizer on the host": lambda _: train(sharded(), on_host),
    "half an optimizer on the host": lambda _: train(sharded(mp_policy=BF16), partial(on_host, host_fraction=0.5)),
    "optimizer on the host, early step": lambda _: train(sharded(), partial(on_host, overlap_step=True)),
    "optimizer on the host, late copies": lambda _: train(sharded(), partial(on_host, overlap_copies=False)),
    "optimizer on the host, hybrid": lambda simulation: train(sharded(mesh=mesh_of(simulation)), on_host),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_have_no_race(case: str, simulation: Simulation) -> None:
    CASES[case](simulation)


@pytest.mark.parametrize("case", ["plain", "shards on the host, bf16", "optimizer on the host, early step"])
def test_a_backward_in_a_thread_of_its_own_has_no_race(case: str) -> None:
    with simulate(world_size=4, device="sim", races=True, backward_thread=True) as simulation:
        CASES[case](simulation)


@pytest.mark.parametrize("options", [ON_HOST, {"mp_policy": BF16, **ON_HOST}], ids=["fp32", "bf16"])
def test_shards_on_the_host_of_one_rank_have_no_race(options: dict[str, Any]) -> None:
    """There no collective comes after the copies, whose wait would be one for them, too."""
    with simulate(device="sim", races=True):
        train(sharded("cpu", **options))


@pytest.fixture
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_update, offload_backward):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", WIDTH)


@pytest.mark.usefixtures("simulation", "many_buckets")
@pytest.mark.parametrize("overlaps", [False, True])
def test_an_optimizer_on_the_host_with_many_buckets_has_no_race(overlaps: bool) -> None:
    model = sharded()
    optimizer = on_host(model.parameters(), overlap_step=overlaps)
    for _ in range(STEPS):
        x = torch.randn(2, WIDTH, device="sim", requires_grad=True)
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("simulation", "many_buckets")
@pytest.mark.parametrize("options", [{}, {"overlap_step": True}, {"host_fraction": 0.5}], ids=["", "early", "half"])
def test_an_optimizer_on_the_host_of_a_plain_model_has_no_race(options: dict[str, Any]) -> None:
    """Their gradients are transposed, too, and parts of them are copied once more."""
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, device="sim").t()) for _ in range(LAYERS)]
    optimizer = on_host(weights, **options)
    for _ in range(STEPS):
        reduce(torch.matmul, weights, torch.randn(2, WIDTH, device="sim")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("simulation", "many_buckets")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_step_in_a_backward_and_then_loads_an_optimizer() -> None:
    """What is loaded is written when the updates of the pass that has failed have ended."""
    model = sharded()
    optimizer = on_host(model.parameters(), overlap_step=True)
    train(model, lambda _: optimizer)
    state = {**optimizer.state_dict(), "state": {}}
    for _ in range(STEPS):
        hidden = torch.randn(2, WIDTH, device="sim", requires_grad=True)
        hidden.register_hook(fail)
        with pytest.raises(KeyError, match="hook"):
            model(hidden).sum().backward()
        optimizer.load_state_dict(state)
        zero(model.parameters())


@pytest.mark.usefixtures("simulation")
@pytest.mark.parametrize("params, grads", [(True, False), (True, True), (False, True)], ids=["late", "early", "back"])
def test_gradients_that_come_to_the_host_have_no_race(params: bool, grads: bool) -> None:
    with torch.device("cpu" if params else "sim"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    options: Any = {"move_params_to_cpu": params, "move_grads_to_cpu": grads, "compute_device": "sim"}
    for index in range(LAYERS):
        model[index] = FullyShardedDataParallel(model[index], **options)
    train(FullyShardedDataParallel(model, **options))


def run(model: nn.Module) -> Tensor:
    output: Tensor = model(torch.randn(2, WIDTH, device="sim"))
    return output


def zero(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.data.zero_()


def gather_layers(model: nn.Module) -> None:
    for layer in model.children():
        assert isinstance(layer, FSDPModule)
        layer.unshard()
        layer.reshard()


def accumulates(model: FSDPModule) -> None:
    optimizer = adamw(model.parameters())
    for _ in range(STEPS):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            run(model).sum().backward()
        scale_core.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def evaluates(model: FSDPModule) -> None:
    def look() -> None:
        with torch.no_grad():
            run(model)
        for param in model.parameters():
            param.data.mul_(0.9)
        model.unshard()
        model.reshard()
        model.state_dict()

    train(model, after=look)


def writes_after_a_gather_by_hand(model: FSDPModule) -> None:
    train(model)
    gather_layers(model)
    zero(model.parameters())


def steps_after_a_forward_without_a_backward(model: FSDPModule) -> None:
    optimizer = adamw(model.parameters())
    for _ in range(STEPS):
        run(model).sum().backward()
        run(model)
        optimizer.step()


def averages(model: FSDPModule) -> None:
    average = ShardedEMA(model, decay=0.9)

    def look() -> None:
        average.update()
        gather_layers(model)
        run(model)
        with average.swapped():
            gather_layers(model)
            run(model)

    train(model, after=look)


def fails_in_backward(model: FSDPModule) -> None:
    for _ in range(STEPS):
        x = run(model)
        hidden = torch.randn(2, WIDTH, device="sim", requires_grad=True)
        hidden.register_hook(fail)
        with pytest.raises(KeyError, match="hook"):
            (x + model(hidden)).sum().backward()
        zero(model.parameters())
        train(model)


def fail(_: Tensor) -> None:
    raise KeyError("hook")


def writes_to_its_state(model: FSDPModule) -> None:
    def write() -> None:
        run(model)
        zero(shard.tensor for shard in sharded_state_dict(model).values())

    train(model, after=write)


def loads_its_state(model: FSDPModule) -> None:
    def load() -> None:
        saved = copy.deepcopy(sharded_state_dict(model))
        run(model)
        load_sharded_state_dict(saved, model)

    train(model, after=load)


@pytest.mark.usefixtures("simulation")
@pytest.mark.parametrize("options", [{}, ON_HOST], ids=["plain", "shards on the host"])
@pytest.mark.parametrize(
    "program",
    [
        accumulates,
        evaluates,
        writes_after_a_gather_by_hand,
        steps_after_a_forward_without_a_backward,
        averages,
        fails_in_backward,
        writes_to_its_state,
        loads_its_state,
    ],
)
def test_a_program_has_no_race(program: Callable[[Any], None], options: dict[str, Any]) -> None:
    program(sharded("cpu" if options else "sim", **options))


def test_accumulation_in_bf16_has_no_race(simulation: Simulation) -> None:
    accumulates(sharded(mp_policy=BF16))  # type: ignore[arg-type]  # fully_shard has made it one


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_buffer_released_early_or_discarded_has_no_race(num_ranks: int) -> None:
    with simulate(world_size=num_ranks, device="sim", races=True):
        group, weight = group_of(), torch.randn(WIDTH, WIDTH)
        devices = DevicePolicy(torch.device("cpu"), torch.device("sim", 0))
        layout = FlatLayout.plan(["weight"], [(WIDTH, WIDTH)], group.size)
        buffer = FlatBuffer(["weight"], [weight], layout, group, devices=devices)
        for end in (buffer.wait_gathered, buffer.release, buffer.discard) * STEPS:
            buffer.gather(tag=1 << 21)
            end()
            buffer.release()
            torch.ones(WIDTH, device="sim")
            buffer.load(0, weight)
        for _ in range(STEPS):
            (full,) = buffer.gather_full_params(tag=1 << 21)
            full.sum()
            buffer.wait_sent()


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("copies_shard", [False, True])
def test_a_gather_in_fp8_has_no_race(offloads: bool, copies_shard: bool, simulation: Simulation) -> None:
    group = group_of()
    weight = torch.randn(WIDTH, WIDTH, device="cpu" if offloads else "sim")
    layout = FlatLayout.plan(["weight"], [(WIDTH, WIDTH)], group.size)
    devices = DevicePolicy(torch.device("cpu"), torch.device("sim", 0)) if offloads else DevicePolicy()
    policy = WirePolicy(float8=[ScaledWeight()])
    buffer = FlatBuffer(["weight"], [weight], layout, group, devices=devices, transport_policy=policy)
    for _ in range(STEPS):
        buffer.gather(tag=1 << 21, copies_shard=copies_shard)
        if copies_shard:
            buffer.shard.zero_()
        buffer.wait_gathered(10.0)
        buffer.full.float().sum()
        buffer.release()
        buffer.wait_sent()
        buffer.shard.zero_()


def test_a_pass_that_is_dropped_late_is_aborted_by_the_next(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    queue_callback = hooks.queue_callback

    def keep(callback: Any) -> None:
        kept.append(callback)
        queue_callback(callback)

    model = sharded()
    monkeypatch.setattr(hooks, "queue_callback", keep)
    hidden = torch.randn(2, WIDTH, device="sim", requires_grad=True)
    hidden.register_hook(fail)
    with pytest.raises(KeyError, match="hook"):
        model(hidden).sum().backward()
    dropped = threading.Event()

    def drop() -> None:  # As the engine's own thread, which Python's list of threads does not have.
        kept.clear()
        dropped.set()

    aborts: list[str] = []
    abort = Root.abort
    monkeypatch.setattr(
        Root, "abort", lambda root, error: (aborts.append(threading.current_thread().name), abort(root, error))
    )
    assert kept
    _thread.start_new_thread(drop, ())
    assert dropped.wait(60) and aborts == []
    train(model)
    assert aborts == [threading.main_thread().name]
    assert all(param.grad is None for param in model.parameters())
