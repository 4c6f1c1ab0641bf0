"""A DDP script, and the same script on OSS and ShardedDataParallel (ZeRO-2).

    torchrun --nproc-per-node 2 docs/tutorials/ddp_to_oss.py --wrapper ddp
    torchrun --nproc-per-node 2 docs/tutorials/ddp_to_oss.py --wrapper sharded

A perceptron learns to tell two spirals apart, with warmup, a cosine schedule and a
moving average of its weights (EMA). Both commands print the same losses; the second
one keeps half of the gradients and of Adam's state on each of two ranks.
"""

import argparse
import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_core.launch import init_distributed
from scale_core.sharded_tensor.tensor import local_tensor
from scale_oss import OSS, ShardedDataParallel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, WIDTH, PEAK_LR, WARMUP = 256, 128, 5e-3, 20


def spirals(num_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns points [num_points, 2] and the number of the spiral of each, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(2, (num_points,), generator=generator)
    radii = torch.rand(num_points, generator=generator).sqrt()
    angles = 2.5 * math.pi * radii + math.pi * arms
    points = radii[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1)
    points += 0.02 * torch.randn(num_points, 2, generator=generator)
    return points.to(DEVICE), arms.to(DEVICE)


def build() -> nn.Module:
    """Returns the model; the same on all ranks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(2, WIDTH), nn.GELU()]
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2)).to(DEVICE)


def accuracy(model: nn.Module) -> float:
    """Returns the share of 2,000 new points that a model tells apart."""
    points, arms = spirals(2000, seed=1_000_000)
    with torch.no_grad():
        return float((model(points).argmax(1) == arms).float().mean())


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Trains; returns losses, accuracies (weights, average) and bytes of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrapper", choices=["ddp", "sharded"], default="sharded")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)
    init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()

    net = build()
    model: nn.Module
    optimizer: torch.optim.Optimizer
    if options.wrapper == "ddp":
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK_LR)
    else:  # the two lines that change
        optimizer = OSS(net.parameters(), torch.optim.AdamW, lr=PEAK_LR)
        model = ShardedDataParallel(net, optimizer)
    # Everything below is the same for both.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / options.steps))
        ),
    )
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))

    losses = []
    for step in range(options.steps):
        points, arms = (part.chunk(size)[rank] for part in spirals(BATCH, seed=step))
        loss = F.cross_entropy(model(points), arms)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(net)  # reads the weights after the step
        if step == options.steps - 1:
            grads = [param.grad for param in net.parameters() if param.grad is not None]
            grad_bytes = sum(map(local_bytes, grads))
        optimizer.zero_grad()
        loss = loss.detach() / size
        dist.all_reduce(loss)
        losses.append(float(loss))
        if rank == 0 and (step % 30 == 0 or step == options.steps - 1):
            rate = schedule.get_last_lr()[0]
            print(f"step {step}: loss {losses[-1]:.4f}, learning rate {rate:.5f}")

    states = optimizer.optim if isinstance(optimizer, OSS) else optimizer
    tensors = [
        value
        for state in states.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    state_bytes = sum(map(local_bytes, tensors))
    found = [accuracy(net), accuracy(average)]
    if rank == 0:
        print(f"accuracy {found[0]:.1%}, of the moving average {found[1]:.1%}")
        print(f"rank 0: gradients {grad_bytes:,} bytes, Adam's state {state_bytes:,}")
    return {"losses": losses, "accuracy": found, "bytes": [grad_bytes, state_bytes]}


def local_bytes(tensor: Tensor) -> int:
    """Returns the bytes that this rank keeps of a tensor, which may be a shard."""
    local = local_tensor(tensor)
    return int(local.numel() * local.element_size())


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
