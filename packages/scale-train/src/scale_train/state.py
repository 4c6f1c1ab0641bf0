"""A training as a thing: all that changes from step to step, and what it stands on.

The loop moves it, a checkpoint keeps it, the report looks at it when it is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scale_core.comm.group import Group
from scale_train.config.options import Options
from scale_train.config.resolve import device_type, model_config
from scale_train.data.sampler import Sampler
from scale_train.data.text import Text
from scale_train.lr_schedule import Schedule
from scale_train.model import GPT
from scale_train.parallelize.activations import plan_blocks
from scale_train.parallelize.adascale import steps_done, with_adascale
from scale_train.parallelize.engine import Engine, spread
from scale_train.reporting.reporters import Reporter, Silent, initialisation_bar, on_screen


class PassClock:
    """Looks at the clock when each forward and backward pass of a step begins, without waiting for the device.

    Args:
        device: That which computes; its own clock is taken where it has one.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "cuda"
        self._begun: list[float | torch.cuda.Event] = []

    def begin(self, index: int) -> None:
        """A pass begins.

        Args:
            index: Its number within the step.
        """
        if index == 0:
            self._begun = []
        if self._has_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._begun.append(event)
        else:
            self._begun.append(time.monotonic())

    def seconds(self) -> float | None:
        """Seconds of one pass of the last step, without the last one, which averages gradients; None if it had one."""
        if len(self._begun) < 2:
            return None
        first, last = self._begun[0], self._begun[-1]
        if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
            last.synchronize()
            whole: float = first.elapsed_time(last) / 1000
        else:
            assert isinstance(first, float) and isinstance(last, float)
            whole = last - first
        return whole / (len(self._begun) - 1)

    def seconds_by_batch(self, step: float, batch: int) -> dict[int, float]:
        """Returns seconds of a step by batch: as it was, and as it would be with a single pass.

        Args:
            step: Seconds of a step.
            batch: Sequences of a step, of all ranks.

        Returns:
            Nothing, where a step is one pass.
        """
        one_pass, passes = self.seconds(), len(self._begun)
        single = 0.0 if one_pass is None else step - (passes - 1) * one_pass
        return {batch: step, batch // passes: single} if single > 0 else {}


@dataclass
class Clock:
    """Speed since the last look, and time left at the speed of this whole run."""

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
        """What happens inside is no training, and does not count for its speed."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._last += time.monotonic() - began

    def seconds_for(self, steps: int) -> float:
        """How long that many more steps will take."""
        return (time.monotonic() - self.started) / max(1, self.steps) * steps


@dataclass
class Training:
    """Where a run stands, as one rank sees it.

    Attributes:
        step: Steps done.
        saved_step: Steps done when it was last saved; -1 for never.
        checkpoint: The last one, written or read.
        clock: Of this run, from its first step on.
        pass_clock: Of the passes of its last step, with --adascale.
        loss: This rank's part of the last step's loss, a scalar; None before the first step.
        norm: Of the last step's gradient before clipping, a scalar; None without clipping.
    """

    options: Options
    group: Group
    engine: Engine
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    sampler: Sampler
    text: Text
    reporter: Reporter
    step: int = 0
    saved_step: int = -1
    checkpoint: Path | None = None
    clock: Clock = field(default_factory=Clock)
    pass_clock: PassClock = field(init=False)
    loss: torch.Tensor | None = None
    norm: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.pass_clock = PassClock(self.engine.device)

    @property
    def position(self) -> int:
        """Steps of the schedule that are done."""
        return steps_done(self.optimizer, self.step)

    @property
    def is_over(self) -> bool:
        """Whether all of them are."""
        return self.position >= self.options.optimizer.steps

    def way_on(self) -> str:
        """How to go on from here after an end before its time, in words."""
        if self.checkpoint is None:
            return "there is no checkpoint to go on from"
        return f"go on with --resume {self.checkpoint.parent.parent}, from {self.checkpoint.name}"


def build(options: Options, text: Text, group: Group) -> Training:
    """A training before its first step; the same weights on all ranks and at any number of them."""
    device = _device(options)
    torch.manual_seed(options.run.seed)
    sharded = options.parallel.parallel == "fsdp"
    divided = options.parallel.tensor_parallel > 1  # Each rank takes its parts of a whole model.
    in_parts = options.parallel.parallel in ("fsdp", "pipe") and not divided  # Then it is never whole anywhere.
    with torch.device("meta") if in_parts else nullcontext():
        model = GPT(model_config(options))
    if not in_parts:
        plan_blocks(model.to(device), options, group)
    with initialisation_bar(shown=sharded and group.rank == 0 and on_screen(options.run.log_format)) as progress:
        engine = spread(model, options.parallel, options.optimizer, group, device, progress)
    torch.manual_seed(options.run.seed)  # What was drawn so far depends on how it was built.
    return Training(
        options=options,
        group=group,
        engine=engine,
        optimizer=with_adascale(engine, options),
        schedule=Schedule(options.optimizer.lr, options.optimizer.warmup, options.optimizer.steps),
        sampler=Sampler(len(text.train), options.data.sequence, options.run.seed),
        text=text,
        reporter=Silent(),
    )


def _device(options: Options) -> torch.device:
    if device_type(options) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
