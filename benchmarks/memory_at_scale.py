"""Peak memory of one rank in large worlds: the real training step of each engine on tensors without memory.

    python benchmarks/memory_at_scale.py                     # every configuration and engine, 15 minutes
    python benchmarks/memory_at_scale.py --config 13b-w8-bs1 --engine fsdp2
    python benchmarks/memory_at_scale.py --smoke             # a tiny model
    python benchmarks/memory_at_scale.py --date 2026-11-21   # also writes results/2026-11-21-memory_at_scale.*

All engines get the same model: a pre-norm GPT whose blocks are activation-checkpointed, sequences of 2,048 tokens,
computation, gathers and reductions in bf16, fp32 master weights and AdamW without fused kernels. Each block is a unit,
and so are the embeddings and the head, but for plain "fsdp2". In "-halves", attention and feed-forward are a unit each,
inside the block's checkpoint: smaller buffers, but scale-fsdp releases attention after its recomputation and gathers it
a third time, where FSDP2 keeps it. With "-offload", shards, gradients and Adam are on the host, and the model computes
on a stand-in for a device, so that each has a peak of its own; all others keep everything in one memory. The second
step is measured, since Adam's state exists only from the first step on.
The figures are bytes of tensors. The device's allocator and the transport need more: see `scale_check.simulate`, and
benchmarks/published_memory.py for the allocator.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from report import Table, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_check.simulate import Simulation, simulate

GIB = 2**30
SEQUENCE = 2048
VOCABULARY = 50_257


@dataclass(frozen=True)
class Size:
    """How large a GPT is: the sizes of Brown et al., 2020, table 2.1."""

    layers: int
    width: int
    heads: int


SIZES = {"tiny": Size(2, 64, 2), "13b": Size(40, 5120, 40), "175b": Size(96, 12288, 96)}


@dataclass(frozen=True)
class Config:
    """One row of the table.

    Attributes:
        size: Which of `SIZES`.
        world_size: The number of ranks.
        batch: Sequences per rank.
        loss_chunks: In how many pieces of the tokens the logits are computed, each anew in the backward pass.
        goal_gib: What scale-fsdp must not exceed.
        host_goal_gib: Likewise on the host, where shards and optimizer state are kept there; None is no offload.
    """

    size: str
    world_size: int
    batch: int
    loss_chunks: int
    goal_gib: float
    host_goal_gib: float | None = None

    @property
    def offloads(self) -> bool:
        return self.host_goal_gib is not None


CONFIGS = {
    "13b-w8-bs1": Config("13b", 8, 1, 8, 26.2),
    "13b-w8-bs8": Config("13b", 8, 8, 16, 29.3),
    "175b-w128-bs1": Config("175b", 128, 1, 8, 30.8),
    "13b-w1-bs1-offload": Config("13b", 1, 1, 8, 3.93, host_goal_gib=198.9),
    "13b-w1-bs8-offload": Config("13b", 1, 8, 16, 11.33, host_goal_gib=198.9),
    "tiny-w4-bs1": Config("tiny", 4, 1, 8, 1.0),
    "tiny-w1-bs1-offload": Config("tiny", 1, 1, 8, 1.0, host_goal_gib=1.0),
}
SMOKE = [name for name in CONFIGS if name.startswith("tiny")]


class Attention(nn.Module):
    """The first half of a pre-norm transformer block, [B, T, d] -> [B, T, d]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        changed: Tensor = self.project(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + changed


class Feed(nn.Module):
    """The second half: the two linear layers of each token by itself, [B, T, d] -> [B, T, d]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + changed


class Embed(nn.Module):
    """Token and position embeddings, [B, T] -> [B, T, d]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(SEQUENCE, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions.weight
        return embedded


class Head(nn.Module):
    """The mean cross entropy of the next token, in pieces, so that the logits of all tokens never stand together."""

    def __init__(self, size: Size, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        pieces = zip(x.flatten(0, 1).chunk(self.chunks), targets.flatten().chunk(self.chunks), strict=True)
        losses = [checkpoint(self._sum, piece, target, use_reentrant=False) for piece, target in pieces]
        return torch.stack(losses).sum() / targets.numel()

    def _sum(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.norm(x)).float(), targets, reduction="sum")


class GPT(nn.Module):
    """A GPT that returns its loss; its blocks keep nothing but their input for the backward."""

    def __init__(self, size: Size, loss_chunks: int) -> None:
        super().__init__()
        self.embed = Embed(size)
        self.blocks = nn.ModuleList(nn.Sequential(Attention(size), Feed(size)) for _ in range(size.layers))
        self.head = Head(size, loss_chunks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss: Tensor = self.head(x, targets)
        return loss


def blocks(model: GPT) -> list[nn.Module]:
    return list(model.blocks)


def blocks_and_ends(model: GPT) -> list[nn.Module]:
    return [model.embed, *model.blocks, model.head]


def halves_and_ends(model: GPT) -> list[nn.Module]:
    return [model.embed, *(half for block in model.blocks for half in block.children()), model.head]


def fsdp2(model: GPT, units: list[nn.Module], simulation: Simulation, offload: bool) -> None:
    """torch's FSDP2; what no unit holds is the root's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    with simulation.aside():
        mesh = init_device_mesh(simulation.device.type, (simulation.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    place = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()  # Fake memory can't be pinned.
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=place)


def scale_fsdp(model: GPT, units: list[nn.Module], simulation: Simulation, offload: bool) -> None:
    """scale-fsdp, likewise."""
    from scale_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    for unit in (*units, model):
        fully_shard(unit, mp_policy=policy, offload_policy=place)


@dataclass(frozen=True)
class Engine:
    """How a model is sharded.

    Attributes:
        shard: Makes the units, and the whole model one more; with True, what is sharded goes to the host.
        units: Which modules they are.
        has_goal: Whether it is held to the goals.
    """

    shard: Callable[[GPT, list[nn.Module], Simulation, bool], None]
    units: Callable[[GPT], list[nn.Module]]
    has_goal: bool = False


ENGINES = {
    "fsdp2": Engine(fsdp2, blocks),
    "fsdp2-ends": Engine(fsdp2, blocks_and_ends),
    "fsdp2-halves": Engine(fsdp2, halves_and_ends),
    "scale-fsdp": Engine(scale_fsdp, blocks_and_ends, has_goal=True),
    "scale-fsdp-halves": Engine(scale_fsdp, halves_and_ends, has_goal=True),
}


@dataclass(frozen=True)
class Row:
    """What one engine needs in one configuration: bytes per rank in the second step, and seconds to find that out.

    Where nothing is offloaded there is one memory, and none on the host.
    """

    config: str
    engine: str
    peak_bytes: int
    peak_by_kind: dict[str, int]
    host_peak_by_kind: dict[str, int]
    bytes_sent: dict[str, int]
    collectives: int
    cpu_seconds: float


def measure(name: str, engine: str) -> Row:
    """Runs two steps of rank 0 and reads the books of the second."""
    config = CONFIGS[name]
    started = time.process_time()
    with simulate(rank=0, world_size=config.world_size, device="sim" if config.offloads else "cpu") as simulation:
        with simulation.device:
            model = GPT(SIZES[config.size], config.loss_chunks)
        ENGINES[engine].shard(model, ENGINES[engine].units(model), simulation, config.offloads)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            simulation.restart()
            tokens = torch.zeros(config.batch, SEQUENCE + 1, dtype=torch.int64, device=simulation.device)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del tokens, loss
        print(f"\n{name}, {engine}\n{simulation.report()}", flush=True)
        return Row(
            config=name,
            engine=engine,
            peak_bytes=simulation.peak_bytes,
            peak_by_kind=simulation.peak_by_kind,
            host_peak_by_kind=simulation.on("cpu").peak_by_kind if config.offloads else {},
            bytes_sent=simulation.bytes_sent,
            collectives=len(simulation.collectives),
            cpu_seconds=round(time.process_time() - started, 1),
        )


def tables(rows: list[Row]) -> list[Table]:
    """The rows for people, in GiB: first those with one memory, then those with two."""
    return [
        _table(title, [row for row in rows if CONFIGS[row.config].offloads == offloads])
        for title, offloads in (
            ("GiB of rank 0 in its second step", False),
            ("The same with shards, gradients and Adam on the host", True),
        )
        if any(CONFIGS[row.config].offloads == offloads for row in rows)
    ]


def _table(title: str, rows: list[Row]) -> Table:
    kinds = sorted({kind for row in rows for kind in row.peak_by_kind})
    host_kinds = sorted({kind for row in rows for kind in row.host_peak_by_kind})
    host_heads = ["host", "goal", *(f"host: {kind}" for kind in host_kinds)] if host_kinds else []
    heads = ["configuration", "engine", "peak", "goal", *kinds, *host_heads, "sent", "collectives", "CPU s"]
    return Table(title, heads, [_cells(row, kinds, host_kinds) for row in rows])


def _cells(row: Row, kinds: list[str], host_kinds: list[str]) -> list[str]:
    config, has_goal = CONFIGS[row.config], ENGINES[row.engine].has_goal
    cells = [row.config, row.engine, *_sizes(row.peak_by_kind, kinds, config.goal_gib if has_goal else None)]
    if host_kinds:
        cells += _sizes(row.host_peak_by_kind, host_kinds, config.host_goal_gib if has_goal else None)
    sent = f"{sum(row.bytes_sent.values()) / GIB:.1f}"
    return [*cells, sent, str(row.collectives), f"{row.cpu_seconds:.0f}"]


def _sizes(by_kind: dict[str, int], kinds: list[str], goal_gib: float | None) -> list[str]:
    """A peak, what it must not exceed, and what it is made of."""
    goal = "" if goal_gib is None else f"<= {goal_gib}"
    return [f"{sum(by_kind.values()) / GIB:.2f}", goal, *(f"{by_kind.get(kind, 0) / GIB:.2f}" for kind in kinds)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak memory of one rank in large worlds, simulated.")
    parser.add_argument("--config", choices=CONFIGS, action="append", help="may be given several times; default: all")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="may be given several times; default: all")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: whether it runs")
    parser.add_argument("--date", help="also writes results/DATE-memory_at_scale.json and .md")
    options = parser.parse_args()
    configs = SMOKE if options.smoke else options.config or [name for name in CONFIGS if name not in SMOKE]
    rows = [measure(config, engine) for config in configs for engine in options.engine or ENGINES]
    for table in tables(rows):
        print(table.markdown())
    if options.date:
        save("memory_at_scale", options.date, __doc__ or "", tables(rows), [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
