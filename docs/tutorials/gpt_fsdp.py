"""A small GPT learns to write Python, sharded by FSDP, in bf16, with checkpoints.

    torchrun --nproc-per-node 2 docs/tutorials/gpt_fsdp.py --out run --steps 100
    torchrun --nproc-per-node 4 docs/tutorials/gpt_fsdp.py --out run --steps 200

The second command goes on at step 100, on another number of ranks. The text is the
source code of Python's own standard library, byte by byte, so nothing is downloaded.
`python docs/tutorials/gpt_fsdp.py` runs it on one process.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scale_snapshot
from scale_core import group_of
from scale_core.comm.collectives import all_reduce
from scale_core.launch import init_distributed
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import MixedPrecisionPolicy, fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 96, 4, 3
PEAK_LR, WARMUP = 3e-3, 10


class Block(nn.Module):
    """Attention and a perceptron, each on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, context, width] for the same shape."""
        batch, context, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, context, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Embedding(256, WIDTH),
            nn.Embedding(CONTEXT, WIDTH),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [batch, context, 256] for tokens [batch, context]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def read_text(num_bytes: int = 1_000_000) -> tuple[Tensor, Tensor]:
    """Returns the bytes to learn from and the bytes to test on, as int64."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:num_bytes]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def batch_of(data: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of a batch: inputs and targets, each [part, context].

    All ranks draw the same batch from the seed, and each takes its part. So a batch
    depends on the step alone, and not on the number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
    group = group_of()
    rows = starts.chunk(group.size)[group.rank][:, None] + torch.arange(CONTEXT + 1)
    tokens = data[rows].to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def mean_over_ranks(value: Tensor) -> float:
    """Returns the mean of a number over all ranks; all ranks call it."""
    group = group_of()
    return float(all_reduce(value.detach().clone(), group).wait()) / group.size


def loss_of(model: nn.Module, data: Tensor, seed: int) -> Tensor:
    """Returns the cross entropy of this rank's part of a batch."""
    tokens, targets = batch_of(data, seed)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the loss of each step and at last the held-out loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="gpt-run", help="folder that all ranks see")
    options = parser.parse_args(arguments)
    group = init_distributed()
    training, held_out = read_text()

    torch.manual_seed(0)
    model = GPT().to(DEVICE)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=bf16)  # gathered when it runs, freed afterwards
    # The loss is computed in fp32: only the root unit casts its output.
    bf16_root = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    fully_shard(model, mp_policy=bf16_root)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)  # of the shards
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARMUP, 0.5 * (1 + math.cos(step / 500))),
    )
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    begin = 0
    if scale_snapshot.latest(options.out):
        begin = scale_snapshot.load(options.out, objects).step
    if group.rank == 0:
        shard = sum(local_tensor(param).numel() for param in model.parameters())
        print(f"{group.size} ranks from step {begin}; rank 0 keeps {shard:,} elements")

    losses, started = [], time.perf_counter()
    for step in range(begin, options.steps):
        loss = loss_of(model, training, seed=step)
        loss.backward()
        norm = model.clip_grad_norm_(1.0)  # the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(mean_over_ranks(loss))
        if group.rank == 0 and (step % 20 == 0 or step == options.steps - 1):
            rate = len(losses) * BATCH * CONTEXT / (time.perf_counter() - started)
            print(
                f"step {step}: loss {losses[-1]:.3f}, norm {norm:.2f}, {rate:,.0f} B/s"
            )
    scale_snapshot.save(options.out, options.steps, objects, keep=2)

    with torch.no_grad():
        tests = [loss_of(model, held_out, seed=-1 - number) for number in range(4)]
    losses.append(mean_over_ranks(torch.stack(tests).mean()))
    if group.rank == 0:
        print(f"held-out: {losses[-1] / math.log(2):.2f} bits per byte (untrained: 8)")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
