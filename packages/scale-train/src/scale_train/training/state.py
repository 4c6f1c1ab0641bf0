"""Train state: all that changes from step to step, which the trainer advances and checkpoints save."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from scale_adascale import AdaScale
from scale_core.comm.group import Group
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_snapshot import AsyncSave
from scale_train.configuration.resolve import model_config, resolve_device
from scale_train.data.text import Sampler, Text
from scale_train.huggingface.model import TransformersSource
from scale_train.model.gpt import GPT
from scale_train.options import Options
from scale_train.training.adascale import with_adascale
from scale_train.training.experts import ExpertBalance
from scale_train.training.parallel.activations import plan_blocks
from scale_train.training.parallel.engine import Engine, make_engine
from scale_train.training.parallel.parallelize_gpt import parallel_dims
from scale_train.training.reports.mfu import UtilizationModel, utilization_model
from scale_train.training.reports.reporters import Reporter, initialization_bar, uses_progress_bar


class MicrobatchTimer:
    """Time of one micro-batch's forward and backward, measured without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "cuda"
        self._starts: list[float | torch.cuda.Event] = []

    def record_start(self, index: int) -> None:
        """A micro-batch begins, by its index within the step."""
        if index == 0:
            self._starts = []
        if self._has_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._starts.append(event)
        else:
            self._starts.append(time.monotonic())

    def microbatch_seconds(self) -> float | None:
        """Mean of the last step without its last micro-batch, which reduces gradients; None if it had one."""
        if len(self._starts) < 2:
            return None
        first, last = self._starts[0], self._starts[-1]
        if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
            last.synchronize()
            total: float = first.elapsed_time(last) / 1000
        else:
            assert isinstance(first, float) and isinstance(last, float)
            total = last - first
        return total / (len(self._starts) - 1)

    def step_seconds_by_batch(self, step: float, batch: int) -> dict[int, float]:
        """Seconds of a step by batch size: as measured, and with a single micro-batch; empty where it has one."""
        one, number = self.microbatch_seconds(), len(self._starts)
        single = 0.0 if one is None else step - (number - 1) * one
        return {batch: step, batch // number: single} if single > 0 else {}


@dataclass
class StepTimer:
    """Steps per second since the last log, and time left at the mean speed of this run."""

    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    _last: float = field(default_factory=time.monotonic)
    _last_steps: int = 0

    def steps_per_second(self) -> float:
        """Steps per second since this was last asked."""
        now = time.monotonic()
        speed = (self.steps - self._last_steps) / max(1e-9, now - self._last)
        self._last, self._last_steps = now, self.steps
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count for the speed."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._last += time.monotonic() - began

    def seconds_for(self, steps: int) -> float:
        """Predicted seconds of that many more steps."""
        return (time.monotonic() - self.started) / max(1, self.steps) * steps


@dataclass(frozen=True)
class LRSchedule:
    """Linear warm-up to a peak, then half a cosine down to a floor (arXiv 1608.03983, eq. 5, with one period).

    A pure function of the step, so that a resumed run needs the step alone.

    Example:
        >>> schedule = LRSchedule(peak=1.0, warmup=2, steps=6, floor=0.1)
        >>> [round(schedule.at(step), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """

    peak: float
    warmup: int  # steps until the peak; 0 for none
    steps: int
    floor: float = 0.1  # the last learning rate, as a fraction of the peak

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        passed = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, passed)))
        return self.peak * (self.floor + (1 - self.floor) * cosine)


@dataclass
class TrainState:
    """State of a training on one rank."""

    options: Options
    group: Group
    engine: Engine
    optimizer: torch.optim.Optimizer
    schedule: LRSchedule
    sampler: Sampler
    text: Text
    reporter: Reporter
    utilization: UtilizationModel | None  # None where the peak of the devices is not known
    scaler: ShardedGradScaler  # of the loss with --precision fp16; otherwise it does nothing
    step: int = 0  # steps done
    saved_step: int = -1  # steps done at the last checkpoint; -1 for never
    checkpoint: Path | None = None  # the last complete one, written or read
    saving: AsyncSave | None = None  # the one that is being written in the background
    step_timer: StepTimer = field(default_factory=StepTimer)
    microbatch_timer: MicrobatchTimer = field(init=False)  # used with --adascale
    balance: ExpertBalance = field(init=False)  # of --experts
    loss: torch.Tensor | None = None  # this rank's part of the last step's loss, a scalar; None before the first step
    # Of the last step's gradient before clipping, a scalar; None without clipping, and where the step was skipped.
    norm: torch.Tensor | None = None
    skipped_steps: int = 0  # since this run began, of gradients that were not finite with --precision fp16

    def __post_init__(self) -> None:
        self.microbatch_timer = MicrobatchTimer(self.engine.device)
        self.balance = ExpertBalance(self.engine.expert_layers(), self.engine.num_blocks)

    @property
    def schedule_step(self) -> int:
        """Steps of the learning rate schedule that are done: those taken, or with AdaScale the sum of gains."""
        return int(self.optimizer.progress) if isinstance(self.optimizer, AdaScale) else self.step

    @property
    def is_over(self) -> bool:
        return self.schedule_step >= self.options.optimizer.steps

    def finish_save(self) -> None:
        """Waits for the checkpoint that is being written in the background; a SnapshotError if it has failed."""
        if self.saving is not None:
            self.checkpoint, self.saving = self.saving.wait(), None

    def resume_hint(self) -> str:
        """How to resume after an early end, for messages."""
        if self.checkpoint is None:
            return "there is no checkpoint to go on from"
        return f"go on with --resume {self.checkpoint.parent.parent}, from {self.checkpoint.name}"


def build_state(options: Options, text: Text, group: Group) -> TrainState:
    """Builds a training before its first step; the same weights on all ranks and at any number of them."""
    device = torch.device("cpu")
    if resolve_device(options.parallel.device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(options.run.seed)
    sharded = options.parallel.parallel == "fsdp"
    tensor_parallel = options.parallel.tensor_parallel > 1  # shards a full model
    on_meta = options.parallel.parallel in ("fsdp", "pipe") and not tensor_parallel
    dims = parallel_dims(options.parallel, group.size)
    source = None if options.model.model is None else TransformersSource(options.model.model, options.run.seed)
    model: nn.Module
    if source is not None:
        model = source.build_on_meta()
        if not on_meta:
            source.fill(model, device)
    else:
        with torch.device("meta") if on_meta else nullcontext():
            gpt = model = GPT(model_config(options), dims)
        if not on_meta:
            plan_blocks(gpt.to(device), options, dims, group)
    with initialization_bar(
        shown=sharded and group.rank == 0 and uses_progress_bar(options.run.log_format)
    ) as progress:
        engine = make_engine(model, options.parallel, options.optimizer, dims, device, progress, source)
    torch.manual_seed(options.run.seed)  # What was drawn so far depends on how it was built.
    scaler = ShardedGradScaler(enabled=options.parallel.precision == "fp16", process_group=group)
    return TrainState(
        options=options,
        group=group,
        engine=engine,
        optimizer=with_adascale(engine, options, scaler),
        schedule=LRSchedule(options.optimizer.lr, options.optimizer.warmup, options.optimizer.steps),
        sampler=Sampler(len(text.train), options.data.sequence, options.run.seed),
        text=text,
        reporter=Reporter(),
        utilization=utilization_model(options, group.size, device),
        scaler=scaler,
    )
