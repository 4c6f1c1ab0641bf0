"""Our strategies in Lightning's Trainer beside Lightning's own ddp, at world 2: CPU time, wall time, peak, losses.

    python benchmarks/lightning_strategies.py                     # a GPT of 6 blocks, 5 turns
    python benchmarks/lightning_strategies.py --rows mlp          # a model with little to compute
    python benchmarks/lightning_strategies.py --smoke             # seconds: what does not depend on time
    python benchmarks/lightning_strategies.py --date DATE         # also writes results/DATE-lightning_strategies.*

A turn is one `Trainer.fit` of each strategy, with fused Adam and clipping by norm, in ranks that are all alive at once
with one thread each. What is measured is the steps after the third; a ratio is the median over the turns of a
strategy's time over that of ddp in the same turn.

Memory is taken in processes whose allocator returns freed tensors to the system at once, over what the process takes
when it has fitted a tiny model before.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from engines import ROWS, Row
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from measure import MB, peak_bytes, reset_peak, resident_bytes, spending
from report import Table, save
from team import ALLOCATOR_FOR_MEMORY, ALLOCATOR_FOR_TIME, Handlers, Nursery, Team, raise_ranks
from torch.utils.data import DataLoader, Dataset

from scale_fsdp import class_policy
from scale_lightning import ScaleFSDPStrategy, ScaleOSSStrategy, ScaleShardedDDPStrategy

WARMUP_STEPS = 3
STRATEGIES = {
    "ddp": lambda block: DDPStrategy(process_group_backend="gloo"),
    "scale_fsdp": lambda block: ScaleFSDPStrategy(class_policy(block)),
    "scale_sharded_ddp": lambda block: ScaleShardedDDPStrategy(),
    "scale_sharded_ddp, overlap_gather": lambda block: ScaleShardedDDPStrategy(overlap_gather=True),
    "scale_oss": lambda block: ScaleOSSStrategy(),
}


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """So many batches of a model, each by its number alone."""

    def __init__(self, row: Row, size: int) -> None:
        self.row, self.size = row, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.row.batch(torch.Generator().manual_seed(number))


class Training(LightningModule):
    """A model that returns its loss."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: Any = row.build()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Measured(Callback):
    """Measures the steps after the first ones."""

    def __init__(self) -> None:
        self.spending, self.spent = spending(), None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP_STEPS:
            gc.collect()
            reset_peak()
            self.spent = self.spending.__enter__()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.spending.__exit__(None, None, None)


def fit(row: Row, strategy: str, steps: int) -> dict[str, Any]:
    training, measured, size = Training(row), Measured(), dist.get_world_size()
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        strategy=STRATEGIES[strategy](type(training.model.blocks[0])),
        plugins=[TorchElasticEnvironment()],
        callbacks=[measured],
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(training, DataLoader(Batches(row, (WARMUP_STEPS + steps) * size), batch_size=None))
    assert measured.spent is not None
    return {**asdict(measured.spent), "losses": training.losses, "peak": peak_bytes()}


def start_rank(order: dict[str, Any]) -> Handlers:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    row, strategy = ROWS[order["row"]], order["strategy"]
    if order["purpose"] == "time":
        return {"fit": lambda steps: fit(row, strategy, steps)}
    fit(ROWS["tiny"], strategy, 1)
    gc.collect()
    base = resident_bytes()
    return {"fit": lambda steps: {"peak": fit(row, strategy, steps)["peak"] - base}}


@dataclass
class Result:
    """One strategy on one model.

    Attributes:
        cpu_seconds: Per turn and step, of both ranks together.
        wall_seconds: Per turn and step, of the slower rank.
        sent_mb: Per step and rank.
        peak_mb: Over the base; the larger rank's.
        parity: The largest difference between a loss and that of ddp.
    """

    row: str
    strategy: str
    cpu_seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    sent_mb: float = 0.0
    peak_mb: float | None = None
    parity: float = 0.0


def measure(row: str, turns: int, steps: int, memory: bool) -> list[Result]:
    results = {name: Result(row, name) for name in STRATEGIES}
    with Nursery(__file__, ALLOCATOR_FOR_TIME) as nursery:
        teams = {name: Team(nursery, {"row": row, "strategy": name, "purpose": "time"}) for name in STRATEGIES}
        try:
            for turn in range(turns):
                shift, losses = turn % len(teams), {}
                for name in [*teams][shift:] + [*teams][:shift]:  # Nobody always runs after the same neighbor.
                    answers, result = teams[name].ask("fit", steps=steps), results[name]
                    result.cpu_seconds.append(sum(each["cpu_seconds"] for each in answers) / steps)
                    result.wall_seconds.append(max(each["wall_seconds"] for each in answers) / steps)
                    result.sent_mb = max(each["bytes_sent"] for each in answers) / steps / MB
                    losses[name] = [loss for each in answers for loss in each["losses"]]
                for name, found in losses.items():
                    pairs = zip(found, losses["ddp"], strict=True)
                    results[name].parity = max(results[name].parity, *(abs(one - other) for one, other in pairs))
        finally:
            for team in teams.values():
                team.close()
    if memory:
        with Nursery(__file__, ALLOCATOR_FOR_MEMORY) as nursery:
            for name, result in results.items():
                with Team(nursery, {"row": row, "strategy": name, "purpose": "memory"}) as team:
                    result.peak_mb = max(answer["peak"] for answer in team.ask("fit", steps=2)) / MB
    return [*results.values()]


def table_of(row: str, results: Sequence[Result]) -> Table:
    def ratio(of: list[float], reference: list[float]) -> str:
        return f"{median(one / other for one, other in zip(of, reference, strict=True)):.2f}"

    reference, lines = results[0], []
    for result in results:
        peak = "" if result.peak_mb is None else f"{result.peak_mb:.0f}"
        wall = ratio(result.wall_seconds, reference.wall_seconds)
        cpu = ratio(result.cpu_seconds, reference.cpu_seconds)
        parity = "to the bit" if result.parity == 0 else f"within {result.parity:.0e}"
        lines.append([result.strategy, cpu, wall, peak, f"{result.sent_mb:.1f}", parity])
    return Table(ROWS[row].title, ["", "CPU", "wall", "peak MB", "sent MB", "losses as ddp's"], lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="gpt", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="measured per strategy and turn")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one turn, no memory pass; losses checked")
    parser.add_argument("--date", help="writes results/DATE-lightning_strategies.json and .md")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rows, options.turns, options.steps = "tiny", 1, 2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.nursery is not None:
        return raise_ranks(options.nursery, start_rank)
    found = {}
    for row in options.rows.split(","):
        found[row] = measure(row, options.turns, options.steps, not options.smoke)
        print(table_of(row, found[row]).markdown(), flush=True)
    if options.date:
        tables = [table_of(row, results) for row, results in found.items()]
        figures = [asdict(result) for results in found.values() for result in results]
        save("lightning_strategies", options.date, __doc__ or "", tables, figures)
    if differing := [each.strategy for results in found.values() for each in results if each.parity > 1e-4]:
        print(f"losses differ from ddp's: {', '.join(differing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
