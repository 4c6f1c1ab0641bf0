"""A mixture of experts divided between ranks, beside one process, transformers and DeepSpeed.

    python benchmarks/experts.py                        # worlds 2 and 4; some minutes of two cores
    python benchmarks/experts.py --turns 9
    python benchmarks/experts.py --simulate             # the simulation alone: 64 and 512 ranks; some minutes as well
    python benchmarks/experts.py --smoke                # tiny sizes, one turn: that it runs
    python benchmarks/experts.py --date 2026-11-28      # also writes results/2026-11-28-experts.*

Forward and backward of one layer with a gradient for its input, fp32, one thread. On one process: the same weights and
the same routing by a loop over experts in plain PyTorch, by the three implementations of transformers, by DeepSpeed's
`MoE` where it is installed (`drop_tokens=False`) and by `MoE`; CPU time, the median over turns, and its ratio to the
loop's in the same turn.

Divided: each rank has its part of the same tokens; gloo. "CPU" is that of all ranks over that of scale-moe on one
process with all tokens. "sent" is what one rank writes to its sockets in a step, per token of
its own, counted by the kernel; "floor" is 4 * k * dim * itemsize * (W - 1) / W: there and back, in both directions, for
choices that are evenly spread (of this batch a few more stay at home).
"imbalance" is the most rows that a rank computes with, over the mean.

Simulated: rank 0 of 64 and 512, the second step, one sequence of 4096 tokens on each rank, blocks recomputed, bf16
with fp32 shards and AdamW. Mixtral 8x7B in its own sizes, and a model with the sizes of DeepSeek-V3: 256 experts of
which a token has 8, a shared one, latent attention (without its positions), three dense blocks. All of it by
scale-fsdp alone, a block a unit; or the experts of a block divided over 8 or 64 ranks and sharded over the others.
Tokens are evenly spread. Floors, W ranks of which E divide experts and the R = W / E others have the same ones:
    sent: 2 bytes of all that is sharded over W, (W - 1) / W of it, gathered twice (embedding and head once) and reduced
        once; the same of a rank's experts, (R - 1) / R of them; and its rows there and back in the forward, the
        recomputation and the backward, 6 * k * tokens * dim * 2 bytes * (E - 1) / E for each block with experts
    peak: 16 bytes of each parameter / W (fp32 shards, gradients, two of AdamW), 4 of each that a rank computes a block
        with (gathered, and its gradient), 2 of embedding and head
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Spent, spending
from report import Table, save
from torch import Tensor, nn

from scale_check.simulate import simulate
from scale_checkpoint import apply_checkpointing
from scale_core.comm.group import Group
from scale_core.shard import full_numel
from scale_core.testing import run_ranks
from scale_fsdp import MixedPrecisionPolicy, fully_shard
from scale_moe import MoE

GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    """Sizes of a model that is simulated, and tokens of a rank."""

    name: str
    layers: int
    dim: int
    heads: int
    key_value_heads: int
    query_features: int  # of a head
    value_features: int
    num_experts: int
    top_k: int
    hidden: int  # features inside an expert
    vocabulary: int
    latent: tuple[int, int] | None = None  # features of queries, and of keys and values
    shared: int = 0  # features inside the expert that all tokens go through
    dense_layers: int = 0  # the first ones, without experts
    dense: int = 0  # features inside of these
    num_tokens: int = 4096


MIXTRAL = Model("Mixtral 8x7B", 32, 4096, 32, 8, 128, 128, 8, 2, 14336, 32000)
DEEPSEEK = Model(
    "256 experts, as DeepSeek-V3", 61, 7168, 128, 128, 192, 128, 256, 8, 2048, 129280, (1536, 512), 2048, 3, 18432
)
CASES = [
    (model, world, expert_ranks)
    for model, divided in ((MIXTRAL, 8), (DEEPSEEK, 64))
    for world in (64, 512)
    for expert_ranks in (1, divided)
]
"""What is simulated: ranks, and how many of them divide the experts of a block."""


@dataclass(frozen=True)
class Sizes:
    """Of a layer, and tokens of all ranks together."""

    dim: int = 256
    hidden_dim: int = 512
    num_experts: int = 16
    top_k: int = 2
    num_tokens: int = 1024


@dataclass(frozen=True)
class Divided:
    """What was found of a rank: CPU seconds by turn, bytes sent in a step, rows that it computes with."""

    cpu: list[float]
    sent: int
    rows: int


def build(sizes: Sizes, group: Group | None = None) -> MoE:
    torch.manual_seed(0)
    return MoE(sizes.dim, sizes.hidden_dim, sizes.num_experts, sizes.top_k, process_group=group)


def loop(layer: MoE, x: Tensor) -> Tensor:
    """The layer in plain PyTorch."""
    experts = layer.experts
    scores = layer.router(x).softmax(-1)
    weight, index = scores.topk(layer.routing.top_k, dim=-1)
    weight = weight / weight.sum(-1, keepdim=True)
    output = torch.zeros_like(x)
    for expert in range(layer.num_experts):
        token, choice = (index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], experts.gate_up_proj[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, experts.down_proj[expert]) * weight[token, choice, None]
        output = output.index_add(0, token, rows)
    return output


def of_transformers(layer: MoE, sizes: Sizes, implementation: str) -> Callable[[Tensor], Tensor]:
    """transformers' block of Mixtral with the same weights."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=sizes.dim,
        intermediate_size=sizes.hidden_dim,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(layer.experts.gate_up_proj)
        block.experts.down_proj.copy_(layer.experts.down_proj)
    return lambda x: block(x[None])[0]


def of_deepspeed(layer: MoE, sizes: Sizes) -> Callable[[Tensor], Tensor]:
    """DeepSpeed's `MoE` with the same weights, its experts divided between the ranks of `layer.group`."""
    import deepspeed
    from deepspeed.moe.layer import MoE as DeepSpeedMoE

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    moe = DeepSpeedMoE(
        sizes.dim,
        Perceptron(sizes.dim, sizes.hidden_dim),
        sizes.num_experts,
        ep_size=layer.group.size,
        k=sizes.top_k,
        drop_tokens=False,
        top2_2nd_expert_sampling=False,
    )
    moe.set_deepspeed_parallelism()
    with torch.no_grad():
        moe.deepspeed_moe.gate.wg.weight.copy_(layer.router.weight)
        experts = moe.deepspeed_moe.experts.deepspeed_experts
        weights = zip(experts, layer.experts.gate_up_proj, layer.experts.down_proj, strict=True)
        for expert, gate_up, down in weights:
            expert.gate_up.weight.copy_(gate_up)
            expert.down.weight.copy_(down)
    return lambda x: moe(x)[0]


def ways_of(layer: MoE, sizes: Sizes) -> dict[str, Callable[[Tensor], Tensor]]:
    """What can divide experts: the layer, and DeepSpeed's where it is installed."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {"scale-moe": layer}
    if find_spec("deepspeed"):
        ways["DeepSpeed"] = of_deepspeed(layer, sizes)
    return ways


def tokens(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.num_tokens, sizes.dim, generator=torch.Generator().manual_seed(1))


def spending_of(compute: Callable[[Tensor], Tensor], x: Tensor) -> Spent:
    x = x.clone().requires_grad_()
    with spending() as spent:
        compute(x).square().mean().backward()
    return spent


def seconds(compute: Callable[[Tensor], Tensor], x: Tensor) -> float:
    return spending_of(compute, x).cpu_seconds


def alone(sizes: Sizes, turns: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    layer, x = build(sizes, Group()), tokens(sizes)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"a loop over experts": lambda x: loop(layer, x)}
    for name in ("eager", "batched_mm", "grouped_mm"):
        ways[f"transformers, {name}"] = of_transformers(layer, sizes, name)
    ways |= ways_of(layer, sizes)
    expected = loop(layer, x)
    for name, way in ways.items():
        torch.testing.assert_close(way(x), expected, rtol=1e-4, atol=1e-5, msg=name)
        seconds(way, x)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            found[name].append(seconds(way, x))
    if dist.is_initialized():
        dist.destroy_process_group()  # DeepSpeed's; a simulation has its own.
    return found


def on_ranks(sizes: Sizes, turns: int) -> dict[str, Divided]:
    torch.set_num_threads(1)
    layer = build(sizes)
    group = layer.group
    x = tokens(sizes).chunk(group.size)[group.rank]
    ways = ways_of(layer, sizes)
    rows: list[int] = []
    with layer.experts.register_forward_pre_hook(lambda module, args: rows.append(len(args[0]))):
        expected = layer(x)
    found = {}
    for name, way in ways.items():
        torch.testing.assert_close(way(x), expected, rtol=1e-4, atol=1e-5, msg=name)
        seconds(way, x)
        spent = [spending_of(way, x) for _ in range(turns)]
        found[name] = Divided([each.cpu_seconds for each in spent], spent[-1].bytes_sent, rows[0])
    return found


class Attention(nn.Module):
    """Causal attention; queries, keys and values through fewer features where `latent` says of how many (DeepSeek)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, dim, heads = model, model.dim, model.heads
        queries, values = model.query_features, model.value_features
        if model.latent is None:
            self.query: nn.Module = nn.Linear(dim, heads * queries, bias=False)
            self.key_value: nn.Module = nn.Linear(dim, model.key_value_heads * (queries + values), bias=False)
        else:
            for_queries, for_values = model.latent
            self.query = _through(dim, for_queries, heads * queries)
            self.key_value = _through(dim, for_values, model.key_value_heads * (queries + values))
        self.out = nn.Linear(heads * values, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        query = self.query(x).unflatten(-1, (model.heads, -1)).transpose(1, 2)
        both = self.key_value(x).unflatten(-1, (model.key_value_heads, -1)).transpose(1, 2)
        key, value = both.split([model.query_features, model.value_features], dim=-1)
        value = F.pad(value, (0, model.query_features - model.value_features))  # The kernel wants one size.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: Tensor = self.out(mixed[..., : model.value_features].transpose(1, 2).flatten(2))
        return output


def _through(dim: int, features: int, output: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, features, bias=False), nn.RMSNorm(features), nn.Linear(features, output))


class Perceptron(nn.Module):
    """Of a dense block, or the expert that all tokens go through."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output


class Block(nn.Module):
    """Attention, then experts; the first blocks may be dense."""

    def __init__(self, model: Model, number: int, group: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(model.dim) for _ in range(2))
        self.attention = Attention(model)
        shared = Perceptron(model.dim, model.shared) if model.shared else None
        sizes = (model.dim, model.hidden, model.num_experts, model.top_k)
        is_dense = number < model.dense_layers
        self.feed_forward: nn.Module = (
            Perceptron(model.dim, model.dense) if is_dense else MoE(*sizes, shared_expert=shared, process_group=group)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        output: Tensor = x + self.feed_forward(self.norms[1](x))
        return output


class Transformer(nn.Module):
    """Embedding, blocks and head; gives the loss of guessing the tokens themselves."""

    def __init__(self, model: Model, group: Any) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(model.vocabulary, model.dim), nn.RMSNorm(model.dim)
        self.blocks = nn.ModuleList(Block(model, number, group) for number in range(model.layers))
        self.head = nn.Linear(model.dim, model.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def simulated(model: Model, world: int, expert_ranks: int) -> dict[str, Any]:
    """Books of rank 0 in its second step."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with simulate(rank=0, world_size=world) as simulation, spending() as spent:
        group = dist.new_group(list(range(expert_ranks))) if expert_ranks > 1 else Group()
        replicas = dist.new_group(list(range(0, world, expert_ranks)))
        net = Transformer(model, group)
        num_params = count(net)
        floors = floors_of(model, net, world, expert_ranks)
        for block in net.blocks:
            if expert_ranks > 1 and isinstance(block.feed_forward, MoE):
                fully_shard(block.feed_forward.experts, replicas, mp_policy=policy)
            apply_checkpointing(block, "recompute")
            fully_shard(block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        for _ in range(2):
            simulation.restart()
            net(torch.zeros(1, model.num_tokens, dtype=torch.int64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        books: dict[str, Any] = {
            "peak_bytes": simulation.peak_bytes,
            "peak_by_kind": simulation.peak_by_kind,
            "bytes_sent": simulation.bytes_sent,
        }
    books |= {"wall_seconds": spent.wall_seconds, "cpu_seconds": spent.cpu_seconds}
    print(f"{model.name}, {world} ranks, experts over {expert_ranks}: {books}", flush=True)
    return {
        "model": model.name,
        "parameters": num_params,
        "world": world,
        "expert_ranks": expert_ranks,
        **books,
        **floors,
    }


def count(module: nn.Module) -> int:
    """The elements of all its parameters, on all ranks."""
    return sum(full_numel(param) for param in module.parameters())


def floors_of(model: Model, net: Transformer, world: int, expert_ranks: int) -> dict[str, float]:
    """The least that a rank holds and sends, as it stands above; in bytes."""
    layers = [block.feed_forward for block in net.blocks if isinstance(block.feed_forward, MoE)]
    blocks, outside = sum(map(count, net.blocks)), count(net.embedding) + count(net.norm) + count(net.head)
    divided = sum(count(layer.experts) for layer in layers) if expert_ranks > 1 else 0
    replicas = world // expert_ranks
    sent = 2 * (3 * (blocks - divided) + 2 * outside) * (world - 1) / world
    sent += 2 * 3 * divided / expert_ranks * (replicas - 1) / replicas
    rows = model.top_k * model.num_tokens * (expert_ranks - 1) / expert_ranks
    sent += 6 * rows * model.dim * 2 * len(layers)
    widest = max(net.blocks, key=count)
    computed = count(widest)
    if expert_ranks > 1:
        computed -= count(widest.feed_forward.experts) * (expert_ranks - 1) // expert_ranks
    peak = 16 * (blocks + outside) / world + 4 * computed + 2 * outside
    return {"peak_floor": peak, "sent_floor": sent}


Part = tuple[Table, list[dict[str, Any]]]
"""A table for people, and the same figures for machines."""


def on_one_process(sizes: Sizes, turns: int) -> Part:
    found = alone(sizes, turns)
    base = found["a loop over experts"]
    rows = [
        [name, f"{1000 * median(cpu):.1f}", f"{median(a / b for a, b in zip(cpu, base, strict=True)):.2f}"]
        for name, cpu in found.items()
    ]
    figures = [{"way": name, "cpu_seconds": cpu} for name, cpu in found.items()]
    return Table(f"One process: {sizes}", ["way", "CPU ms", "CPU ratio"], rows), figures


def divided(sizes: Sizes, turns: int, worlds: list[int]) -> Part:
    rows, figures = [], []
    base = median(run_ranks(on_ranks, 1, sizes, turns)[0]["scale-moe"].cpu)
    for world in worlds:
        by_rank = run_ranks(on_ranks, world, sizes, turns)
        for way in by_rank[0]:
            ranks = [found[way] for found in by_rank]
            total = median(sum(cpu) for cpu in zip(*(rank.cpu for rank in ranks), strict=True))
            found = {
                "CPU": total / base,
                "sent": sum(rank.sent for rank in ranks) / sizes.num_tokens,
                "most sent": max(rank.sent for rank in ranks) * world / sizes.num_tokens,
                "floor": 4 * sizes.top_k * sizes.dim * 4 * (world - 1) / world,
                "imbalance": max(rank.rows for rank in ranks) * world / sum(rank.rows for rank in ranks),
            }
            told = [f"{value:.0f}" if value > 100 else f"{value:.2f}" for value in found.values()]
            rows.append([str(world), way, *told])
            figures.append({"world": world, "way": way, **found})
    heads = ["ranks", "way", "CPU", "sent per token", "of the rank that sends most", "floor", "imbalance"]
    return Table("Divided", heads, rows), figures


def at_scale(cases: list[tuple[Model, int, int]]) -> Part:
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        books = list(pool.map(simulated, *zip(*cases, strict=True)))
    kinds = sorted({kind for book in books for kind in book["peak_by_kind"]})
    rows = [
        [
            f"{book['model']}, {book['parameters'] / 1e9:.1f} billion",
            str(book["world"]),
            "scale-fsdp alone" if book["expert_ranks"] == 1 else f"experts over {book['expert_ranks']}",
            f"{book['peak_bytes'] / GIB:.2f}",
            f"{book['peak_floor'] / GIB:.2f}",
            *(f"{book['peak_by_kind'].get(kind, 0) / GIB:.2f}" for kind in kinds),
            f"{sum(book['bytes_sent'].values()) / GIB:.2f}",
            f"{book['sent_floor'] / GIB:.2f}",
        ]
        for book in books
    ]
    heads = ["model", "ranks", "how", "peak", "its floor", *kinds, "sent in a step", "its floor"]
    return Table("Simulated, GiB of rank 0", heads, rows), books


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one turn")
    parser.add_argument("--simulate", action="store_true", help="the simulation alone")
    parser.add_argument("--date", help="write results under this date")
    options = parser.parse_args()
    sizes = Sizes(16, 32, 4, 2, 64) if options.smoke else Sizes()
    tiny = Model("tiny", 2, 16, 2, 1, 8, 4, 8, 2, 32, 64, (8, 8), 16, 1, 32, num_tokens=32)
    cases = [(tiny, 8, 1), (tiny, 8, 4)] if options.smoke else CASES
    parts = []
    if not options.simulate:
        turns, worlds = (1, [2]) if options.smoke else (options.turns, options.worlds)
        # torch builds DeepSpeed's kernels; a build that was cut off leaves a lock in ~/.cache/torch_extensions, and all
        # later ones wait for it without end.
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCH_EXTENSIONS_DIR"] = folder
            parts += [on_one_process(sizes, turns), divided(sizes, turns, worlds)]
    if options.simulate or options.smoke:
        parts += [at_scale(cases)]
    tables = [table for table, _ in parts]
    for table in tables:
        print(table.markdown())
    if options.date:
        name = "experts_at_scale" if options.simulate else "experts"
        save(name, options.date, __doc__ or "", tables, [figure for _, figures in parts for figure in figures])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
