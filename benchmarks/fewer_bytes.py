"""Parameters and gradients in 8 or 4 bits on the wire: bytes and CPU time of a step, and the loss that comes of it.

    python benchmarks/fewer_bytes.py                        # 2 ranks; an hour of two cores
    python benchmarks/fewer_bytes.py --smoke                # tiny sizes, few steps: that it runs
    python benchmarks/fewer_bytes.py --date 2026-11-28      # also writes results/2026-11-28-fewer_bytes.*

The model, the text, the order of the data, AdamW and the learning rate are those of `scale-train lm`; each block is a
unit of `fully_shard` with `ShardOptions(communication=...)`, the rest another one. gloo, one thread per rank.

A step: the tiny size, with few tokens; the ways take turns, so that a machine that is busy for a while is so for all of
them. "sent" is what one rank writes to its sockets in a step, counted by the kernel; "formula" is what its collectives
send: (W - 1) messages of `BlockFormat.num_bytes` of a shard for each gather and reduction of what is quantized, and of
the shard's own bytes for the rest. What the kernel counts beyond that is gloo's headers and what ranks compare. "CPU"
is that of both ranks over that of fp32, each the median over all steps, and in brackets the lowest and the highest
ratio of one turn; here no network is waited for, so it is all cost.

Losses: nats per byte, the mean of the last 20 steps, and of the held-out text at the end; of three seeds for the
initial values and the order of the data the mean, and in brackets the lowest and the highest.

Simulated: rank 0 of 64 and 512 in nodes of 8, forward and backward of four blocks as wide as those of GPT-3 6.7B.
"sent" is all bytes of a step, "between nodes" the part of them that goes to ranks of other nodes, where each rank sends
each other one a message, as over gloo. A ring, as NCCL has for what is sent as it is, takes a gather past each node's
border once and not once per rank of the node: an eighth of the first row, where nothing is quantized.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import mean, median
from typing import Any

import torch
from measure import spending
from report import Table, save
from torch import nn

from scale_check.simulate import simulate
from scale_check.simulate.traffic import Collective
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import CommunicationPolicy, MixedPrecisionPolicy, ShardOptions, fully_shard
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.transports.policy import wire_formats
from scale_train.data.text import Sampler, read_text, slice_of_rank, windows_at
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.training.state import LRSchedule

GIB = 1 << 30


@dataclass(frozen=True)
class Way:
    """How a model is sharded; precision of the computation and of gradients."""

    name: str
    policy: CommunicationPolicy | None = None
    dtype: torch.dtype = torch.float32
    reshard: int | None = None


WAYS = [
    Way("fp32"),
    Way("bf16", dtype=torch.bfloat16),
    Way("int8 gather", CommunicationPolicy(gather="int8")),
    Way("fp8 gather", CommunicationPolicy(gather="float8_e4m3")),
    Way("int8 gather, int8 reduce", CommunicationPolicy(gather="int8", reduce="int8")),
    Way("int8 gather, int4 reduce", CommunicationPolicy(gather="int8", reduce="int4")),
    Way(
        "int8 gather, int4 reduce, error feedback",
        CommunicationPolicy(gather="int8", reduce="int4", error_feedback=True),
    ),
]
NODE = 8
BF16 = torch.bfloat16
SIMULATED_WAYS = [
    Way("bf16", dtype=BF16),
    Way("bf16, a part stays in the node (hpZ)", dtype=BF16, reshard=NODE),
    Way("int8 gather, int8 reduce", CommunicationPolicy(gather="int8", reduce="int8"), BF16),
    Way("int8 gather, int4 reduce", CommunicationPolicy(gather="int8", reduce="int4"), BF16),
    Way("the same between nodes", CommunicationPolicy(gather="int8", reduce="int4", node_size=NODE), BF16),
    Way("the same between nodes, hpZ", CommunicationPolicy(gather="int8", reduce="int4", node_size=NODE), BF16, NODE),
]


@dataclass(frozen=True)
class Run:
    """What a training is made of; `scale-train lm` without options has 4 layers, 128, 4, 128, 32 and 400."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    steps: int

    def model(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(ModelConfig(self.layers, self.width, self.heads))


def shard(model: GPT, way: Way) -> GPT:
    policy = MixedPrecisionPolicy(param_dtype=way.dtype, reduce_dtype=way.dtype)
    for unit in (*model.blocks, model):
        options: dict[str, Any] = {"mp_policy": policy, "options": ShardOptions(communication=way.policy)}
        fully_shard(unit, **options, reshard_after_forward=way.reshard if unit is not model else None)
    return model


def formula(model: nn.Module) -> int:
    """Bytes that one rank sends in a step: units are gathered twice and reduced once, the root is gathered once."""
    sent = 0
    for unit in units_in(model):
        for buffer in unit.buffers:
            wire, numel, peers = wire_formats(buffer), buffer.layout.shard_numel, buffer.group.size - 1
            gather = numel * buffer.compute_dtype.itemsize
            reduce = numel * buffer.reduce_dtype.itemsize
            if wire is not None and wire.gather is not None:
                gather = wire.gather.num_bytes(numel)
            if wire is not None and wire.reduce is not None:
                reduce = wire.reduce.num_bytes(numel)
            sent += peers * (gather * (1 if unit.module is model else 2) + reduce)
    return sent


def train(run: Run, way: Way, seed: int = 0, *, evaluate: bool = True) -> dict[str, Any]:
    """Losses of the steps and of the held-out text, CPU seconds and bytes sent of each step; on one rank."""
    torch.set_num_threads(1)
    group, text = group_of(), read_text()
    model = shard(run.model(seed), way)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    rest = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
    schedule = LRSchedule(3e-3, min(20, run.steps // 4), run.steps)
    sampler = Sampler(len(text.train), run.sequence, seed)
    losses, cpu, sent = [], [], []
    for step in range(run.steps):
        (starts,) = slice_of_rank(sampler.starts(run.batch), group.rank, group.size, 1)
        tokens, targets = windows_at(text.train, starts, run.sequence)
        with spending() as spent:
            loss = model(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in optimizer.param_groups:
                each["lr"] = schedule.at(step)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        cpu.append(spent.cpu_seconds)
        sent.append(spent.bytes_sent)
    found = {"losses": losses, "cpu": cpu, "sent": sent, "formula": formula(model)}
    if not evaluate:
        return found
    model.eval()
    count = max(1, min(512, len(text.held_out) // run.sequence) // group.size)
    places = torch.linspace(0, len(text.held_out) - run.sequence - 1, count * group.size).long()
    with torch.no_grad():
        pieces = places[group.rank :: group.size].split(run.batch)
        held_out = [model(*windows_at(text.held_out, piece, run.sequence)).item() for piece in pieces]
    return {**found, "held_out": mean(held_out)}


def train_all(run: Run, ways: list[Way], seeds: list[int]) -> list[list[dict[str, Any]]]:
    """By way and seed."""
    return [[train(run, way, seed) for seed in seeds] for way in ways]


def take_turns(run: Run, ways: list[Way], turns: int) -> list[list[dict[str, Any]]]:
    """By turn and way; a first turn, in which all is loaded and allocated, does not count."""
    return [[train(run, way, evaluate=False) for way in ways] for _ in range(1 + turns)][1:]


Part = tuple[Table, list[dict[str, Any]]]
"""A table for people, and the same figures for machines."""


def a_step(run: Run, ways: list[Way], turns: int) -> Part:
    ranks = run_ranks(take_turns, 2, run, ways, turns, limit_seconds=3600)
    rows, figures = [], []
    for place, way in enumerate(ways):
        own = [[turn[place] for turn in rank] for rank in ranks]  # by rank and turn
        by_turn = zip(*([turn["cpu"][2:] for turn in rank] for rank in own), strict=True)
        cpu = [[sum(step) for step in zip(*of_ranks, strict=True)] for of_ranks in by_turn]
        sent, expected = median(own[0][0]["sent"][2:]), own[0][0]["formula"]
        figures.append({"way": way.name, "cpu_seconds": cpu, "sent": sent, "formula": expected})
        first = figures[0]
        ratio = median(chain(*cpu)) / median(chain(*first["cpu_seconds"]))
        per_turn = [median(one) / median(base) for one, base in zip(cpu, first["cpu_seconds"], strict=True)]
        of_fp32 = f"{expected / first['formula']:.2f}"
        between = f"{ratio:.2f} ({min(per_turn):.2f} to {max(per_turn):.2f})"
        rows.append([way.name, f"{expected:,}", f"{sent:,.0f}", of_fp32, between])
    heads = ["on the wire", "formula, bytes", "sent, bytes", "of fp32", "CPU"]
    return Table(f"A step on 2 ranks, {turns} turns: {run}", heads, rows), figures


def spread(values: list[float]) -> str:
    """The mean, and where there are several the lowest and the highest."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def losses(run: Run, ways: list[Way], seeds: list[int]) -> Part:
    ranks = run_ranks(train_all, 2, run, ways, seeds, limit_seconds=7200)
    rows, figures = [], []
    for place, way in enumerate(ways):
        shown = []
        for which, seed in enumerate(seeds):
            own = [rank[place][which] for rank in ranks]
            curve = [mean(pair) for pair in zip(*(each["losses"] for each in own), strict=True)]
            held_out = mean(each["held_out"] for each in own)
            figures.append({"run": str(run), "way": way.name, "seed": seed, "losses": curve, "held_out": held_out})
            at = [curve[min(step, len(curve)) - 1] for step in (50, 100, 200)]
            shown.append([*at, mean(curve[-20:]), held_out])
        rows.append([way.name, *(spread(list(values)) for values in zip(*shown, strict=True))])
    heads = ["on the wire", "step 50", "step 100", "step 200", "last 20", "held out"]
    return Table(f"Losses, seeds {seeds}: {run}", heads, rows), figures


def between_nodes(collective: Collective) -> float:
    """The part of its bytes that goes to ranks of other nodes, where it goes to all alike."""
    others = [rank for rank in collective.ranks if rank != 0]
    return collective.bytes_sent * sum(rank >= NODE for rank in others) / max(1, len(others))


def simulated(world: int, way: Way, config: ModelConfig, num_tokens: int) -> dict[str, Any]:
    with simulate(rank=0, world_size=world) as simulation:
        model = shard(GPT(config), way)
        for _ in range(2):
            simulation.restart()
            tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
            model(tokens, tokens).backward()
            model.zero_grad()
        return {
            "world": world,
            "way": way.name,
            "sent": sum(simulation.bytes_sent.values()),
            "between": sum(between_nodes(collective) for collective in simulation.collectives),
            "bytes_sent": simulation.bytes_sent,
            "formula": formula(model),
            "peak_bytes": simulation.peak_bytes,
        }


def at_scale(worlds: list[int], ways: list[Way], config: ModelConfig, num_tokens: int) -> Part:
    books = [simulated(world, way, config, num_tokens) for world in worlds for way in ways]
    rows = []
    for book in books:
        first = next(each for each in books if each["world"] == book["world"])
        rows.append(
            [
                str(book["world"]),
                book["way"],
                f"{book['sent'] / GIB:.3f}",
                f"{book['between'] / GIB:.3f}",
                f"{book['between'] / first['between']:.3f}",
                f"{book['peak_bytes'] / GIB:.2f}",
            ]
        )
    heads = ["ranks", "on the wire", "sent, GiB", "between nodes, GiB", "of bf16", "peak, GiB"]
    return Table("Simulated, rank 0", heads, rows), books


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, few steps")
    parser.add_argument("--date", help="write results under this date")
    options = parser.parse_args()
    if options.smoke:
        tiny = Run(1, 16, 2, 16, 4, 4)
        makers = [
            partial(a_step, tiny, [WAYS[0], WAYS[-1]], 1),
            partial(losses, tiny, WAYS[-1:], [0, 1]),
            partial(at_scale, [16], [SIMULATED_WAYS[0], SIMULATED_WAYS[-1]], ModelConfig(1, 64, 2), 16),
        ]
    else:
        makers = [
            partial(a_step, Run(4, 128, 4, 64, 8, 16), WAYS, 20),
            partial(at_scale, [64, 512], SIMULATED_WAYS, ModelConfig(4, 4096, 32), 2048),
            partial(losses, Run(2, 64, 4, 64, 16, 400), WAYS, [0, 1, 2]),
        ]
    parts: list[Part] = []
    for make in makers:
        parts.append(make())
        print(parts[-1][0].markdown(), flush=True)
    if options.date:
        tables = [table for table, _ in parts]
        save("fewer_bytes", options.date, __doc__ or "", tables, [each for _, figures in parts for each in figures])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
