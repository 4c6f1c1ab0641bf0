"""The step times of `scale-train plan` beside published ones: Llama 3.1 8B under FSDP, by torchtitan.

    python benchmarks/published_steps.py                     # 8 and 128 GPUs
    python benchmarks/published_steps.py --smoke             # two layers
    python benchmarks/published_steps.py --date 2026-11-30   # also writes results/2026-11-30-published_steps.*

The published figures are those of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md: tokens per second of one
H100 (96 GB HBM2e, 500 W), two sequences of 8192 tokens on each, selective activation checkpointing, without
torch.compile, torch of December 2024. No figure of them has been used to choose a rate.

The rates are guesses from data sheets: products reach 60 % of 989 TFLOP/s, memory 85 % of 2.4 TB/s. A rank sends
300 GB/s over NVLink within a host. Between hosts it sends as much where a ring uses all eight network cards of a host,
and 40 GB/s where it uses one, of 400 Gb/s. `plan` runs `fully_shard`, not FSDP2; the selective checkpointing of both
keeps products and attention, torchtitan's every second product only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from report import Table, save
from torch import Tensor, nn

from scale_tools.plan.estimate import estimate
from scale_tools.plan.model import planned_model
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.step_time import rates_of, step_seconds
from scale_tools.plan.strategies import Strategy

SEQUENCE, LOCAL_BATCH = 8192, 2
WIDTH, HIDDEN, HEADS, KEY_HEADS, VOCABULARY = 4096, 14336, 32, 8, 128256
NUM_LAYERS = [32]  # Changed by --smoke; the factory below takes no arguments.
TFLOPS, MEMORY = 0.6 * 989, 0.85 * 2400
CASES = ((8, 300.0, 5762), (128, 300.0, 5605), (128, 40.0, 5605))
"""GPUs, GB/s of a rank, and published tokens per second of a GPU."""


class LlamaBlock(nn.Module):
    """A block of Llama 3, with eager operators as torchtitan has them."""

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KEY_HEADS * head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            linear(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        query, key = (self.rotated(each, cosines, sines) for each in (query, key))
        key, value = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value))
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
    """Llama 3.1 8B; returns the loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(num_layers))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.ones(tokens.shape[1], WIDTH // HEADS // 2, device=tokens.device)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return F.cross_entropy(self.output(self.norm(x)).float().flatten(0, 1), targets.flatten())


def llama() -> nn.Module:
    """The factory that `plan` calls."""
    return Llama(NUM_LAYERS[0])


@dataclass
class Result:
    """Tokens per second of a GPU: published, on simulated streams, and by the sum of `plan` before."""

    gpus: int
    gigabytes_per_second: float
    published: int
    simulated: float
    summed: float


def measure(gpus: int, link: float, published: int) -> Result:
    options = PlanOptions(
        factory="published_steps:llama",
        ranks=(gpus,),
        ranks_per_host=8,
        batch=LOCAL_BATCH * gpus,
        sequence=SEQUENCE,
        tflops=TFLOPS,
        memory_bandwidth=MEMORY,
        link=link,
    )
    found = estimate(planned_model(options), Strategy("fsdp", gpus, checkpoint="selective"), options)
    if found.seconds is None or found.work is None:
        raise RuntimeError(f"plan has no time of {gpus} GPUs: {found.problem}")
    tokens = LOCAL_BATCH * SEQUENCE
    summed = step_seconds(found.work, rates_of(options, gpus))
    return Result(gpus, link, published, tokens / found.seconds, tokens / summed)


def table_of(results: Sequence[Result]) -> Table:
    heads = ["GPUs", "GB/s of a rank", "published", "simulated streams", "sum of parts"]
    rows = [
        [
            str(result.gpus),
            f"{result.gigabytes_per_second:.0f}",
            f"{result.published:,}",
            *(f"{value:,.0f} ({value / result.published - 1:+.0%})" for value in (result.simulated, result.summed)),
        ]
        for result in results
    ]
    return Table("Llama 3.1 8B, FSDP, tokens per second of a GPU (beside the published figure)", heads, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two layers: whether it runs")
    parser.add_argument("--date", help="also writes results/DATE-published_steps.json and .md")
    options = parser.parse_args(arguments)
    sys.modules.setdefault("published_steps", sys.modules[__name__])  # Where the factory is looked for.
    if options.smoke:
        NUM_LAYERS[0] = 2
    results = [measure(*case) for case in (CASES[:1] if options.smoke else CASES)]
    table = table_of(results)
    print(table.markdown())
    if options.date:
        save("published_steps", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
