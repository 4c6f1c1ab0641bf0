"""How long it takes from the kill of a rank until training goes on, under torchrun, which starts the ranks again.

    python benchmarks/restart.py                      # scale-train and a loop of one's own, 2 ranks, 5 turns
    python benchmarks/restart.py --smoke              # one turn of the loop
    python benchmarks/restart.py --date 2026-11-23    # also writes results/2026-11-23-restart.*

`torchrun --max-restarts=1` starts two ranks that train a small model and save a snapshot every two steps, as
`scale-train lm`, and as the loop of this file with `fully_shard`, `scale_snapshot.save` and `scale_snapshot.load`.
When rank 0 has printed its fifth step, rank 1 is killed by SIGKILL from outside.

"First start" is from the start of torchrun to the first step that rank 0 prints; "kill to resumed" from the kill to
the first one that it prints after the restart. Both hold the start of Python, the import of torch and the rendezvous;
in the second there are also the end of the other rank, torchrun's notice of it, and the load of the snapshot. Figures
are medians over turns, with the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from report import Table, machine, save

STEPS, SAVE_EVERY, KILLED_AFTER = 10, 2, 5
PROGRAM = (
    "-m scale_train lm --text text --layers 1 --width 16 --heads 2 --sequence 16 --batch 4 --evaluate-every 0 "
    f"--steps {STEPS} --save-every {SAVE_EVERY} --warmup 2 --sample-length 0 --device cpu --log-every 1 "
    "--log-format json --out run"
)
WAYS = {"loop": "a loop with fully_shard and scale_snapshot.save", "scale-train": "scale-train lm"}


def loop(folder: str) -> None:
    """A rank: trains from the newest snapshot, as a program of one's own does."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import scale_snapshot
    from scale_core.launch import init_distributed
    from scale_fsdp import fully_shard

    group = init_distributed("gloo", device="cpu")
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    first = 0 if scale_snapshot.latest(folder) is None else scale_snapshot.load(folder, objects).step
    for step in range(first + 1, STEPS + 1):
        torch.manual_seed(step)
        model(torch.randn(8, 64)).square().mean().backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        if group.rank == 0:
            print(json.dumps({"step": step, "loss": 0.0}), flush=True)
        if step % SAVE_EVERY == 0:
            scale_snapshot.save(folder, step, objects)
        time.sleep(0.2)  # So that the kill comes before the end.
    dist.destroy_process_group()


@dataclass
class Turn:
    """One training that lost a rank, in seconds and steps."""

    way: str
    first_start: float
    kill_to_resumed: float
    steps_lost: int


def pid_of_rank(rank: int, agent: int) -> int:
    """The process of a rank that torchrun has started."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise RuntimeError(f"torchrun has no rank {rank}")


def measure(way: str, environment: Mapping[str, str]) -> Turn:
    """Starts a training under torchrun, kills rank 1, and waits for its end."""
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        Path(folder, "text").write_bytes(bytes((7 * index * index) % 26 + 97 for index in range(3_000)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["--max-restarts=1", "--monitor-interval=0.1"]
        ran = PROGRAM.split() if way == "scale-train" else [str(Path(__file__).resolve()), "--work", folder]
        began = time.perf_counter()
        with (
            Path(folder, "errors").open("w") as errors,
            subprocess.Popen(
                command + ran, cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=errors
            ) as process,
        ):
            try:
                came = _follow(process)
            finally:
                process.kill()
        if len(came) < 3 or process.returncode:
            raise RuntimeError(f"{way} ended with code {process.returncode}:\n{Path(folder, 'errors').read_text()}")
    (_, first), (before, killed), (after, resumed) = came
    return Turn(way, first - began, resumed - killed, before - after + 1)


def _follow(process: subprocess.Popen[bytes]) -> list[tuple[int, float]]:
    """Kills rank 1 on the way; returns the first step, the one before the kill and the one after it, with times."""
    came: list[tuple[int, float]] = []
    assert process.stdout is not None
    for line in process.stdout:
        step = json.loads(line).get("step") if line.startswith(b"{") and b'"loss"' in line else None
        if step is None:
            continue
        now = time.perf_counter()
        if not came or (len(came) == 2 and step <= came[1][0]):
            came.append((step, now))
        if len(came) == 1 and step == KILLED_AFTER:
            os.kill(pid_of_rank(1, process.pid), signal.SIGKILL)
            came.append((step, time.perf_counter()))
        elif len(came) == 2 and step > came[1][0]:
            came[1] = (step, came[1][1])  # Rank 0 had done more before it was told.
    process.wait(timeout=120)
    return came


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one turn of the loop")
    parser.add_argument("--date", help="writes results/DATE-restart.json and .md")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        loop(options.work)
        return
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ways, turns = (["loop"], 1) if options.smoke else ([*WAYS], options.turns)
    found = [measure(way, environment) for _ in range(turns) for way in ways]
    rows = []
    for way in ways:
        first, again = (
            [getattr(turn, key) for turn in found if turn.way == way] for key in ("first_start", "kill_to_resumed")
        )
        lost = median(turn.steps_lost for turn in found if turn.way == way)
        row = [f"{median(first):.1f} s", f"{median(again):.1f} s", f"{max(again):.1f} s", f"{lost:g}"]
        rows.append([WAYS[way], *row])
    heads = ["", "first start", "kill to resumed", "at most", "steps lost"]
    table = Table(f"{turns} turns of 2 ranks; load of the machine at the end: {machine()['load'][0]}", heads, rows)
    print(table.markdown())
    if options.date:
        save("restart", options.date, __doc__ or "", [table], [asdict(turn) for turn in found])


if __name__ == "__main__":
    main()
