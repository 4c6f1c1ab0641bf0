"""What local steps cost beside DistributedDataParallel: bytes sent per step, CPU time, and memory of the outer state.

    python benchmarks/local_sgd.py                      # two models, 2 ranks, 3 turns of 48 steps
    python benchmarks/local_sgd.py --smoke              # seconds: that it runs, and that the bytes are those promised
    python benchmarks/local_sgd.py --date 2026-11-24    # also writes results/2026-11-24-local_sgd.*

Each rank trains a stack of linear layers by AdamW, once under DistributedDataParallel and once with `LocalSGD.diloco`
and an outer step after so many steps. Engines take turns in the same processes; ratios are medians over turns of the
CPU time of both ranks to DistributedDataParallel's in the same turn. Bytes are what `scale_check.simulate` counts that
one rank of two sends in as many steps, over those steps, and by the formula 2 (W-1)/W for DistributedDataParallel,
which does not run there. The state is what a rank keeps beside the model and AdamW.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from report import Table, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_check.simulate import simulate
from scale_core.testing import run_ranks
from scale_oss import LocalSGD

EVERY = (1, 8, 48)


def stack(width: int, num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])


def trainer(every: int, width: int, num_layers: int) -> tuple[Callable[[Tensor], None], LocalSGD | None]:
    """A step of training; `every` 0 is DistributedDataParallel."""
    model: nn.Module = stack(width, num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    local = LocalSGD.diloco(model, optimizer, sync_every=every) if every else None
    if not every:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, local


def measure(width: int, num_layers: int, steps: int, turns: int) -> dict[int, list[float]]:
    """CPU seconds of this rank's steps, by engine and turn."""
    engines = {every: trainer(every, width, num_layers)[0] for every in (0, *EVERY)}
    batch = torch.randn(16, width)
    seconds: dict[int, list[float]] = {every: [] for every in engines}
    for _ in range(turns + 1):
        for every, step in engines.items():
            begun = time.process_time()
            for _ in range(steps):
                step(batch)
            seconds[every].append(time.process_time() - begun)
    return {every: spent[1:] for every, spent in seconds.items()}


def sent_per_step(every: int, width: int, num_layers: int) -> float:
    """Bytes that one rank of two sends, per step, by the ring algorithms."""
    if not every:
        return sum(param.nbytes for param in stack(width, num_layers).parameters())
    with simulate(rank=0, world_size=2) as simulation:
        step, _ = trainer(every, width, num_layers)
        batch = torch.randn(16, width)
        begun = sum(simulation.bytes_sent.values())
        for _ in range(every):
            step(batch)
        return (sum(simulation.bytes_sent.values()) - begun) / every


def outer_bytes(width: int, num_layers: int) -> int:
    _, local = trainer(1, width, num_layers)
    assert local is not None
    return sum(value.tensor.nbytes for key, value in local.state_dict().items() if key != "num_syncs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one small model, one turn")
    parser.add_argument("--date", help="writes results/DATE-local_sgd.json and .md")
    options = parser.parse_args()
    rows, figures = [], []
    for width, num_layers in [(32, 4)] if options.smoke else [(256, 12), (1024, 6)]:
        num_params = sum(param.numel() for param in stack(width, num_layers).parameters())
        found = run_ranks(measure, 2, width, num_layers, max(EVERY), 1 if options.smoke else options.turns)
        state = run_ranks(outer_bytes, 2, width, num_layers)[0]
        for every in (0, *EVERY):
            both = [sum(of_turn) for of_turn in zip(*(rank[every] for rank in found), strict=True)]
            theirs = [sum(of_turn) for of_turn in zip(*(rank[0] for rank in found), strict=True)]
            ratio = median(ours / other for ours, other in zip(both, theirs, strict=True))
            sent = sent_per_step(every, width, num_layers) / (4 * num_params)
            name = f"outer step after {every}" if every else "DistributedDataParallel"
            kept = f"{state / num_params:.2f}" if every else "0"
            rows.append([f"{num_layers} x {width} x {width}", name, f"{sent:.3f}", f"{ratio:.2f}", kept])
            entry: dict[str, Any] = {"width": width, "num_layers": num_layers, "sync_every": every, "turns": both}
            figures.append(entry | {"sent_over_parameters": sent, "cpu_over_ddp": ratio, "outer_state_bytes": state})
    heads = [
        "layers",
        "",
        "sent per step, of the parameters' bytes",
        "CPU time of DDP",
        "outer state, bytes per element",
    ]
    table = Table("LocalSGD beside DistributedDataParallel, 2 ranks, AdamW", heads, rows)
    print(table.markdown())
    if options.smoke:
        for figure in figures:
            promised = 1 / (figure["sync_every"] or 1)
            assert abs(figure["sent_over_parameters"] / promised - 1) < 0.02, figure
    if options.date:
        save("local_sgd", options.date, __doc__ or "", [table], figures)


if __name__ == "__main__":
    main()
