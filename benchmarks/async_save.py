"""How long a step stalls for a save at world 2: in the background, in the foreground, and by torch.

    python benchmarks/async_save.py                      # 200 MB on each rank, 5 turns
    python benchmarks/async_save.py --mb 20 --turns 3    # a quick look
    python benchmarks/async_save.py --smoke              # seconds: what does not depend on time
    python benchmarks/async_save.py --date 2026-11-23    # also writes results/2026-11-23-async_save.*

A model of square layers under `fully_shard`, in fp32 with AdamW that has stepped. All engines save the same state, into
a new directory for each save: `scale_snapshot.save`, `scale_snapshot.async_save`, torch's `dcp.save` and
`dcp.async_save` (by a thread), the last two given `sharded_state_dict(model, optimizer)`. "plain copy" clones the same
tensors, into memory that is new each time.

The stall is the time until the call returns, of the slower rank; engines take turns, and the median over turns is
shown. Nothing else runs until the save is over, whose time is the total. The first save of each engine is a turn before
those that count: it imports, and makes groups of ranks and memory, which stay. Extra memory is the largest resident
size during a save over that before it, relative to what a rank holds of the state, in processes that save once.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import MB, resident_bytes
from report import Table, save
from torch import Tensor, nn

import scale_snapshot
from scale_core.state import sharded_state_dict
from scale_core.state.local_shard import LocalShard
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard

ENGINES = ("async_save", "save", "dcp.async_save", "dcp.save", "plain copy")
WIDTH = 512


class Training:
    """A sharded model whose state takes so many MB on each rank."""

    def __init__(self, num_mb: float) -> None:
        layer_bytes = 3 * 4 * WIDTH * WIDTH / dist.get_world_size()  # Parameters and two moments of Adam.
        count = max(1, round(num_mb * MB / layer_bytes))
        self.model = fully_shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model(torch.ones(1, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return sharded_state_dict(self.model, self.optimizer)

    def held(self) -> list[Tensor]:
        values = (value.tensor if isinstance(value, LocalShard) else value for value in self.state.values())
        return [value.detach() for value in values if isinstance(value, Tensor)]

    def start(self, engine: str, folder: Path) -> Callable[[], object]:
        """Saves, or begins to; returns what waits for the end."""
        objects = {"model": self.model, "optimizer": self.optimizer}
        if engine == "async_save":
            return scale_snapshot.async_save(folder, 1, objects).wait
        if engine == "save":
            scale_snapshot.save(folder, 1, objects)
        elif engine == "dcp.async_save":
            found: Any = dcp.async_save(self.state, checkpoint_id=folder, process_group=self.gloo)
            return lambda: found.result() if hasattr(found, "result") else found.upload_completion.result()
        elif engine == "dcp.save":
            dcp.save(self.state, checkpoint_id=folder)
        else:
            copies = [tensor.clone() for tensor in self.held()]
            return copies.clear
        return lambda: None

    @property
    def gloo(self) -> Any:
        if not hasattr(self, "_gloo"):
            self._gloo = dist.new_group(backend="gloo")
        return self._gloo


def measure_times(folder: str, num_mb: float, turns: int) -> list[dict[str, Any]]:
    """Each save of each engine on this rank: stall and total in seconds."""
    warnings.simplefilter("ignore")
    training, found = Training(num_mb), []
    for turn in range(turns + 1):
        for engine in ENGINES:
            place = Path(folder) / f"{turn}-{engine}"
            dist.barrier()
            begun = time.perf_counter()
            finish = training.start(engine, place)
            stall = time.perf_counter() - begun
            finish()
            total = time.perf_counter() - begun
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
            found.append({"turn": turn, "engine": engine, "stall": stall, "total": total})
    return found


def measure_memory(folder: str, num_mb: float, engine: str) -> dict[str, Any]:
    """The largest resident size of this rank during its first large save, over that before."""
    warnings.simplefilter("ignore")
    small = Training(1)
    small.start(engine, Path(folder) / "small")()
    training = Training(num_mb)
    training._gloo = small.gloo
    held = sum(tensor.nbytes for tensor in training.held())
    dist.barrier()
    base, peak, over = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, resident_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    training.start(engine, Path(folder) / "large")()
    over.set()
    watcher.join()
    return {"held": held, "extra": peak - base}


def main() -> None:
    """Prints the table, and saves it with --date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=200.0, help="of the state on each rank")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="the smallest form")
    parser.add_argument("--date", help="writes results/DATE-async_save.json and .md")
    options = parser.parse_args()
    num_mb, turns = (2.0, 1) if options.smoke else (options.mb, options.turns)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(measure_times, 2, folder, num_mb, turns)
        for engine in ENGINES:
            memory = run_ranks(measure_memory, 2, tempfile.mkdtemp(dir=folder), num_mb, engine)
            saves = [pair for pair in zip(first, second, strict=True) if pair[0]["engine"] == engine]
            figures.append(
                {
                    "engine": engine,
                    "held_mb": memory[0]["held"] / MB,
                    "stall_seconds": [max(one["stall"], other["stall"]) for one, other in saves],
                    "total_seconds": [max(one["total"], other["total"]) for one, other in saves],
                    "extra_memory": max(each["extra"] / each["held"] for each in memory),
                }
            )
    copy = median(figures[-1]["stall_seconds"][1:])
    rows = []
    for each in figures:
        stall, total = (median(each[key][1:]) for key in ("stall_seconds", "total_seconds"))
        firsts = f"{1e3 * each['stall_seconds'][0]:.0f}"
        rows.append(
            [
                each["engine"],
                f"{1e3 * stall:.0f}",
                f"{stall / copy:.2f}",
                firsts,
                "" if each["engine"] == "plain copy" else f"{1e3 * total:.0f}",
                f"{each['extra_memory']:.2f}",
            ]
        )
    table = Table(
        f"{figures[0]['held_mb']:.0f} MB of state on each of 2 ranks",
        ["", "stall, ms", "over a plain copy", "of the first save, ms", "total, ms", "extra memory, of the state"],
        rows,
    )
    print(table.markdown())
    if options.date:
        save("async_save", options.date, __doc__ or "", [table], figures)


if __name__ == "__main__":
    main()
