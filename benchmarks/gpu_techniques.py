"""The techniques that `gpu_first.py` runs on one or two ranks of one device, each with plain PyTorch's numbers.

A technique trains a small model for some steps and returns the loss of the full batch in each, and what its ranks
disagree on shows in them. `delayed` plants a pause on every side stream and before every collective: work that another
stream should have waited for then comes too late, and the numbers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import scale_fsdp
import scale_tp
from scale_adascale import AdaScale
from scale_checkpoint import checkpoint_wrapper
from scale_core import ShardedGradScaler
from scale_core.comm import collectives
from scale_core.comm.group import Group, group_of
from scale_core.device.streams import stream_for
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy
from scale_core.flat.layout import FlatLayout
from scale_fsdp.transports.policy import WirePolicy
from scale_moe import MoE, average_replicated_gradients
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe

WIDTH, BATCH = 256, 32
CYCLES_PER_SECOND = 2e9  # about one of an H100 or H200 at their boost clock
Step = Callable[[Tensor, Tensor], Tensor]
Losses = list[float]
Around = Callable[[], AbstractContextManager[object]]


def layers(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(*blocks).to(device)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return inputs.to(device), targets.to(device)


def part_of_rank(tensors: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
    return tuple(tensor.chunk(group.size)[group.rank] for tensor in tensors)


def mean_over_ranks(loss: Tensor, group: Group) -> float:
    """The loss of the full batch; it goes over the host, so that it adds no order between streams."""
    value = loss.detach().cpu() / group.size
    if group.size > 1:
        dist.all_reduce(value)
    return float(value)


def train(
    model: nn.Module, optimizer: Any, device: torch.device, steps: int, around: Around, *, whole: bool = False
) -> Losses:
    """Trains `model`; every rank has its part of the batch, or all of it."""
    group, losses = group_of(), []
    for step in range(steps):
        inputs, targets = batch(step, device) if whole else part_of_rank(batch(step, device), group)
        with around():
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()) if whole else mean_over_ranks(loss, group))
    return losses


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def plain(device: torch.device, steps: int, around: Around) -> Losses:
    model = layers(device)
    return train(model, adam(model.parameters()), device, steps, around, whole=True)


def fsdp(device: torch.device, steps: int, around: Around, *, on_host: bool = False, **options: Any) -> Losses:
    model = layers(torch.device("cpu") if on_host else device)
    if on_host:
        options = {
            "offload_policy": scale_fsdp.CPUOffloadPolicy(),
            "options": scale_fsdp.ShardOptions(compute_device=device),
            **options,
        }
    for block in model:
        scale_fsdp.fully_shard(block, **options)
    scale_fsdp.fully_shard(model, **options)
    return train(model, adam(model.parameters()), device, steps, around)


def fsdp_bf16(device: torch.device, steps: int, around: Around) -> Losses:
    return fsdp(device, steps, around, mp_policy=scale_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp_int8(device: torch.device, steps: int, around: Around, *, on_host: bool = False) -> Losses:
    policy = scale_fsdp.CommunicationPolicy(gather="int8", reduce="int8")
    shard_options = scale_fsdp.ShardOptions(communication=policy, compute_device=device if on_host else None)
    return fsdp(device, steps, around, on_host=on_host, options=shard_options)


def offload_optimizer(device: torch.device, steps: int, around: Around, **options: Any) -> Losses:
    model = layers(device)
    for block in model:
        scale_fsdp.fully_shard(block)
    scale_fsdp.fully_shard(model)
    settings = {"lr": 1e-3, "host_fraction": 1.0, **options}
    optimizer = scale_fsdp.OffloadOptimizer(torch.optim.AdamW, model.parameters(), **settings)
    return train(model, optimizer, device, steps, around)


def oss(device: torch.device, steps: int, around: Around) -> Losses:
    model = layers(device)
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return train(ShardedDataParallel(model, optimizer), optimizer, device, steps, around)


def adascale(device: torch.device, steps: int, around: Around) -> Losses:
    model = layers(device)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=1e-2)
    wrapped = ShardedDataParallel(model, optimizer)
    if group_of().size == 1:
        return train(wrapped, optimizer, device, steps, around)  # One gradient a step tells it nothing.
    return train(wrapped, AdaScale(optimizer), device, steps, around)


class _Scaled:
    """A scaler's step behind an optimizer's methods."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.scaler = optimizer, ShardedGradScaler(init_scale=1024.0)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def scaler(device: torch.device, steps: int, around: Around, *, fused: bool = False) -> Losses:
    model = layers(device)
    for block in model:
        scale_fsdp.fully_shard(block)
    scale_fsdp.fully_shard(model)
    scaled = _Scaled(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused))
    group, losses = group_of(), []
    for step in range(steps):
        inputs, targets = part_of_rank(batch(step, device), group)
        with around():
            loss = F.mse_loss(model(inputs), targets)
            scaled.scaler.scale(loss).backward()
            scaled.step()
            scaled.zero_grad()
        losses.append(mean_over_ranks(loss, group))
    return losses


def checkpoint(device: torch.device, steps: int, around: Around) -> Losses:
    model = layers(device)
    model = nn.Sequential(*(checkpoint_wrapper(block, offload_to_cpu=True) for block in model))
    for block in model:
        scale_fsdp.fully_shard(block)
    scale_fsdp.fully_shard(model)
    return train(model, adam(model.parameters()), device, steps, around)


def tensor_parallel(device: torch.device, steps: int, around: Around) -> Losses:
    model, group = layers(device), group_of()
    scale_tp.initialize_model_parallel(group.size)
    try:
        scale_tp.parallelize(model, {"*.0": "colwise", "*.2": "rowwise"})
        return train(model, adam(model.parameters()), device, steps, around, whole=True)
    finally:
        scale_tp.destroy_model_parallel()


def experts(device: torch.device, steps: int, around: Around, *, alone: bool = False) -> Losses:
    """A layer of experts; `alone` on one process with the tokens of all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, 64, 4, process_group=Group() if alone else None))
    model = model.to(device)
    if group_of().size > 1 and not alone:
        average_replicated_gradients(model)
    return train(model, adam(model.parameters()), device, steps, around, whole=alone)


def pipeline(device: torch.device, steps: int, around: Around) -> Losses:
    group = group_of()
    balance = [4 // group.size] * group.size
    pipe = DistributedPipe(layers(device), "1f1b", balance=balance, chunks=4, device=device)
    optimizer, losses = adam(pipe.parameters()), []
    for step in range(steps):
        inputs, targets = batch(step, device)
        with around():
            loss = pipe.step(inputs, target=targets, loss_fn=F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def ring(device: torch.device, steps: int, around: Around) -> Losses:
    """Attention over a divided sequence; each loss is that of the full sequence."""
    group, losses = group_of(), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        full = [torch.randn(2, 4, 64, 32, generator=generator).to(device) for _ in range(3)]
        parts = [scale_tp.split_sequence(each, group, dim=2).requires_grad_() for each in full]
        with around():
            output = scale_tp.ring_attention(*parts, group, is_causal=True)
            output.square().sum().backward()
        squares = sum(part.grad.square().sum() for part in parts)  # type: ignore[union-attr]
        losses.append(group.size * mean_over_ranks(torch.as_tensor(squares), group))
    return losses


def attention(device: torch.device, steps: int, around: Around) -> Losses:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        full = [torch.randn(2, 4, 64, 32, generator=generator).to(device).requires_grad_() for _ in range(3)]
        F.scaled_dot_product_attention(*full, is_causal=True).square().sum().backward()
        losses.append(float(sum(part.grad.square().sum() for part in full)))  # type: ignore[union-attr]
    return losses


class _CastWeight:
    """A weight that is gathered in fp8, as torchao's are."""

    dtype = torch.float8_e4m3fn

    def scale(self, amax: Tensor) -> Tensor:
        return 448.0 / amax.clamp(min=1e-12)

    def cast(self, values: Tensor, scale: Tensor, out: Tensor) -> None:
        out.copy_((values * scale).clamp(-448, 448).to(self.dtype).view(torch.uint8))


def float8_gather(device: torch.device, steps: int, around: Around) -> Losses:
    """The sums of the bytes that gathers of a shard on the host leave."""
    group, losses = group_of(), []
    layout = FlatLayout.plan(["weight"], [(WIDTH, WIDTH)], group.size)
    devices = DevicePolicy(shard=torch.device("cpu"), compute=device)
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    weights: Any = [_CastWeight()]
    flat = FlatBuffer(["weight"], [weight], layout, group, devices=devices, transport_policy=WirePolicy(float8=weights))
    for _ in range(steps):
        with around():
            flat.gather(tag=1 << 21)
            flat.wait_gathered(10.0)
            total = flat.full.view(torch.uint8).to(torch.int64).sum()
            flat.release()
            flat.wait_sent()
        losses.append(float(total))
    return losses


Technique = Callable[[torch.device, int, Around], Losses]

# Each technique with the plain program of the same numbers; None is one whose numbers are its own, as of int8.
TECHNIQUES: dict[str, tuple[Technique, Technique | None]] = {
    "fsdp": (fsdp, plain),
    "fsdp, shards on the host": (partial(fsdp, on_host=True), plain),
    "fsdp, bf16": (fsdp_bf16, None),
    "fsdp, int8": (fsdp_int8, None),
    "fsdp, int8, shards on the host": (partial(fsdp_int8, on_host=True), None),
    "fp8 gather, shards on the host": (float8_gather, None),
    "OffloadOptimizer": (offload_optimizer, plain),
    "OffloadOptimizer, half": (partial(offload_optimizer, host_fraction=0.5), plain),
    "OffloadOptimizer, overlap_step": (partial(offload_optimizer, overlap_step=True), plain),
    "oss": (oss, plain),
    "adascale": (adascale, None),
    "scaler": (scaler, plain),
    "checkpoint offload": (checkpoint, plain),
    "tensor parallel": (tensor_parallel, plain),
    "experts": (experts, partial(experts, alone=True)),
    "pipeline": (pipeline, plain),
    "ring attention": (ring, attention),
}


@contextmanager
def delayed(device: torch.device, seconds: float) -> Iterator[None]:
    """Inside, each use of a side stream and each collective begins with a pause on the device."""
    if device.type != "cuda":
        yield
        return
    cycles = int(seconds * CYCLES_PER_SECOND)
    side, start = type(stream_for(device)), collectives.start_work
    run = side.run

    @contextmanager
    def run_late(stream: Any, **options: Any) -> Iterator[object]:
        with run(stream, **options) as inner:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            yield inner

    def start_late(peer: Any, begin: Any) -> Any:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        return start(peer, begin)

    side.run, collectives.start_work = run_late, start_late  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        side.run, collectives.start_work = run, start  # type: ignore[method-assign]
