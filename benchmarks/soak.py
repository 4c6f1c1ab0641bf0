"""Minutes of training under random faults: what each sort of them costs, and that nothing is lost.

    python benchmarks/soak.py --minutes 30                   # all techniques by turns; --seed 7 repeats a run's faults
    python benchmarks/soak.py --kinds fsdp pipe --ranks 4    # some of them, on another number of ranks
    python benchmarks/soak.py --smoke                        # seconds: one training, one rank that is killed
    python benchmarks/soak.py --date 2026-11-23              # also writes results/2026-11-23-soak.*

Trainings follow each other until the time is over: `fully_shard`, OSS with ShardedDataParallel, tensor parallel ranks
and a pipeline, each of forty steps under torchrun, with a snapshot every four. In each generation of ranks three faults
are drawn from the seed: a rank is killed or frozen (SIGSTOP) at a point of a step, killed while a snapshot is saved, is
two seconds late, raises in its forward, or finds the disk full while it saves; torchrun's agent is killed, or asked to
end. torchrun starts ranks that have failed again; where it has gone itself, it is started again, as an operator does.

"Steps lost" are those that had been done and were run again; a snapshot every four steps costs two of them on average.
"Back after" is the time from the last step before a fault to the first step after it, with the start of Python, torch
and the ranks in it, and for frozen ranks with the limit of 15 seconds that the others wait. A row counts faults that
have happened. After each training its losses, its weights and all snapshots that stand are compared with those of the
same training without faults, to the bit, and there may be no process and no temporary file left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from report import Table, machine, save

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "faults"))

import fault_trainings  # noqa: E402  # The trainings of the tests.

from scale_core.testing import faults, run_ranks  # noqa: E402
from scale_core.testing.faults import Fault  # noqa: E402

STEPS, SAVE_EVERY, LIMIT_SECONDS, LATE_SECONDS = 40, 4, 15.0, 2.0
MOST_RESTARTS, MOST_GENERATIONS = 3, 8  # of one start of torchrun; of a training, with faults
ACTIONS = ("killed", "frozen", "killed while saving", "late", "raises", "disk full", "agent killed", "agent ended")
AGENT = {"agent killed": signal.SIGKILL, "agent ended": signal.SIGTERM}
# Where ranks are killed, frozen or late in a step of each training: points, and what chooses among their occurrences.
POINTS: dict[str, list[Fault]] = {
    "fsdp": [
        faults.kill_at("all_gather", during="forward"),
        faults.kill_at("all_gather", during="backward"),
        faults.kill_at("reduce_scatter"),
        faults.kill_at("optimizer.step"),
    ],
    "oss": [faults.kill_at("reduce_scatter"), faults.kill_at("all_gather"), faults.kill_at("optimizer.step")],
    "tp": [
        faults.kill_at("all_gather", during="forward"),
        faults.kill_at("all_gather", during="backward"),
        faults.kill_at("optimizer.step"),
    ],
    "pipe": [
        faults.kill_at("pipe.send", detail="micro-batch 2"),
        faults.kill_at("pipe.receive", detail="micro-batch 1"),
        faults.kill_at("optimizer.step"),
    ],
}
# Points of a save, and whether only rank 0 passes them.
SAVING = {
    "snapshot.room": True,
    "snapshot.tensor": True,
    "snapshot.written": False,
    "snapshot.manifest": True,
    "snapshot.renamed": True,
}


def drawn(seed: str, kind: str, num_ranks: int, first: int, actions: Sequence[str]) -> list[tuple[str, Fault]]:
    """The faults of one generation of ranks that begins after step `first`; the same on all of them."""
    generator = random.Random(seed)
    found = []
    for place, action in enumerate(actions or [generator.choice(ACTIONS) for _ in range(3)]):
        step = min(first + 2 + 5 * place + generator.randrange(4), STEPS)
        rank = generator.randrange(num_ranks)
        point = asdict(generator.choice(POINTS[kind])) | {"rank": rank, "step": step}
        if action in AGENT:
            fault = Fault("raise", "user.agent", 0, step)
        elif action == "raises":
            fault = Fault("raise", "user.forward", rank, step)
        elif action == "late":
            fault = Fault(**point | {"action": "delay", "seconds": LATE_SECONDS})
        elif action in ("killed while saving", "disk full"):
            name = generator.choice([*SAVING]) if action == "killed while saving" else "snapshot.written"
            after = -(-step // SAVE_EVERY) * SAVE_EVERY
            verb = "kill" if action == "killed while saving" else "enospc"
            fault = Fault(verb, name, 0 if SAVING[name] else rank, after)
        else:
            fault = Fault(**point | {"action": "kill" if action == "killed" else "stop"})
        found.append((action, Fault(**asdict(fault) | {"attempt": None})))
    return found


def goes_on(kind: str, action: str) -> bool:
    """Whether training goes on after a fault without a restart."""
    # Tensor parallel ranks have no comparison at the end of a step at which one of them could give it up.
    return action in ("late", "disk full") or (action == "raises" and kind != "tp")


def work(kind: str, folder: Path, seed: str, actions: Sequence[str]) -> None:
    """A rank: joins the others, and trains from the newest snapshot with the faults of its generation."""
    import torch.distributed as dist

    from scale_core.launch import die_with_parent, init_distributed
    from scale_snapshot import latest_snapshot

    agent = os.getppid()
    die_with_parent(agent)
    group = init_distributed("gloo", device="cpu", limit_seconds=120)
    (folder / "pids" / f"{os.getpid()}").touch()
    newest = latest_snapshot(folder / fault_trainings.SNAPSHOTS)
    first = 0 if newest is None else int(newest.name.removeprefix("step-"))
    place = f"{os.environ['SOAK_START']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    plan = drawn(f"{seed}/{place}", kind, group.size, first, actions)
    if len(list((folder / "generations").iterdir())) >= (1 if actions else MOST_GENERATIONS):
        plan = []
    dist.barrier()
    if group.rank == 0:
        entry = {"first": first, "faults": [[action, str(fault), fault.step] for action, fault in plan]}
        (folder / "generations" / f"{time.time_ns()}").write_text(json.dumps(entry))

    def end_agent(action: str, step: int) -> None:
        if group.rank == 0:
            print(f"injected fault: {action}, step {step}", file=sys.stderr, flush=True)
            os.kill(agent, AGENT[action])
            time.sleep(60)  # It ends here, with all the others.

    ends = {fault.step: action for action, fault in plan if action in AGENT}
    begin_step = faults.begin_step

    def begin(step: int) -> None:
        if step in ends:
            end_agent(ends[step], step)
        begin_step(step)

    faults.begin_step = begin
    put = [fault for action, fault in plan if action not in AGENT]
    fault_trainings.train(kind, str(folder), put, LIMIT_SECONDS, None, True, STEPS, SAVE_EVERY)
    dist.destroy_process_group()
    os._exit(0)  # Past every finalizer: a thread of the transport may abort the process.


def start_torchrun(kind: str, num_ranks: int, folder: Path, seed: str, start: int, actions: Sequence[str]) -> int:
    """Trains under torchrun until it ends; returns its exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SOAK_START": str(start)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--max-restarts={MOST_RESTARTS}", "--monitor-interval=0.2", str(Path(__file__).resolve())]
    command += ["--work", kind, str(folder), seed, *actions]
    with (folder / f"log-{start}").open("w") as log:
        ended = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=1800, check=False)
    return ended.returncode


@dataclass
class Cost:
    """What faults of one sort have cost."""

    happened: int = 0
    steps_lost: list[int] = field(default_factory=list)
    back_after_seconds: list[float] = field(default_factory=list)


@dataclass
class Found:
    """What all trainings together have shown; `wrong` is empty where nothing was lost."""

    costs: dict[str, Cost] = field(default_factory=lambda: {action: Cost() for action in ACTIONS})
    trainings: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    snapshots: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self, kind: str, folder: Path) -> None:
        """Adds what the files of a training tell: which faults came, and which steps were run again."""
        done = [json.loads(line) for line in (folder / "losses-0").read_text().splitlines()]
        self.steps += len(done)
        begun = sorted((folder / "generations").iterdir(), key=lambda path: int(path.name))
        generations = [json.loads(path.read_text()) for path in begun]
        # By time: where nothing was lost, the steps of a generation follow those of the one before.
        times = [*(int(path.name) / 1e9 for path in begun), math.inf]
        parts = [[entry for entry in done if start <= entry[2] < end] for start, end in pairwise(times)]
        for number, (generation, steps) in enumerate(zip(generations, parts, strict=True)):
            is_last, reached = number + 1 == len(generations), generation["first"] + len(steps)
            for action, told, at in generation["faults"]:
                if is_last and not goes_on(kind, action):
                    continue  # The training was over before.
                if not is_last and at > reached + (not goes_on(kind, action)):
                    continue  # Another fault came before it.
                self.costs[action].happened += 1
                print(f"  {told}" if action not in AGENT else f"  {action} in step {at}")
                if not is_last and not goes_on(kind, action):
                    self._lost(action, generation, generations[number + 1], steps, parts[number + 1][:1])
                    break

    def _lost(self, action: str, before: dict, after: dict, steps: list, first_again: list) -> None:  # type: ignore[type-arg]
        reached = before["first"] + len(steps)
        self.costs[action].steps_lost.append(max(0, reached - after["first"]))
        if steps and first_again:
            self.costs[action].back_after_seconds.append(first_again[0][2] - steps[-1][2])

    def check(self, kind: str, folder: Path, whole: Path) -> None:
        """Compares a training with the undisturbed one, to the bit."""
        if fault_trainings.losses(folder) != fault_trainings.losses(whole):
            self.wrong.append(f"{kind}: other losses than without faults")
        for path in sorted((folder / fault_trainings.SNAPSHOTS).iterdir()):
            if not path.name.removeprefix("step-").isdecimal():
                self.wrong.append(f"{kind}: {path.name} is left")
                continue
            step = int(path.name.removeprefix("step-"))
            self.snapshots += 1
            try:
                equal = fault_trainings.digest(folder, step) == fault_trainings.digest(whole, step)
            except Exception as error:
                self.wrong.append(f"{kind}: {path.name} can't be read: {error}")
            else:
                self.wrong += [] if equal else [f"{kind}: {path.name} is not that of the undisturbed run"]
        if not (folder / fault_trainings.SNAPSHOTS / f"step-{STEPS:08d}").is_dir():
            self.wrong.append(f"{kind}: the last snapshot is missing")
        for path in (folder / "pids").iterdir():
            cmdline = Path("/proc") / path.name / "cmdline"
            if cmdline.exists() and str(folder).encode() in cmdline.read_bytes():
                self.wrong.append(f"{kind}: process {path.name} is left")

    def table(self, minutes: float, seed: int) -> Table:
        rows = []
        for action, cost in self.costs.items():
            lost = f"{mean(cost.steps_lost):.1f}, at most {max(cost.steps_lost)}" if cost.steps_lost else "0"
            back = f"{median(cost.back_after_seconds):.1f} s" if cost.back_after_seconds else "at once"
            rows.append([action, str(cost.happened), lost if cost.happened else "-", back if cost.happened else "-"])
        wrong = "; ".join(self.wrong) or "nothing"
        trainings = ", ".join(f"{count} {kind}" for kind, count in sorted(self.trainings.items()))
        title = (
            f"{minutes:.1f} minutes, seed {seed}: {sum(self.trainings.values())} trainings ({trainings}), {self.steps} "
            f"steps, {sum(cost.happened for cost in self.costs.values())} faults; {self.snapshots} snapshots read "
            f"again. Lost, damaged, left over or different: {wrong}. Load of the machine at the end: "
            f"{machine()['load'][0]}."
        )
        return Table(title, ["fault", "happened", "steps lost, on average", "back after, median"], rows)


def soak(kinds: Sequence[str], num_ranks: int, minutes: float, seed: int, actions: Sequence[str]) -> Found:
    """Trains until the time is over, one training at least; `actions` are the faults of the first generation."""
    found, deadline, number = Found(), time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        whole = {kind: Path(name, f"whole-{kind}") for kind in kinds}
        while number == 0 or time.monotonic() < deadline:
            kind, folder = kinds[number % len(kinds)], Path(name, str(number))
            if not whole[kind].exists():
                whole[kind].mkdir()
                run_ranks(fault_trainings.train, num_ranks, kind, str(whole[kind]), *_UNDISTURBED)
            for part in ("pids", "generations", fault_trainings.SNAPSHOTS):
                (folder / part).mkdir(parents=True)
            print(f"{kind} {number}", flush=True)
            for start in range(4 * MOST_GENERATIONS):
                if start_torchrun(kind, num_ranks, folder, f"{seed}/{number}", start, actions) == 0:
                    break
            else:
                found.wrong.append(f"{kind}: never came to its end")
                print((folder / f"log-{start}").read_text())
                break
            found.trainings[kind] += 1
            found.count(kind, folder)
            found.check(kind, folder, whole[kind])
            if found.wrong:
                print("\n".join(found.wrong), *(path.read_text() for path in sorted(folder.glob("log-*"))), sep="\n")
                break
            number += 1
    return found


_UNDISTURBED = ((), 120.0, None, False, STEPS, SAVE_EVERY)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=fault_trainings.KINDS, default=list(fault_trainings.KINDS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--date")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        kind, folder, seed, *actions = given.work
        work(kind, Path(folder), seed, actions)
        return
    seed = random.randrange(10**6) if given.seed is None else given.seed
    kinds, actions = (["fsdp"], ["killed"]) if given.smoke else (given.kinds, [])
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    found = soak(kinds, given.ranks, 0 if given.smoke else given.minutes, seed, actions)
    minutes = (time.monotonic() - began) / 60
    table = found.table(minutes, seed)
    print(table.markdown())
    if given.date and not found.wrong:
        figures: dict[str, Any] = {"seed": seed, "minutes": minutes, "ranks": given.ranks}
        figures["costs"] = {action: asdict(cost) for action, cost in found.costs.items()}
        counts = {"trainings": dict(found.trainings), "steps": found.steps, "snapshots": found.snapshots}
        save("soak", given.date, __doc__, [table], [figures | counts])
    if found.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
