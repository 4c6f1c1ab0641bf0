"""Small trainings with each technique, as a program writes them: data, schedule, dropout, snapshots and a resume.

`train` is what each rank runs, with faults switched on. It leaves files in the run's folder, which outlive a rank that
is killed: its process id, the loss of each step to the bit, and the error that it ended with.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from scale_adascale import AdaScale
from scale_core.errors import StepError
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.validation import SavedTensor
from scale_core.testing import faults
from scale_fsdp import fully_shard
from scale_moe import MoE, TokenChoice, average_replicated_gradients
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe
from scale_snapshot import SnapshotError, latest_snapshot, load_snapshot, save_snapshot
from scale_tp import parallelize

KINDS = ("fsdp", "oss", "tp", "pipe")
EXPERTS = "moe"
OVER_DDP = ("oss-ddp", "adascale")  # where torch's DDP communicates: its errors are torch's own
STEPS, SAVE_EVERY, WIDTH, CHUNKS = 8, 2, 8, 4
SNAPSHOTS = "snapshots"
NEVER = 3600.0  # Seconds of a limit beyond that of `run_ranks`: a rank that waits for it fails its test.
Whole = Callable[[str, int], Path]
"""The folder of a run without faults, of a kind and a number of ranks."""


class Block(nn.Module):
    """What a transformer's block is without attention; a fault may be put into its forward."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        faults.reach("user.forward", f"block {self.index}")
        y: Tensor = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return y


class ExpertBlock(nn.Module):
    """A mixture of experts that the ranks divide."""

    def __init__(self, index: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.index, self.norm = index, nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, 12, 4, TokenChoice(2), process_group=group, batch_process_group=group)

    def forward(self, x: Tensor) -> Tensor:
        faults.reach("user.forward", f"block {self.index}")
        y: Tensor = x + self.moe(self.norm(x))
        return y


@dataclass
class Training:
    """A model with what trains it.

    Attributes:
        model: What is saved.
        optimizer: Its optimizer.
        schedule: Of the learning rate.
        backward: Computes gradients of a step's batch on this rank, and returns its loss.
        evaluate: The loss of a batch without gradients.
        group: The ranks.
        called: What computes a forward; of a pipeline its model.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: StepLR
    backward: Callable[[int], Tensor]
    evaluate: Callable[[int], float]
    group: dist.ProcessGroup
    called: nn.Module

    def step(self, step: int) -> str:
        """One step; returns its loss to the bit. A step that failed has left nothing behind."""
        torch.manual_seed(1000 * step + dist.get_rank())
        try:
            loss = self.backward(step)
        except BaseException:
            self.optimizer.zero_grad()
            raise
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return float(loss.item()).hex()

    def save(self, folder: Path, step: int) -> None:
        save_snapshot(
            folder / SNAPSHOTS,
            step,
            sharded_state_dict(self.model, self.optimizer),
            cast(Any, self.group),
            {"schedule": self.schedule.state_dict()},
        )

    def resume(self, folder: Path) -> int:
        """Loads the newest snapshot, if there is one; returns the number of steps done."""
        if not (folder / SNAPSHOTS).exists() or latest_snapshot(folder / SNAPSHOTS) is None:
            return 0
        loaded = load_snapshot(
            folder / SNAPSHOTS,
            lambda saved: target_state_dict(self.model, self.optimizer, saved),
            cast(Any, self.group),
        )
        load_sharded_state_dict(loaded.state, self.model, self.optimizer)
        extra: Any = loaded.extra
        self.schedule.load_state_dict(extra["schedule"])
        return loaded.step


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [2 * CHUNKS, WIDTH] each, of one data parallel rank."""
    both = torch.randn(2, 2 * CHUNKS, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))
    return both[0], both[1]


def build(kind: str, limit_seconds: float, check_inputs: bool = False, blocks: nn.Sequential | None = None) -> Training:
    """Builds a training on all ranks that waits for others no longer than the limit.

    Args:
        kind: One of `KINDS` or `OVER_DDP`, or `EXPERTS`.
        limit_seconds: The longest wait.
        check_inputs: Of `parallelize`.
        blocks: The model, of four blocks; by default one with the same weights on all ranks.
    """
    group = cast(dist.ProcessGroup, dist.new_group(timeout=timedelta(seconds=limit_seconds)))
    torch.manual_seed(0)
    if blocks is None:
        make = partial(ExpertBlock, group=group) if kind == EXPERTS else Block
        blocks = nn.Sequential(*(make(index) for index in range(4)))
    model: nn.Module = blocks
    optimizer: Optimizer | None = None
    replica = dist.get_rank()
    if kind == "fsdp":
        for block in blocks:
            fully_shard(block, group)
        called: nn.Module = fully_shard(model, group)
    elif kind == "oss":
        optimizer = OSS(model.parameters(), Adam, group, lr=0.02)
        called = ShardedDataParallel(model, optimizer, process_group=group)
    elif kind in OVER_DDP:
        oss = kind == "oss-ddp"
        optimizer = OSS(model.parameters(), Adam, group, lr=0.02) if oss else Adam(model.parameters(), lr=0.02)
        called = DistributedDataParallel(model, process_group=group)
        optimizer = optimizer if oss else AdaScale(optimizer, process_group=group)
    elif kind == "tp":
        plan = {"*.up": "colwise", "*.down": "rowwise"}
        called, replica = parallelize(model, plan, group, check_inputs=check_inputs), 0
    elif kind == EXPERTS:
        called = model
        average_replicated_gradients(model, group)
    elif kind == "pipe":
        world = dist.get_world_size()
        called = model = pipe = DistributedPipe(
            blocks, "1f1b", balance=[4 // world] * world, chunks=CHUNKS, process_group=group
        )
    else:
        raise ValueError(f"expected one of {(*KINDS, EXPERTS, *OVER_DDP)}, got {kind!r}")

    def evaluate(step: int) -> float:
        x, target = batch_of(step, replica)
        model.eval()
        try:
            with torch.no_grad():
                if kind == "pipe":
                    return float(pipe.evaluate(x, target=target, loss_fn=nn.functional.mse_loss))
                return float((called(x) - target).square().mean())
        finally:
            model.train()

    def backward(step: int) -> Tensor:
        x, target = batch_of(step, replica)
        if kind == "tp":
            torch.manual_seed(step)
        loss = (called(x) - target).square().mean()
        loss.backward()
        return cast(Tensor, loss.detach())

    def backward_of_pipe(step: int) -> Tensor:
        x, target = batch_of(step, 0)
        return pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)

    optimizer = optimizer or Adam(model.parameters(), lr=0.02)
    return Training(
        model,
        optimizer,
        StepLR(optimizer, 3, 0.5),
        backward_of_pipe if kind == "pipe" else backward,
        evaluate,
        group,
        called,
    )


@dataclass(frozen=True)
class Ended:
    """How a rank's training ended with an error.

    Attributes:
        kind: The name of the error's class.
        text: Its message.
        step: In which step, from 1.
    """

    kind: str
    text: str
    step: int


def train(
    kind: str,
    folder: str,
    put: Sequence[faults.Fault] = (),
    limit_seconds: float = NEVER,
    batches: Mapping[int, int] | None = None,
    retry: bool = False,
    steps: int = STEPS,
    save_every: int = SAVE_EVERY,
) -> int:
    """Trains from the newest snapshot to the last step, and returns the step that it began after.

    Args:
        kind: One of `KINDS`, or `EXPERTS`.
        folder: Of the run.
        put: The faults; each waits for its rank.
        limit_seconds: The longest wait for another rank.
        batches: How many steps a rank has data for, where it is not all of them.
        retry: Whether a step that all ranks gave up is run again, and a failed save left out, but for the last one.
        steps: The number of steps.
        save_every: After how many of them there is a snapshot.
    """
    place, rank = Path(folder), dist.get_rank()
    (place / f"pid-{rank}").write_text(str(os.getpid()))
    (place / f"ended-{rank}").unlink(missing_ok=True)
    training = build(kind, limit_seconds)
    first = training.resume(place)
    step = first + 1
    with faults.inject(*put):
        try:
            while step <= (batches or {}).get(rank, steps):
                faults.begin_step(step)
                try:
                    loss = training.step(step)
                except (StepError, faults.InjectedError):
                    if not retry:
                        raise
                    continue
                with (place / f"losses-{rank}").open("a") as file:
                    file.write(json.dumps([step, loss, time.time()]) + "\n")
                if step % save_every == 0:
                    try:
                        training.save(place, step)
                    except SnapshotError:
                        if not retry:
                            raise
                        if step == steps:  # As an operator does who has made room.
                            training.save(place, step)
                step += 1
        except Exception as error:
            if kind == EXPERTS and isinstance(error, faults.InjectedError):
                _write(place, Ended(type(error).__name__, str(error), step))
                raise  # The others hear of it by the end of this process.
            gone = {fault.rank for fault in put if fault.action in ("kill", "stop")} | (batches or {}).keys()
            how = Ended(type(error).__name__, str(error), step)
            _tell(place, put, dist.get_world_size() - len(gone), how)
            raise
    return first


def _tell(place: Path, put: Sequence[faults.Fault], survivors: int, ended: Ended) -> None:
    """Writes how this rank ended, and waits until all others that can do so have: its end is not to be the first."""
    _write(place, ended)
    deadline = time.monotonic() + 600  # As long as `run_ranks` waits: where one never does, the test fails there.
    while len(list(place.glob("ended-*"))) < survivors and time.monotonic() < deadline:
        time.sleep(0.02)
    for fault in put:
        if fault.action == "stop":  # As a person would who reads the error.
            with suppress(ProcessLookupError):
                os.kill(int((place / f"pid-{fault.rank}").read_text()), signal.SIGKILL)


def say_how_it_ended(folder: Path, error: Exception) -> None:
    """Writes the error of this rank's own program."""
    _write(folder, Ended(type(error).__name__, str(error), 0))


def _write(place: Path, ended: Ended) -> None:
    part = place / f"part-{dist.get_rank()}"
    part.write_text(json.dumps(asdict(ended)))
    part.rename(place / f"ended-{dist.get_rank()}")


def ended(folder: Path) -> dict[int, Ended]:
    """How ranks ended, by rank."""
    return {int(path.name[6:]): Ended(**json.loads(path.read_text())) for path in folder.glob("ended-*")}


def losses(folder: Path) -> dict[tuple[int, int], str]:
    """The loss of each step to the bit, by rank and step: the last one where a step was run again."""
    found = {}
    for path in folder.glob("losses-*"):
        for line in path.read_text().splitlines():
            step, loss, _ = json.loads(line)
            found[int(path.name[7:]), step] = loss
    return found


def digest(folder: Path, step: int) -> str:
    """A hash of all tensors of a snapshot, whoever saved them in whatever parts."""

    def target(saved: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, SavedTensor) else value
            for key, value in saved.items()
        }

    state = load_snapshot(folder / SNAPSHOTS, target, step=step).state
    total = hashlib.sha256()
    for key in sorted(state):
        value = state[key]
        total.update(key.encode())
        total.update(
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            if isinstance(value, Tensor)
            else json.dumps(value, sort_keys=True).encode()
        )
    return total.hexdigest()
