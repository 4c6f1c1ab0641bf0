"""The step times of `scale-train plan` beside published ones, by torchtitan and Megatron-LM.

    python benchmarks/published_steps.py                     # all rows
    python benchmarks/published_steps.py --smoke             # two layers of one row
    python benchmarks/published_steps.py --date 2026-11-30   # also writes results/2026-11-30-published_steps.*

No rate was fitted to a row. On an H100, products reach 60 % of 989 TFLOP/s (1979 in fp8) and memory 85 % of 2.4 TB/s.
On an A100, they reach 75 % of 312 TFLOP/s and 85 % of 2.04 TB/s. These shares are guesses. A rank sends two thirds of
its NVLink, 300 and 200 GB/s. Between hosts it sends as much if a ring uses all network cards of a host, and 40 GB/s if
it uses one, of 400 Gb/s. A rank has one link in the plan, so that pipelines send over NVLink, too.

Attention has the rate of FlashAttention-2, which torch calls. On an H100 it is 325 TFLOP/s: figures 5 and 6 of arXiv
2407.08608 have 335 for a causal forward and 322 for a backward without a mask, with heads of 128 and 16k tokens. They
were read in a transcription of the figures. On an A100 it is 190, the middle of 50 to 73 % of the peak, which the paper
of FlashAttention-2 claims (arXiv 2307.08691). In these papers a causal kernel has half of the operations.

These rows are no blind prediction. A first table had errors of -43 and -55 % for long sequences and +15 to +31 % for
Megatron-LM. After it, attention got a rate of its own and half of the operations if it is causal, long sequences the
rate of fp8 products, and Megatron-LM half precision weights and interleaved stages.

[1] torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 2, 3 and 5: H100 of 96 GB, 500 W. Tables 2 and 5
were run with torch.compile and fp8 products. [2] torchtitan, docs/performance.md of 2024: 64 A100 of 80 GB; no network
is named. Both were read again in the repository on 2026-11-30.

[3] Korthikanti et al., arXiv 2205.05198, table 5, column "full recompute": A100 of 80 GB, vocabulary of 51,200,
sequences of 2048. The seconds, the micro-batches and the 3 stages of a rank were checked in the repository
calculon-ai/calculon, whose calculon/llm/validation.py and validation/*.json quote the table.

[4] Narayanan et al., arXiv 2104.04473, table 1, whose TFLOP/s are turned into seconds by its equation 3. The sizes, the
micro-batches and the stages of a rank were checked in examples/sc21/run_table_1.sh of Megatron-LM. The abstract has 502
petaFLOP/s of 3072 GPUs, which are 163 TFLOP/s of each. The TFLOP/s of the other three rows are from memory.

The GPTs of [3] and [4] have half precision weights here, as in Megatron-LM. It divides the vocabulary among tensor
parallel ranks, so that a rank has an eighth, and had a fused softmax in half precision. The last two were set after a
first run, which was 35 to 71 % too long without them.

Llama 3.1 405B is planned as a GPT of 126 layers and width 16384. A layer of it has 3.22 billion parameters, 1 % more
than one of the Llama. The pipeline has as many micro-batches as ranks, the default of torchtitan's code of early 2024
(torchtitan/parallelisms/pipelining_utils.py). Later code sets the sequences of a micro-batch; the second table has one
in each. The number of stages of a rank is not published; 2 are planned.

torchtitan keeps every second product of a block (selective checkpointing by operator). The rows of FSDP with selective
checkpointing are planned so.

Peaks of memory are in benchmarks/published_memory.py.

The second table changes one thing of a row, for example sets the cost of attention to zero. Attention takes 75 and 83 %
of the long sequences divided by 4 and 8, whose rows are too short. They fit if the parts were not balanced between
ranks, within 7 %. The row divided by 2 fits if they were. Why the published times grow so is not known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from report import Table, save
from torch import Tensor, nn

from scale_checkpoint import apply_checkpointing
from scale_fsdp.wrapping.auto_wrap import plan_units
from scale_tools.plan import estimate as estimate_module
from scale_tools.plan.estimate import estimate_replica
from scale_tools.plan.model import Built, PlannedModel, planned_model
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.stages import pipeline_seconds
from scale_tools.plan.strategies import Strategy

NO_COST = 1e9  # TFLOP/s
H100: dict[str, Any] = {
    "tflops": 0.6 * 989,
    "attention_tflops": 325.0,
    "memory_bandwidth": 0.85 * 2400,
    "ranks_per_host": 8,
}
H100_FP8 = {**H100, "tflops": 0.6 * 1979}
A100: dict[str, Any] = {
    "tflops": 0.75 * 312,
    "attention_tflops": 190.0,
    "memory_bandwidth": 0.85 * 2039,
    "ranks_per_host": 8,
    "link": 200.0,
}


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


def set_config(config: LlamaConfig) -> None:
    """Sets the sizes of the Llama that the factory makes."""
    _config[0] = config


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


class EverySecondProduct:
    """The policy of torchtitan for a block: of its products, in order, every second one is computed again."""

    def __init__(self) -> None:
        self._number, self._recomputes = 0, True

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        if context.is_recompute != self._recomputes:
            self._number, self._recomputes = 0, context.is_recompute
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._number += 1
            return self._number % 2 == 1
        return "scaled_dot_product" in str(operator)


def keep_every_second_product(planned: PlannedModel, strategy: Strategy, model: nn.Module) -> None:
    """What takes the place of `checkpoint_blocks`."""
    for name in plan_units(model, planned.blocks(model)):
        if name:
            apply_checkpointing(model.get_submodule(name), EverySecondProduct())


@contextmanager
def checkpointing_of_torchtitan(is_used: bool) -> Iterator[None]:
    module: Any = estimate_module
    original = module.checkpoint_blocks
    module.checkpoint_blocks = keep_every_second_product if is_used else original
    try:
        yield
    finally:
        module.checkpoint_blocks = original


def half_weights(planned: PlannedModel) -> PlannedModel:
    """The same with weights in half precision, which are not cast."""

    def build() -> Built:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return planned.build()
        finally:
            torch.set_default_dtype(torch.float32)

    return replace(planned, build=build, build_over=None)


@dataclass(frozen=True)
class Row:
    """A published run, and how it is planned.

    Attributes:
        title: Model, machine and techniques.
        source: The number in the docstring.
        seconds: Of a step, as published.
        reason: For an error of more than 15 %.
        is_megatron: Half precision weights, and attention with a matrix of scores.
        variants: By what is different, other ways to plan it.
    """

    title: str
    source: int
    strategy: Strategy
    options: PlanOptions
    seconds: float
    config: LlamaConfig | None = None  # None: a GPT by numbers
    reason: str = ""
    is_megatron: bool | None = False  # None: with fp32 weights
    keeps_every_second: bool = False
    variants: tuple[tuple[str, dict[str, Any]], ...] = ()


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
    of_row = ("reason", "keeps_every_second", "variants")
    row_options = {name: of.pop(name) for name in of_row if name in of}
    batch = local_batch * strategy.data_ranks
    options = PlanOptions(factory="published_steps:llama", ranks=(strategy.ranks,), batch=batch, **of)
    seconds = batch * options.sequence / strategy.ranks / tokens_per_second
    return Row(title, source, strategy, options, seconds, config=config, **row_options)


def gpt_row(
    title: str,
    source: int,
    sizes: tuple[int, int, int],
    strategy: Strategy,
    batch: int,
    seconds: float,
    reason: str = "",
) -> Row:
    """A row of Megatron-LM; `sizes` are layers, width and heads."""
    layers, width, heads = sizes
    numbers: dict[str, Any] = {"layers": layers, "width": width, "heads": heads, "vocabulary": 51200 // 8}
    options = PlanOptions(
        "tiny", **numbers, ranks=(strategy.ranks,), batch=batch, sequence=2048, precision="fp32", **A100
    )
    variants: tuple[tuple[str, dict[str, Any]], ...] = ()
    if "175B" in title:
        variants = (
            ("fp32 weights, cast in each micro-batch", {"is_megatron": None}),
            ("1F1B, not interleaved", {"strategy": replace(strategy, stages_per_rank=1)}),
            ("messages of no bytes", {"options": replace(options, link=NO_COST)}),
            ("operators that are no products for nothing", {"options": replace(options, memory_bandwidth=NO_COST)}),
        )
    return Row(title, source, strategy, options, seconds, reason=reason, is_megatron=True, variants=variants)


def megatron_seconds(sizes: tuple[int, int, int], batch: int, ranks: int, tflops: float) -> float:
    """Equation 3 of [4], in which the forward is computed twice."""
    layers, width, _ = sizes
    attention, head = 2048 / (6 * width), 51200 / (16 * layers * width)
    return 96 * batch * 2048 * layers * width**2 * (1 + attention + head) / (ranks * tflops * 1e12)


def rows() -> list[Row]:
    """All published runs."""
    return [*rows_of_fsdp(), *rows_of_long_sequences(), *rows_of_405b(), *rows_of_megatron()]


def rows_of_fsdp() -> Iterator[Row]:
    every_second: dict[str, Any] = {
        "keeps_every_second": True,
        "variants": (("all products kept", {"keeps_every_second": False}),),
    }
    for ranks, link, tokens_per_second in ((8, 300.0, 5762), (128, 300.0, 5605), (128, 40.0, 5605)):
        yield llama_row(
            f"Llama 3.1 8B, {ranks} H100, FSDP, {link:.0f} GB/s",
            1,
            LLAMA_3_8B,
            tokens_per_second,
            Strategy("fsdp", ranks, checkpoint="selective"),
            2,
            link=link,
            sequence=8192,
            **every_second,
            **H100,
        )
    fsdp = Strategy("fsdp", 64, checkpoint="selective")
    yield llama_row("Llama 3 8B, 64 A100, FSDP", 2, LLAMA_3_8B, 2973, fsdp, 1, sequence=8192, **every_second, **A100)
    yield llama_row("Llama 2 13B, 64 A100, FSDP", 2, LLAMA_2_13B, 2162, Strategy("fsdp", 64), 2, sequence=4096, **A100)


def rows_of_long_sequences() -> Iterator[Row]:
    for context, sequence, tokens_per_second in (
        (1, 32768, 3890),
        (2, 65536, 2540),
        (4, 131072, 1071),
        (8, 262144, 548),
    ):
        name: Literal["context-parallel", "fsdp"] = "context-parallel" if context > 1 else "fsdp"
        row = llama_row(
            f"Llama 3.1 8B, 8 H100, FSDP {8 // context} x CP {context}, {sequence} tokens",
            1,
            LLAMA_3_8B,
            tokens_per_second,
            Strategy(name, 8, checkpoint="all", context_ranks=context),
            1,
            link=300.0,
            sequence=sequence,
            **H100_FP8,
        )
        yield replace(
            row,
            reason="attention that is not balanced between ranks, see below" if context > 2 else "",
            variants=(("attention for nothing", {"options": replace(row.options, attention_tflops=NO_COST)}),),
        )


def rows_of_405b() -> Iterator[Row]:
    numbers: dict[str, Any] = {"layers": 126, "width": 16384, "heads": 128, "vocabulary": 128256 // 8}
    options = PlanOptions("tiny", **numbers, ranks=(512,), batch=256, sequence=8192, link=300.0, **H100_FP8)
    for schedule, stages_per_rank, tokens_per_second in (("1F1B", 1, 100), ("interleaved 1F1B", 2, 128)):
        strategy = Strategy("pipe", 512, 8, 8, checkpoint="all", tensor_ranks=8, shards_stages=True)
        yield Row(
            f"Llama 3.1 405B, 512 H100, FSDP 8 x TP 8 x PP 8, {schedule}",
            1,
            replace(strategy, stages_per_rank=stages_per_rank),
            options,
            256 * 8192 / 512 / tokens_per_second,
            variants=(
                ("32 micro-batches", {"strategy": replace(strategy, stages_per_rank=stages_per_rank, chunks=32)}),
            ),
        )


def rows_of_megatron() -> Iterator[Row]:
    def pipe(stages: int, pipelines: int, chunks: int, stages_per_rank: int) -> Strategy:
        options: dict[str, Any] = {"checkpoint": "all", "tensor_ranks": 8, "stages_per_rank": stages_per_rank}
        return Strategy("pipe", 8 * stages * pipelines, stages, chunks, **options)

    of_22b, of_530b = (48, 6144, 64), (105, 20480, 128)
    tensor = Strategy("tensor-parallel", 8, 8, checkpoint="all")
    yield gpt_row("GPT 22B, 8 A100, TP 8", 3, of_22b, tensor, 4, 1.42)
    yield gpt_row("GPT 175B, 64 A100, TP 8 x PP 8", 3, (96, 12288, 96), pipe(8, 1, 64, 3), 64, 18.13)
    yield gpt_row("GPT 530B, 280 A100, TP 8 x PP 35", 3, of_530b, pipe(35, 1, 280, 3), 280, 49.05)
    yield gpt_row("GPT 1T, 512 A100, TP 8 x PP 64", 3, (128, 25600, 160), pipe(64, 1, 512, 1), 512, 94.42)
    for billions, sizes, stages, pipelines, batch, micro_batch, stages_per_rank, tflops in (
        ("145.6", (80, 12288, 96), 8, 24, 2304, 2, 2, 148.0),
        ("310.1", (96, 16384, 128), 16, 15, 2160, 1, 2, 155.0),
        ("529.6", of_530b, 35, 9, 2520, 1, 3, 163.0),
        ("1008", (128, 25600, 160), 64, 6, 3072, 1, 1, 163.0),
    ):
        ranks = 8 * stages * pipelines
        title = f"GPT {billions}B, {ranks} A100, TP 8 x PP {stages} x DP {pipelines}"
        seconds = megatron_seconds(sizes, batch, ranks, tflops)
        strategy = pipe(stages, pipelines, batch // pipelines // micro_batch, stages_per_rank)
        yield gpt_row(title, 4, sizes, strategy, batch, seconds)


@dataclass
class Result:
    """Seconds of a step: published, and planned."""

    title: str
    source: int
    published_seconds: float
    seconds: float
    reason: str
    variant: str = ""


def measure(row: Row, variant: str = "") -> Result:
    if row.config is not None:
        set_config(row.config)
    options, is_gpt = row.options, row.is_megatron is not False
    if row.is_megatron is None:
        options = replace(options, precision="bf16")
    planned = planned_model(options)
    planned = half_weights(planned) if row.is_megatron else planned
    attention = before_flash_attention() if is_gpt else nullcontext()
    with attention, checkpointing_of_torchtitan(row.keeps_every_second):
        if row.strategy.parallel == "pipe":
            seconds = pipeline_seconds(planned, row.strategy, options)
        else:
            seconds = estimate_replica(planned, row.strategy, options).seconds
    assert seconds is not None
    return Result(row.title, row.source, row.seconds, seconds, row.reason, variant)


def without_load_balance(result: Result, without_attention: Result, context_ranks: int) -> Result:
    """Each rank has one part of the sequence: the last one attends to all parts, and twice as long as on average."""
    attention = result.seconds - without_attention.seconds
    seconds = without_attention.seconds + attention * (2 - 1 / context_ranks)
    return replace(result, seconds=seconds, variant="contiguous parts, so that the last rank has the most attention")


def table_of(results: Sequence[Result]) -> Table:
    heads = ["run", "source", "step, s", "planned", "likely reason"]
    lines = [
        [one.title, f"[{one.source}]", f"{one.published_seconds:.2f}", seconds_of(one), one.reason] for one in results
    ]
    return Table("Published and planned (error)", heads, lines)


def seconds_of(result: Result) -> str:
    return f"{result.seconds:.2f} ({result.seconds / result.published_seconds - 1:+.0%})"


def table_of_variants(results: Sequence[Result], variants: Sequence[Result]) -> Table:
    """What a row becomes with another assumption."""
    planned = {result.title: result for result in results}
    lines = [[one.title, one.variant, seconds_of(planned[one.title]), seconds_of(one)] for one in variants]
    return Table("One cost set to zero, or planned in another way", ["run", "change", "planned", "so"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two layers of one row: whether it runs")
    parser.add_argument("--only", default="", help="rows whose title has this")
    parser.add_argument("--variants", action="store_true", help="also plan rows with one cost set to zero")
    parser.add_argument("--date", help="also writes results/DATE-published_steps.json and .md")
    options = parser.parse_args(arguments)
    sys.modules.setdefault("published_steps", sys.modules[__name__])  # Where the factory is looked for.
    planned = [row for row in rows() if options.only in row.title]
    if options.smoke:
        planned = [replace(planned[0], config=replace(LLAMA_3_8B, num_layers=2))]
    results, variants = [], []
    for row in planned:
        results.append(measure(row))
        print(results[-1], file=sys.stderr, flush=True)
        for name, changes in row.variants if options.variants else ():
            variants.append(measure(replace(row, **changes), name))
            print(variants[-1], file=sys.stderr, flush=True)
        if options.variants and row.strategy.context_ranks > 1:
            variants.append(without_load_balance(results[-1], variants[-1], row.strategy.context_ranks))
    tables = [table_of(results), *([table_of_variants(results, variants)] if variants else [])]
    for table in tables:
        print(table.markdown())
    if options.date:
        rows_of_json = [asdict(result) for result in (*results, *variants)]
        save("published_steps", options.date, __doc__ or "", tables, rows_of_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
