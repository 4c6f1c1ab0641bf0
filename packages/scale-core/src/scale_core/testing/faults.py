"""Faults at named points of the code: a rank is killed, stopped, delayed, or raises, where and when a test says.

    with faults.inject(faults.kill_at("reduce_scatter", rank=1, step=3)):
        train()

Every rank may run the same lines: a fault waits for its rank, its step and its point, and happens once. If a different
program starts the ranks, for example torchrun, they read the same faults from the environment: see `to_environment`.
What is about to happen is printed to stderr first. `scale_core.fault_points` lists the points.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from scale_core import fault_points
from scale_core.arguments import checked_arguments, did_you_mean
from scale_core.fault_points import POINTS, VARIABLE

__all__ = [
    "Fault",
    "InjectedError",
    "begin_step",
    "delay_at",
    "draw",
    "enospc_at",
    "inject",
    "inject_from_environment",
    "kill_at",
    "raise_at",
    "reach",
    "stop_at",
    "to_environment",
]

Action = Literal["kill", "stop", "raise", "delay", "enospc"]
_ACTIONS = ("kill", "stop", "raise", "delay", "enospc")


class InjectedError(RuntimeError):
    """The error that `raise_at` raises.

    See also: [fault injection](../internals/faults.md).
    """


@dataclass(frozen=True)
class Fault:
    """One fault, which happens once.

    Attributes:
        action: "kill" (SIGKILL), "stop" (SIGSTOP: frozen, alive), "raise" (`InjectedError`), "delay" or "enospc" (an
            OSError as of a full disk).
        point: A name of `fault_points.POINTS`, or one of the program's own that begins with "user.".
        rank: The rank of the job on which it happens.
        step: In which step, from 1; None is any. A step ends with the step of the outermost optimizer, or where
            `begin_step` says so.
        occurrence: At the how manyth time, from 1, that the point is reached in that step (where `step` is None, since
            the fault was switched on).
        during: Counts only what is reached inside of a backward pass of autograd, or only what is not; None is both.
        detail: Counts only points whose detail has this text in it, such as "micro-batch 2".
        seconds: How long a "delay" lasts.
        text: The message of a "raise".
        attempt: In which generation of torchrun's restarts, from 0; None is any.

    Examples:
        >>> from scale_core.testing import faults
        >>> fault = faults.kill_at("all_gather", rank=1, step=3)
        >>> fault.point, fault.rank, fault.step
        ('all_gather', 1, 3)

    See also: [faults](../internals/faults.md).
    """

    action: Action
    point: str
    rank: int = 0
    step: int | None = None
    occurrence: int = 1
    during: Literal["forward", "backward"] | None = None
    detail: str = ""
    seconds: float = 0.0
    text: str = "injected"
    attempt: int | None = 0

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise ValueError(f"expected action to be one of {', '.join(map(repr, _ACTIONS))}, got {self.action!r}")
        if self.point not in POINTS and not self.point.startswith("user."):
            raise ValueError(
                f'there is no point {self.point!r} in scale, and points of a program\'s own begin with "user."; '
                f"{did_you_mean(self.point, POINTS)}"
            )
        if self.rank < 0 or self.seconds < 0:
            raise ValueError(f"ranks and seconds are not negative, got rank={self.rank}, seconds={self.seconds}")
        if self.occurrence < 1 or (self.step is not None and self.step < 1):
            raise ValueError(f"steps and occurrences count from 1, got step={self.step}, occurrence={self.occurrence}")

    def __str__(self) -> str:
        when = "any step" if self.step is None else f"step {self.step}"
        where = f" in {self.during}" if self.during else ""
        more = f", {self.seconds:g} s" if self.action == "delay" else ""
        chosen = f" ({self.detail})" if self.detail else ""
        return f"{self.action} at {self.point}{chosen}{where} #{self.occurrence}, rank {self.rank}, {when}{more}"


@checked_arguments
def kill_at(point: str, rank: int = 0, step: int | None = None, **where: Any) -> Fault:
    """SIGKILL; `where` has further fields of `Fault`, here and below.

    Examples:
        >>> from scale_core.testing import faults
        >>> with faults.inject(faults.kill_at("reduce_scatter", rank=1, step=3)):
        ...     pass  # your loop, on every rank

    See also: [faults](../internals/faults.md).
    """
    return Fault("kill", point, rank, step, **where)


@checked_arguments
def stop_at(point: str, rank: int = 0, step: int | None = None, **where: Any) -> Fault:
    """SIGSTOP: the rank is frozen, and its connections stay open.

    Examples:
        >>> from scale_core.testing import faults
        >>> with faults.inject(faults.stop_at("all_gather", rank=1, step=3)):
        ...     pass  # your loop: rank 1 hangs, its connections stay open

    See also: [faults](../internals/faults.md).
    """
    return Fault("stop", point, rank, step, **where)


@checked_arguments
def raise_at(point: str, rank: int = 0, step: int | None = None, text: str = "injected", **where: Any) -> Fault:
    """An `InjectedError` with this text.

    Examples:
        >>> from scale_core.testing import faults
        >>> with faults.inject(faults.raise_at("user.validation", rank=0, step=1, text="no data")):
        ...     try:
        ...         faults.reach("user.validation")
        ...     except RuntimeError as error:
        ...         print("raised")
        raised

    See also: [faults](../internals/faults.md).
    """
    return Fault("raise", point, rank, step, text=text, **where)


@checked_arguments
def delay_at(point: str, rank: int = 0, step: int | None = None, *, seconds: float, **where: Any) -> Fault:
    """The rank sleeps for some seconds, and goes on.

    Examples:
        >>> from scale_core.testing import faults
        >>> with faults.inject(faults.delay_at("user.validation", rank=0, step=1, seconds=0.01)):
        ...     faults.reach("user.validation")  # 10 ms late

    See also: [faults](../internals/faults.md).
    """
    return Fault("delay", point, rank, step, seconds=seconds, **where)


@checked_arguments
def enospc_at(point: str, rank: int = 0, step: int | None = None, **where: Any) -> Fault:
    """An `OSError` as of a full disk.

    Examples:
        >>> from scale_core.testing import faults
        >>> with faults.inject(faults.enospc_at("snapshot.tensor", rank=0, step=10)):
        ...     pass  # your loop: the save of step 10 finds a full disk

    See also: [faults](../internals/faults.md).
    """
    return Fault("enospc", point, rank, step, **where)


def draw(generator: random.Random, candidates: Sequence[Fault], num_ranks: int, steps: range) -> Fault:
    """Draws one of the candidates, for a rank and a step that are drawn, too; the same for the same generator.

    Examples:
        >>> import random
        >>> from scale_core.testing import faults
        >>> candidates = [faults.kill_at("all_gather", rank=0, step=1), faults.stop_at("all_reduce", rank=0, step=1)]
        >>> fault = faults.draw(random.Random(1), candidates, num_ranks=2, steps=range(1, 10))
        >>> fault == faults.draw(random.Random(1), candidates, num_ranks=2, steps=range(1, 10))
        True

    See also: [faults](../internals/faults.md).
    """
    chosen = asdict(generator.choice(candidates))
    return Fault(**{**chosen, "rank": generator.randrange(num_ranks), "step": generator.choice(steps)})


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Switches faults on in this process while the context lasts, in place of others that are.

    Examples:
        >>> from scale_core.testing import faults
        >>> with faults.inject(faults.kill_at("all_gather", rank=1, step=3)):
        ...     pass  # your loop, on every rank

    See also: [faults](../internals/faults.md).
    """
    before = fault_points.active
    injector = _Injector(faults)
    fault_points.active = injector
    try:
        yield
    finally:
        injector.remove()
        fault_points.active = before


def to_environment(*faults: Fault) -> dict[str, str]:
    """Returns the environment variable that switches these faults on in a program and in all that it starts.

    Examples:
        >>> from scale_core.testing import faults
        >>> list(faults.to_environment(faults.kill_at("all_gather", rank=1, step=3)))  # for a program started elsewhere
        ['SCALE_FAULTS']

    See also: [faults](../internals/faults.md).
    """
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


def inject_from_environment() -> None:
    """Switches on, for good, what `to_environment` has said; a program's first point does so by itself.

    Raises:
        ValueError: The variable has no list of faults as `to_environment` writes it.

    Examples:
        >>> from scale_core.testing import faults
        >>> faults.inject_from_environment()  # SCALE_FAULTS is not set: no faults

    See also: [faults](../internals/faults.md).
    """
    if isinstance(fault_points.active, _Injector):
        return
    text = os.environ.get(VARIABLE, "[]")
    try:
        faults = [Fault(**entry) for entry in json.loads(text)]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}={text[:200]} is not a list of faults ({error}): write what faults.to_environment(...) returns"
        ) from error
    fault_points.active = _Injector(faults) if faults else None


@checked_arguments
def begin_step(step: int) -> None:
    """Says which step begins, from 1: for a loop that resumes, or in which a save belongs to the step before it.

    From its first call on, steps of optimizers are not counted.

    Examples:
        >>> from scale_core.testing import faults
        >>> faults.begin_step(100)  # in a loop that resumes at step 100

    See also: [faults](../internals/faults.md).
    """
    if fault_points.active is not None:
        inject_from_environment()
    if isinstance(fault_points.active, _Injector):
        fault_points.active.is_told = True
        fault_points.active.begin(step)


def reach(point: str, detail: str = "") -> None:
    """A point of a program's own: "user.validation".

    Examples:
        >>> from scale_core.testing import faults
        >>> faults.reach("user.validation")  # a point of your own

    See also: [faults](../internals/faults.md).
    """
    if fault_points.active is not None:
        fault_points.active(point, detail)


class _Injector:
    """The faults of this process, and which step it is in."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._waiting = dict.fromkeys(faults, 0)  # How often each has been where it might have happened
        self._step = 1
        self.is_told = False  # by `begin_step`
        self._outermost: torch.optim.Optimizer | None = None
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def begin(self, step: int) -> None:
        self._step = step
        for fault in self._waiting:
            if fault.step is not None:
                self._waiting[fault] = 0

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __call__(self, point: str, detail: str) -> None:
        if not self._waiting:
            return
        during = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or 0)
        for fault in list(self._waiting):
            if (
                fault.point == point
                and fault.rank == rank
                and fault.step in (None, self._step)
                and fault.during in (None, during)
                and fault.detail in detail
                and fault.attempt in (None, attempt)
            ):
                self._waiting[fault] += 1
                if self._waiting[fault] == fault.occurrence:
                    del self._waiting[fault]
                    _happen(fault)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost is None or self._outermost is optimizer:
            self._outermost = optimizer
            self("optimizer.step", type(optimizer).__name__)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost is optimizer:
            self._outermost = None
            self("optimizer.stepped", type(optimizer).__name__)
            if not self.is_told:
                self.begin(self._step + 1)


def _happen(fault: Fault) -> None:
    print(f"injected fault: {fault}", file=sys.stderr, flush=True)
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise InjectedError(fault.text)
