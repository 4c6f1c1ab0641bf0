"""A U-Net in a pipeline: uneven layers, skip connections, and a solved schedule.

    torchrun --nproc-per-node 2 docs/tutorials/unet_pipeline.py

The U-Net learns to remove noise from pictures of squares. Its outer layers work on
large pictures and its inner layers on small ones, so an even cut is a bad cut. Layers
are balanced by their measured times, and the solver finds a schedule for these times.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from scale_core.launch import init_distributed
from scale_pipe import (
    DistributedPipe,
    Namespace,
    PipelineOptions,
    balance_by_time,
    pop,
    simulate,
    skippable,
    stash,
    verify_skippables,
)
from scale_pipe.schedules.classic import interleaved_1f1b

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, CHUNKS, SIZE, STAGES_PER_RANK = 32, 8, 16, 2


@skippable(stash=["skip"])
class Down(nn.Module):
    """Keeps its result for the layer on the other side, and halves the picture."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Iterator[Any]:
        """Returns [N, outputs, H / 2, W / 2] for [N, inputs, H, W]."""
        x = F.silu(self.conv(x))
        yield stash("skip", x)
        return F.avg_pool2d(x, 2)  # type: ignore[misc]  # a generator's value


@skippable(pop=["skip"])
class Up(nn.Module):
    """Doubles the picture, and adds what `Down` has kept."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Iterator[Any]:
        """Returns [N, outputs, 2 H, 2 W] for [N, inputs, H, W]."""
        skip = yield pop("skip")
        return F.silu(self.conv(F.interpolate(x, scale_factor=2)) + skip)  # type: ignore[misc]


class Middle(nn.Module):
    """Convolutions on the smallest pictures, around a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [N, channels, H, W] for the same shape."""
        return x + F.silu(self.conv(x))


def build() -> nn.Sequential:
    """Returns the U-Net as a sequence; each pair of Down and Up has its own skip."""
    torch.manual_seed(0)
    outer, inner = Namespace(), Namespace()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        Down(16, 24).isolate(outer),
        Down(24, 32).isolate(inner),
        *(Middle(32) for _ in range(3)),
        Up(32, 32).isolate(inner),
        Up(32, 24).isolate(outer),
        nn.Conv2d(24, 1, 3, padding=1),
    )
    verify_skippables(net)
    return net


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Returns noisy and clean pictures, each [32, 1, 16, 16]: one square on each."""
    generator = torch.Generator().manual_seed(step)
    corners = torch.randint(1, SIZE // 2, (BATCH, 2, 1), generator=generator)
    sides = torch.randint(3, SIZE // 2, (BATCH, 2, 1), generator=generator)
    places = torch.arange(SIZE)
    inside = (places >= corners) & (places < corners + sides)  # [32, 2, 16]
    clean = (inside[:, 0, :, None] & inside[:, 1, None, :]).float()[:, None]
    noisy = clean + 0.5 * torch.randn(clean.shape, generator=generator)
    return noisy.to(DEVICE), clean.to(DEVICE)


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Trains; returns losses, noise (before, after) and idle shares (1F1B, solved)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    group = init_distributed()

    # All ranks measure, and get the same balance.
    sample = batch_of(0)[0][: BATCH // CHUNKS]
    net = build()
    balance = balance_by_time(STAGES_PER_RANK * group.size, net, sample, seconds=0.5)
    if group.rank == 0:
        print(f"{len(net)} layers, balance {balance}")
    # "solve" measures the second step, and the later ones run what the solver found.
    pipe = DistributedPipe(
        net,
        "solve",
        balance=balance,
        chunks=CHUNKS,
        options=PipelineOptions(stages_per_rank=STAGES_PER_RANK),
        device=DEVICE,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=4e-3)

    losses = []
    for step in range(options.steps):
        noisy, clean = batch_of(step)
        # The first stage uses the inputs, and the last one the targets.
        loss = pipe.step(noisy, target=clean, loss_fn=F.mse_loss)
        pipe.clip_grad_norm_(1.0)  # the norm over all stages
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))  # the same on all ranks
        if group.rank == 0 and (step % 15 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {losses[-1]:.4f} ({pipe.schedule.name})")

    # With the times of the last step: what would the classic schedule have cost?
    costs = pipe.measured().costs
    classic = interleaved_1f1b(group.size, CHUNKS, STAGES_PER_RANK)
    idle = [simulate(each, costs).bubble for each in (classic, pipe.schedule)]
    noisy, clean = batch_of(1_000_000)
    before = float(F.mse_loss(noisy, clean))
    after = float(pipe.evaluate(noisy, target=clean, loss_fn=F.mse_loss))
    if group.rank == 0:
        print(f"idle share of the busiest rank: {classic.name} {idle[0]:.1%}, ", end="")
        print(f"{pipe.schedule.name} {idle[1]:.1%}")
        print(f"noise on new pictures: {before:.4f} before, {after:.4f} after")
    return {"losses": losses, "noise": [before, after], "idle": idle}


if __name__ == "__main__":
    main(sys.argv[1:])
    if dist.is_initialized():
        dist.destroy_process_group()
