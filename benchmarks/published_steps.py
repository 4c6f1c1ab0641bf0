"""The step times and the memory of `scale-train plan` beside published ones, by torchtitan and Megatron-LM.

    python benchmarks/published_steps.py                     # all rows
    python benchmarks/published_steps.py --smoke             # two layers of one row
    python benchmarks/published_steps.py --date 2026-11-30   # also writes results/2026-11-30-published_steps.*

No published figure has been used to choose a rate. The rates are guesses from data sheets. On an H100, products reach
60 % of 989 TFLOP/s and memory 85 % of 2.4 TB/s; on an A100, 75 % of 312 TFLOP/s and 85 % of 2.04 TB/s. A rank sends two
thirds of its NVLink, 300 and 200 GB/s. Between hosts it sends as much if a ring uses all network cards of a host, and
40 GB/s if it uses one, of 400 Gb/s. A rank has one link in the plan, so that pipelines send over NVLink, too.

[1] torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 3: H100 of 96 GB, 500 W; Llama 3.1 8B.
[2] torchtitan, docs/performance.md of 2024: Llama 3 8B and Llama 2 13B on 64 A100 of 80 GB; no network is named.
[3] Korthikanti et al., arXiv 2205.05198, tables 3 and 5, column "full recompute": GPTs on A100 of 80 GB, vocabulary of
51,200, sequences of 2048. The pipelines of 175 and 530 billion are interleaved there, with 3 stages of a rank.
[4] Narayanan et al., arXiv 2104.04473, table 1, whose TFLOP/s are turned into seconds by its equation 3. The number of
sequences in a micro-batch is not in the table; here it is 1. The pipelines are interleaved there.

The figures of [3] and [4] were quoted without the papers at hand. Those of [3] agree with their MFU by its formula,
those of [4] with their TFLOP/s of all GPUs.

Megatron-LM divides the vocabulary among tensor parallel ranks, and had a fused softmax in half precision. `plan` has
neither, so its rows get an eighth of the vocabulary and such a softmax. Both were set after a first run, which was 35
to 71 % too long without them, so these rows are no blind prediction. With all of the vocabulary the row of 175 billion
takes 25.9 s. The reasons are what the code does differently; how much each of them takes was not measured.

Memory is the most that the model's tensors take. The published figure also has what the allocator has reserved. It is
compared for FSDP only: attention over divided sequences is planned without its GPU kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from report import Table, save
from torch import Tensor, nn

from scale_tools.plan.estimate import estimate, replica_seconds
from scale_tools.plan.model import planned_model
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.stages import pipeline_seconds
from scale_tools.plan.strategies import Strategy

GIB = 2**30
H100: dict[str, Any] = {"tflops": 0.6 * 989, "memory_bandwidth": 0.85 * 2400, "ranks_per_host": 8}
A100: dict[str, Any] = {"tflops": 0.75 * 312, "memory_bandwidth": 0.85 * 2039, "ranks_per_host": 8, "link": 200.0}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama."""

    num_layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int


LLAMA_3_8B = LlamaConfig(32, 4096, 14336, 32, 8, 128256)
LLAMA_2_13B = LlamaConfig(40, 5120, 13824, 40, 40, 32000)
_config = [LLAMA_3_8B]  # Of the row; the factory below takes no arguments.


class LlamaBlock(nn.Module):
    """A block of Llama 2 and 3, with eager operators as torchtitan has them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.head_size = config, config.width // config.heads
        width, key_width = config.width, config.key_heads * self.head_size
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, key_width, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, config.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.hidden, width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            linear(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        query, key = (self.rotated(each, cosines, sines) for each in (query, key))
        groups = self.config.heads // self.config.key_heads
        if groups > 1:
            key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        result: Tensor = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return result

    def rotated(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotary embeddings in fp32."""
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1).to(x.dtype)


class Llama(nn.Module):
    """A Llama; returns the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_angles = config.width // config.heads // 2
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.norm, self.output = nn.RMSNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.ones(tokens.shape[1], self.num_angles, device=tokens.device)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return F.cross_entropy(self.output(self.norm(x)).float().flatten(0, 1), targets.flatten())


def llama() -> nn.Module:
    """The factory that `plan` calls."""
    return Llama(_config[0])


def unfused_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Attention as in Megatron-LM before FlashAttention: a fused softmax with its mask, and dropout."""
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    with torch.autocast(scores.device.type, enabled=False):  # Its kernel reads and writes half precision.
        probabilities = torch.native_dropout(torch.softmax(scores, dim=-1), 0.1, True)[0]
    return probabilities @ value


@contextmanager
def before_flash_attention() -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` makes a matrix of scores."""
    functional: Any = F
    fused, functional.scaled_dot_product_attention = F.scaled_dot_product_attention, unfused_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = fused


@dataclass(frozen=True)
class Row:
    """A published run, and how it is planned.

    Attributes:
        title: Model, machine and techniques.
        source: The number in the docstring.
        seconds: Of a step, as published.
        memory: GiB of a GPU, as published.
        reason: For an error of more than 15 %, or of more than 5 % of the memory.
    """

    title: str
    source: int
    strategy: Strategy
    options: PlanOptions
    seconds: float
    memory: float | None = None
    config: LlamaConfig | None = None  # None: a GPT by numbers
    reason: str = ""


def llama_row(
    title: str,
    source: int,
    config: LlamaConfig,
    tokens_per_second: int,
    strategy: Strategy,
    local_batch: int,
    **of: Any,
) -> Row:
    """A row of torchtitan, which publishes tokens per second of a GPU; `local_batch` is of a data-parallel rank."""
    row_options = {name: of.pop(name) for name in ("memory", "reason") if name in of}
    batch = local_batch * strategy.data_ranks
    options = PlanOptions(factory="published_steps:llama", ranks=(strategy.ranks,), batch=batch, **of)
    seconds = batch * options.sequence / strategy.ranks / tokens_per_second
    return Row(title, source, strategy, options, seconds, config=config, **row_options)


def gpt_row(
    title: str, source: int, sizes: tuple[int, int, int], strategy: Strategy, batch: int, seconds: float
) -> Row:
    """A row of Megatron-LM; `sizes` are layers, width and heads."""
    layers, width, heads = sizes
    is_interleaved = strategy.parallel == "pipe" and (source == 4 or strategy.ranks < 512)
    numbers: dict[str, Any] = {"layers": layers, "width": width, "heads": heads, "vocabulary": 51200 // 8}
    options = PlanOptions(
        "tiny", **numbers, ranks=(strategy.ranks,), batch=batch, sequence=2048, precision="fp16", **A100
    )
    reason = "fp32 weights are cast in each micro-batch" + (", 1F1B not interleaved" if is_interleaved else "")
    return Row(title, source, strategy, options, seconds, reason=reason)


def megatron_seconds(sizes: tuple[int, int, int], batch: int, ranks: int, tflops: float) -> float:
    """Equation 3 of [4], in which the forward is computed twice."""
    layers, width, _ = sizes
    attention, head = 2048 / (6 * width), 51200 / (16 * layers * width)
    return 96 * batch * 2048 * layers * width**2 * (1 + attention + head) / (ranks * tflops * 1e12)


def rows() -> list[Row]:
    """All published runs."""
    on_h100: dict[str, Any] = {"sequence": 8192, **H100}
    selective = "memory: keeps all products, torchtitan every second one"
    found = [
        llama_row(
            f"Llama 3.1 8B, {ranks} H100, FSDP, {link:.0f} GB/s",
            1,
            LLAMA_3_8B,
            tokens_per_second,
            Strategy("fsdp", ranks, checkpoint="selective"),
            2,
            link=link,
            memory=memory,
            reason=selective,
            **on_h100,
        )
        for ranks, link, tokens_per_second, memory in (
            (8, 300.0, 5762, 82.4),
            (128, 300.0, 5605, 67.0),
            (128, 40.0, 5605, 67.0),
        )
    ]
    fp8 = "attention at the rate of products, which its kernels do not reach; fp8 and compiled there"
    found += [
        llama_row(
            f"Llama 3.1 8B, 8 H100, FSDP {8 // context} x CP {context}, {sequence} tokens",
            1,
            LLAMA_3_8B,
            tokens_per_second,
            Strategy("context-parallel", 8, checkpoint="all", context_ranks=context),
            1,
            link=300.0,
            reason=fp8,
            **H100,
            sequence=sequence,
        )
        for context, sequence, tokens_per_second in (
            (2, 65536, 2540),
            (4, 131072, 1071),
            (8, 262144, 548),
        )
    ]
    found += [
        llama_row(
            "Llama 3 8B, 64 A100, FSDP",
            2,
            LLAMA_3_8B,
            2973,
            Strategy("fsdp", 64, checkpoint="selective"),
            1,
            sequence=8192,
            **A100,
        ),
        llama_row("Llama 2 13B, 64 A100, FSDP", 2, LLAMA_2_13B, 2162, Strategy("fsdp", 64), 2, sequence=4096, **A100),
    ]
    of_22b, of_530b = (48, 6144, 64), (105, 20480, 128)
    found.append(
        gpt_row("GPT 22B, 8 A100, TP 8", 3, of_22b, Strategy("tensor-parallel", 8, 8, checkpoint="all"), 4, 1.42)
    )

    def pipe(stages: int, pipelines: int, batch: int) -> Strategy:
        ranks, chunks = 8 * stages * pipelines, batch // pipelines
        return Strategy("pipe", ranks, stages, chunks, checkpoint="all", tensor_ranks=8)

    found += [
        gpt_row("GPT 175B, 64 A100, TP 8 x PP 8", 3, (96, 12288, 96), pipe(8, 1, 64), 64, 18.13),
        gpt_row("GPT 530B, 280 A100, TP 8 x PP 35", 3, of_530b, pipe(35, 1, 280), 280, 49.05),
        gpt_row("GPT 1T, 512 A100, TP 8 x PP 64", 3, (128, 25600, 160), pipe(64, 1, 512), 512, 94.42),
    ]
    for billions, sizes, stages, pipelines, batch, tflops in (
        ("145.6", (80, 12288, 96), 8, 24, 2304, 148.0),
        ("310.1", (96, 16384, 128), 16, 15, 2160, 155.0),
        ("529.6", of_530b, 35, 9, 2520, 163.0),
        ("1008", (128, 25600, 160), 64, 6, 3072, 163.0),
    ):
        ranks = 8 * stages * pipelines
        title = f"GPT {billions}B, {ranks} A100, TP 8 x PP {stages} x DP {pipelines}"
        seconds = megatron_seconds(sizes, batch, ranks, tflops)
        found.append(gpt_row(title, 4, sizes, pipe(stages, pipelines, batch), batch, seconds))
    return found


@dataclass
class Result:
    """Seconds of a step and GiB of a rank: published, and planned; None where the source has no memory."""

    title: str
    source: int
    published_seconds: float
    seconds: float
    published_gib: float | None
    gib: float | None
    reason: str


def measure(row: Row) -> Result:
    if row.config is not None:
        _config[0] = row.config
    planned, gib = planned_model(row.options), None
    with before_flash_attention() if row.config is None else nullcontext():
        if row.strategy.parallel == "pipe":
            seconds = pipeline_seconds(planned, row.strategy, row.options)
        elif row.memory is None:
            seconds = replica_seconds(planned, row.strategy, row.options)
        else:
            found = estimate(planned, row.strategy, row.options)
            seconds, gib = found.seconds, found.peak_bytes / GIB
    if seconds is None:
        raise RuntimeError(f"plan has no time of {row.title}")
    return Result(row.title, row.source, row.seconds, seconds, row.memory, gib, row.reason)


def table_of(results: Sequence[Result]) -> Table:
    heads = ["run", "source", "step, s", "planned", "memory, GiB", "planned", "likely reason"]
    lines = []
    for result in results:
        seconds = f"{result.seconds:.2f} ({result.seconds / result.published_seconds - 1:+.0%})"
        memory = published = ""
        if result.gib is not None and result.published_gib is not None:
            published = f"{result.published_gib:.1f}"
            memory = f"{result.gib:.1f} ({result.gib / result.published_gib - 1:+.0%})"
        step = f"{result.published_seconds:.2f}"
        lines.append([result.title, f"[{result.source}]", step, seconds, published, memory, result.reason])
    return Table("Published and planned (error)", heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two layers of one row: whether it runs")
    parser.add_argument("--only", default="", help="rows whose title has this")
    parser.add_argument("--date", help="also writes results/DATE-published_steps.json and .md")
    options = parser.parse_args(arguments)
    sys.modules.setdefault("published_steps", sys.modules[__name__])  # Where the factory is looked for.
    planned = [row for row in rows() if options.only in row.title]
    if options.smoke:
        planned = [replace(planned[0], config=replace(LLAMA_3_8B, num_layers=2))]
    results = []
    for row in planned:
        results.append(measure(row))
        print(results[-1], file=sys.stderr, flush=True)
    table = table_of(results)
    print(table.markdown())
    if options.date:
        save("published_steps", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
