"""What comes of calls with shards among their arguments, beside the same calls with the full tensors.

An outcome is right if it equals the one of the full tensors, in its results, in what it changed, and in the memory that
these share; or if it is an error of this library, of all ranks alike. Everything else is a fault.
"""

from __future__ import annotations

import enum
import itertools
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from operator_calls import Call, calls_beside_dispatch, calls_of_overrides, calls_of_table, is_inexact
from operator_layouts import LAYOUTS, Axes, even_elements, sharded
from torch import Tensor
from torch.utils._pytree import tree_flatten

from scale_core.comm.group import group_of
from scale_core.errors import ScaleDistributedError, ScaleError
from scale_core.shard import Shard
from scale_core.sharded_tensor.tensor import ShardedParameter, ShardedTensor, is_sharded
from scale_core.testing import run_ranks

HANG_SECONDS = 20.0


class Outcome(enum.IntEnum):
    """What came of a call with shards."""

    EQUAL = 0
    ERROR = 1  # Of this library, or torch's own where the full tensors have one as well
    SKIPPED = 2  # No such shard, or a result that can't be compared
    UNCLEAR = 3  # An error of somebody else, where the full tensors have none
    SILENT = 4
    LATE = 5  # This rank waited for the others in vain


RIGHT = (Outcome.EQUAL, Outcome.ERROR, Outcome.SKIPPED)


@dataclass
class Finding:
    """A call whose outcome is a fault: on some rank it is silent or unclear, or the ranks have different ones."""

    call: str
    layout: str
    sharded: str  # Which of its arguments
    outcomes: list[str]  # By rank
    text: str

    def __str__(self) -> str:
        return f"{self.call}, {self.sharded} sharded as {self.layout}: {', '.join(self.outcomes)}: {self.text}"


@dataclass
class Report:
    """What came of many calls."""

    num_equal: int = 0
    num_errors: int = 0
    findings: list[Finding] = field(default_factory=list)
    equal_entries: set[str] = field(default_factory=set)
    cpu_seconds: float = 0.0
    hung_at: int | None = None  # The number of the entry in which ranks waited for each other in vain

    def add(self, other: Report) -> None:
        self.num_equal += other.num_equal
        self.num_errors += other.num_errors
        self.findings += other.findings
        self.equal_entries |= other.equal_entries
        self.cpu_seconds += other.cpu_seconds


class Difference(Exception):
    """A result that is another than that of the full tensors."""


def to_full(value: Any) -> Any:
    return value.full_tensor() if is_sharded(value) else value


def check_same(result: Any, expected: Any, what: str, *, has_values: bool = True) -> None:
    """Raises `Difference` unless both are the same, shards taken for the full tensors of all ranks."""
    if isinstance(expected, Tensor):
        if not isinstance(result, Tensor):
            raise Difference(f"{what}: a {type(result).__name__} for a tensor")
        full = to_full(result)
        if full.shape != expected.shape:
            raise Difference(f"{what}: shape {[*full.shape]} for {[*expected.shape]}")
        if tuple(result.shape) != tuple(expected.shape):
            raise Difference(f"{what}: says that its shape is {[*result.shape]}, not {[*expected.shape]}")
        if full.dtype != expected.dtype:
            raise Difference(f"{what}: {full.dtype} for {expected.dtype}")
        if not has_values or expected.layout is not torch.strided:
            return
        same = (
            torch.allclose(full, expected, 1e-9, 1e-12, equal_nan=True)
            if is_inexact(expected)
            else full.equal(expected)
        )
        if not same:
            raise Difference(f"{what}: values differ")
    elif isinstance(expected, list | tuple):
        if not isinstance(result, list | tuple) or len(result) != len(expected):
            raise Difference(f"{what}: {type(result).__name__} for {len(expected)} values")
        for number, (part, expected_part) in enumerate(zip(result, expected, strict=True)):
            check_same(part, expected_part, f"{what}[{number}]", has_values=has_values)
    elif isinstance(expected, np.ndarray | np.generic):
        if not isinstance(result, np.ndarray | np.generic) or not np.allclose(result, expected, equal_nan=True):
            raise Difference(f"{what}: another array")
    elif isinstance(expected, float | complex) and not isinstance(expected, bool):
        if not isinstance(result, float | complex | int) or not np.isclose(
            result, expected, 1e-9, 1e-12, equal_nan=True
        ):
            raise Difference(f"{what}: {result} for {expected}")
    elif isinstance(expected, bool | int | str | bytes | torch.dtype | torch.device | torch.layout | None):
        if result != expected or isinstance(result, Tensor):
            raise Difference(f"{what}: {result!r:.60} for {expected!r:.60}")
    else:
        raise _NotComparableError(type(expected).__name__)


class _NotComparableError(Exception):
    pass


def is_clear(error: BaseException) -> bool:
    """Whether an error is one of ours: of our tree, or raised by a statement of our code, not by what it called."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ScaleError) or (
        "/scale_core/" in frame.filename and (frame.line or "").startswith("raise ")
    )


def _is_late(error: BaseException) -> bool:
    return isinstance(error, ScaleDistributedError) or "Timed out" in str(error) or "Connection closed" in str(error)


def outcome_of(call: Call, shards: dict[int, Shard], shard_class: type[Tensor]) -> tuple[Outcome, str]:
    """Makes one call with full tensors, and again with some of them as shards."""
    try:
        expected, expected_args = call.run(lambda _, tensor: tensor.detach().clone())
        expected_error = None
    except Exception as error:
        expected_error, expected, expected_args = error, None, []
    try:
        result, args = call.run(
            lambda number, tensor: (
                sharded(tensor, shards[number], shard_class) if number in shards else tensor.detach().clone()
            )
        )
    except Exception as error:
        if _is_late(error):
            return Outcome.LATE, f"{type(error).__name__}: {error}"
        if is_clear(error) or expected_error is not None:
            return Outcome.ERROR, f"{type(error).__name__}: {error}"
        return Outcome.UNCLEAR, f"{type(error).__name__}: {error}"
    if expected_error is not None:
        return Outcome.SILENT, f"no error, where full tensors have {type(expected_error).__name__}: {expected_error}"
    try:
        check_same(result, expected, "result", has_values=call.has_values)
        check_arguments(call, args, expected_args, "after the call")
        return check_memory(call, result, args, expected, expected_args)
    except Difference as error:
        return Outcome.SILENT, str(error)
    except _NotComparableError as error:
        return Outcome.SKIPPED, f"a {error}"
    except Exception as error:
        if _is_late(error):
            return Outcome.LATE, f"{type(error).__name__}: {error}"
        return Outcome.UNCLEAR, f"when compared: {type(error).__name__}: {error}"


def check_arguments(call: Call, args: Sequence[Any], expected_args: Sequence[Any], when: str) -> None:
    for number, (argument, expected) in enumerate(zip(args, expected_args, strict=True)):
        if isinstance(expected, Tensor):
            has_values = call.has_values or number not in call.outs
            check_same(argument, expected, f"argument {number} {when}", has_values=has_values)


def first_tensor(value: Any) -> Tensor | None:
    leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return next((leaf for leaf in leaves if leaf.layout is torch.strided and is_inexact(leaf)), None)


def check_memory(
    call: Call, result: Any, args: Sequence[Any], expected: Any, expected_args: Sequence[Any]
) -> tuple[Outcome, str]:
    """Writes to the result, and compares what that does to the arguments: a view stays one, a copy stays one."""
    expected_target, target = first_tensor(expected), first_tensor(result)
    if expected_target is None or target is None or not call.has_values or not expected_target.numel():
        return Outcome.EQUAL, ""
    try:
        with torch.no_grad():
            expected_target.mul_(2)
    except RuntimeError:  # As of memory that a view shows several times.
        return Outcome.EQUAL, ""
    try:
        with torch.no_grad():
            target.mul_(2)
    except Exception as error:
        return (Outcome.ERROR if is_clear(error) else Outcome.UNCLEAR), f"writing to the result: {error}"
    check_arguments(call, args, expected_args, "after the result was written to")
    return Outcome.EQUAL, ""


# The ranks.


@dataclass(frozen=True)
class Plan:
    """Which calls are made.

    Attributes:
        sources: Names of torch's tables, "overrides", or "beside dispatch".
        samples: At most so many samples of an entry.
        layouts: How many layouts each call is made with; which ones goes in turn.
        every_argument: Whether each argument, and all of them, are sharded one after another; otherwise one such
            choice in turn.
        every: One entry of so many.
        only: The names of the entries; empty is all.
        as_plain: Whether the local parts are plain tensors, to see that this does not pass.
    """

    sources: tuple[str, ...]
    samples: int = 1
    layouts: int = 1
    every_argument: bool = False
    every: int = 1
    only: tuple[str, ...] = ()
    as_plain: bool = False

    def entries(self) -> Iterator[tuple[int, str, Iterator[Call]]]:
        """Yields the number of each entry, its name and its calls."""
        for number, (name, calls) in enumerate(itertools.chain.from_iterable(map(self._calls_of, self.sources))):
            if number % self.every == 0 and (not self.only or name in self.only):
                yield number, name, calls

    def _calls_of(self, source: str) -> Iterator[tuple[str, Iterator[Call]]]:
        if source == "overrides":
            return calls_of_overrides(self.samples)
        return calls_beside_dispatch() if source == "beside dispatch" else calls_of_table(source, self.samples)


class Choice(NamedTuple):
    """Which arguments of a call are sharded."""

    title: str
    positions: tuple[int, ...]


def choices_of(call: Call) -> list[Choice]:
    """The first floating-point argument, each other one, all that are floating-point, and all."""
    tensors = call.tensors()
    inexact = [number for number in tensors if is_inexact(call.leaves[number])]
    first = (inexact or tensors)[:1]
    choices = [Choice("first tensor", tuple(first))] if first else []
    choices += [Choice(f"argument {number}", (number,)) for number in tensors if [number] != first]
    if len(inexact) > 1:
        choices.append(Choice("floating-point tensors", tuple(inexact)))
    if len(tensors) > 1 and tensors != inexact:
        choices.append(Choice("all tensors", tuple(tensors)))
    return choices


class Session:
    """The ranks of one run, which go from call to call together."""

    def __init__(self, plan: Plan) -> None:
        limit = timedelta(seconds=HANG_SECONDS)
        group: Any = dist.new_group(timeout=limit)
        size, rank = dist.get_world_size(), dist.get_rank()
        inner = outer = None
        if size == 4:
            pairs = [dist.new_group([*ranks], timeout=limit) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
            inner, outer = group_of(pairs[rank // 2]), group_of(pairs[2 + rank % 2])
        self.plan, self.axes, self.report = plan, Axes(group_of(group), inner, outer), Report()
        self.layouts = [name for name in LAYOUTS if LAYOUTS[name]((8, 8), self.axes) is not None]
        # Ranks that wait for others in vain have to come here before those that have been waiting here go.
        self.control: Any = dist.new_group(timeout=6 * limit)

    def check(self, name: str, call: Call, choice: Choice, turn: int) -> bool:
        """Makes a call on all ranks, and reports what came of it; returns whether they can go on together."""
        layout = self.layouts[turn % len(self.layouts)]
        shards = {}
        for position in choice.positions:
            shape = tuple(call.leaves[position].shape)
            shards[position] = LAYOUTS[layout](shape, self.axes) or even_elements(shape, self.axes)
        shard_class = Tensor if self.plan.as_plain else (ShardedTensor, ShardedParameter, ShardedParameter)[turn % 3]
        outcome, text = outcome_of(call, shards, shard_class)
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor([int(outcome)]), group=self.control)
        outcomes = {Outcome(int(value)) for value in gathered}
        report = self.report
        if outcomes == {Outcome.EQUAL}:
            report.num_equal += 1
            report.equal_entries.add(name)
        elif outcomes == {Outcome.ERROR}:
            report.num_errors += 1
        elif outcomes != {Outcome.SKIPPED}:
            texts: list[Any] = [""] * len(gathered)
            dist.all_gather_object(texts, text[:300], group=self.control)
            words = [Outcome(int(value)).name.lower() for value in gathered]
            report.findings.append(Finding(call.name, layout, choice.title, words, next(filter(None, texts), "")))
        return Outcome.LATE not in outcomes


def check_calls(plan: Plan, start: int) -> Report:
    """Makes the calls of a plan from an entry on, on all ranks; stops where ranks wait for each other in vain."""
    warnings.simplefilter("ignore")
    session, turn, began = Session(plan), start, time.process_time()
    for number, name, calls in plan.entries():
        if number < start:
            continue
        for call in calls:
            choices = choices_of(call)
            turn += 1
            if not plan.every_argument:
                choices = choices[turn % len(choices) :][:1] if choices else []
            for choice, offset in itertools.product(choices, range(plan.layouts)):
                if not session.check(name, call, choice, turn + offset):
                    session.report.hung_at = number
                    return session.report
    session.report.cpu_seconds = time.process_time() - began
    return session.report


def report_of(plan: Plan, num_ranks: int, hangs: int = 3) -> Report:
    """Makes the calls of a plan on so many ranks; after a hang it goes on behind the entry, with new ones."""
    report, start = Report(), 0
    for _ in range(hangs + 1):
        part = run_ranks(check_calls, num_ranks, plan, start, limit_seconds=3600)[0]
        report.add(part)
        if part.hung_at is None:
            break
        start = part.hung_at + 1
    return report
