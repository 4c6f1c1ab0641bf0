"""Memory of GPT-3's 13 billion parameters on one GPU of 32 GiB and on eight, as `scale-train plan` sees it.

    python benchmarks/recipe_13b.py                     # four ways, some minutes
    python benchmarks/recipe_13b.py --smoke             # a tiny model
    python benchmarks/recipe_13b.py --date 2026-11-27   # also writes results/2026-11-27-recipe_13b.*

fairseq's guide on fully sharded training has these two runs: one GPU of 32 GB, whose parameters, gradients and
optimizer state are in 256 GB of the host, and eight such GPUs, with and without. Here each is the real training step of
one rank on tensors without memory: bf16 over fp32 master weights, AdamW, blocks recomputed in the backward pass,
sequences of 2,048 tokens, logits of 1,024 tokens at a time. The tokens are bytes, so that the embedding is small. What
the CUDA context and the transport need is not in the figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import torch
from report import Table, save

from scale_tools.plan.estimate import Estimate, estimate
from scale_tools.plan.model import planned_model
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.report import by_column
from scale_tools.plan.strategies import Strategy

GIB = 2**30


@dataclass(frozen=True)
class Recipe:
    """One of the runs."""

    title: str
    parallel: str
    ranks: int
    batch: int


RECIPES = (
    Recipe("one GPU, offloaded", "fsdp-offload", 1, 8),
    Recipe("eight GPUs, offloaded", "fsdp-offload", 8, 64),
    Recipe("eight GPUs, 1 sequence each", "fsdp", 8, 8),
    Recipe("eight GPUs, 8 sequences each", "fsdp", 8, 64),
)


def options_of(recipe: Recipe, *, smoke: bool = False) -> PlanOptions:
    """What `scale-train plan` is asked."""
    if smoke:
        return PlanOptions(size="tiny", layers=2, ranks=(recipe.ranks,), batch=recipe.batch, sequence=32, loss_chunk=16)
    return PlanOptions(
        size="gpt3-13b", ranks=(recipe.ranks,), device_memory="32GiB", batch=recipe.batch, loss_chunk=1024
    )


def planned(recipe: Recipe, *, smoke: bool = False) -> tuple[Estimate, float]:
    """The memory of one rank of a recipe, and the seconds that it took to find out."""
    torch.set_num_threads(1)
    began = time.process_time()
    options = options_of(recipe, smoke=smoke)
    strategy = Strategy(recipe.parallel, recipe.ranks, checkpoint="all")  # type: ignore[arg-type]  # it is one of them
    found = estimate(planned_model(options), strategy, options)
    if found.problem:
        raise SystemExit(f"{recipe.title}: {found.problem}")
    return found, time.process_time() - began


def row_of(recipe: Recipe, found: Estimate) -> list[str]:
    columns = by_column(found.peak_by_kind)
    host = found.host_bytes * recipe.ranks
    return [
        recipe.title,
        "" if found.reserved_bytes is None else f"{found.reserved_bytes / GIB:.1f}",
        f"{found.peak_bytes / GIB:.1f}",
        f"{(columns['parameters'] + columns['gradients'] + columns['optimizer']) / GIB:.1f}",
        f"{columns['gathered'] / GIB:.1f}",
        f"{columns['activations'] / GIB:.1f}",
        f"{host / GIB:.0f}" if host else "",
        f"{sum(found.bytes_sent.values()) / 1e9:.0f}" if recipe.ranks > 1 else "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--date", help="writes results/DATE-recipe_13b.json and .md")
    asked = parser.parse_args()
    rows, figures = [], []
    with ProcessPoolExecutor(len(RECIPES), multiprocessing.get_context("spawn")) as pool:
        for recipe, (found, seconds) in zip(
            RECIPES, pool.map(partial(planned, smoke=asked.smoke), RECIPES), strict=True
        ):
            rows.append(row_of(recipe, found))
            figures.append(
                {
                    **asdict(recipe),
                    "reserved_bytes": found.reserved_bytes,
                    "num_alloc_retries": found.num_alloc_retries,
                    "peak_by_kind": found.peak_by_kind,
                    "host_peak_by_kind": found.host_peak_by_kind,
                    "bytes_sent": found.bytes_sent,
                    "cpu_seconds": seconds,
                }
            )
    of_tensors = ["tensors of a GPU", "state", "gathered", "activations"]
    heads = ["", "reserved", *of_tensors, "host of all ranks", "sent by a rank, GB"]
    table = Table("GiB at the peak of a step", heads, rows)
    print(table.markdown())
    if asked.date:
        save("recipe_13b", asked.date, __doc__ or "", [table], figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
