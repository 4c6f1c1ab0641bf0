"""Runs many programs on one set of ranks, since ranks take longer to start than a program takes to run.

A program that fails, hangs or ends a rank ends its set; the rest goes on with a fresh one.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from scale_core.comm.collectives import exchange_text
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks

LIMIT_SECONDS = 90.0
"""For one program, as generous as a machine with other work needs; programs take some tenths of a second."""

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Outcome(Generic[P, R]):
    """What a program has come to.

    Attributes:
        program: The program.
        results: Of each rank; empty where it failed.
        failure: What ranks have raised, equal messages once; or how they ended.
        is_clean: All ranks have raised an error, and none had to be ended.
    """

    program: P
    results: tuple[R, ...] = ()
    failure: str = ""
    is_clean: bool = False


def run_in_turn(call: Callable[[P, Path], R], programs: Sequence[P], ranks: int) -> Iterator[Outcome[P, R]]:
    """Calls `call(program, folder)` on each rank for one program after the other, and yields what each comes to.

    `call` is at the top level of a module; the folder, which is not there yet, is one for all ranks.
    """
    remaining = list(programs)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="programs-") as folder:
            reached = Path(folder, "number")
            limit = LIMIT_SECONDS * (len(remaining) + 2)
            try:
                by_rank = run_ranks(_run_on_rank, ranks, call, remaining, reached, limit_seconds=limit)
            except Exception as error:
                number = int(reached.read_text()) if reached.exists() else 0
                error_text = "\n".join([repr(error), *getattr(error, "__notes__", [])])
                yield from run_in_turn(call, remaining[:number], ranks)  # Their results have gone with the ranks.
                yield Outcome(remaining[number], failure=error_text)
                remaining = remaining[number + 1 :]
                continue
        for program, outcomes in zip(remaining, zip(*by_rank, strict=True), strict=False):
            yield _joined(program, outcomes)
        remaining = remaining[len(by_rank[0]) :]


def _run_on_rank(call: Callable[[P, Path], R], programs: Sequence[P], reached: Path) -> list[tuple[R | None, str]]:
    """Runs programs until one fails; returns of each what it gives, and its error."""
    outcomes: list[tuple[R | None, str]] = []
    control_group = group_of(
        dist.new_group(backend="gloo")
    )  # What a program breaks must not keep the ranks from agreeing.
    for number, program in enumerate(programs):
        if dist.get_rank() == 0:
            reached.write_text(str(number))
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        result, error = _call(call, program, reached.with_name(str(number)))
        errors = exchange_text(error, control_group, limit_seconds=LIMIT_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        outcomes.append((result, error))
        if any(errors):
            break
    return outcomes


def _call(call: Callable[[P, Path], R], program: P, folder: Path) -> tuple[R | None, str]:
    try:
        return call(program, folder), ""
    except Exception as error:
        text = "".join(traceback.format_exception(error, chain=False, limit=-4))
        print(f"{program}: {text}", file=sys.stderr, flush=True)  # In case that others wait until they are ended.
        return None, text
    finally:
        torch.set_grad_enabled(True)


def _joined(program: P, outcomes: Sequence[tuple[R | None, str]]) -> Outcome[P, R]:
    errors = {rank: error for rank, (_, error) in enumerate(outcomes) if error}
    if not errors:
        return Outcome(program, tuple(cast(R, result) for result, _ in outcomes))
    by_kind: dict[str, str] = {}
    for rank, error in errors.items():
        by_kind.setdefault(kind_of(error), f"rank {rank}: {error}")
    return Outcome(program, failure="\n".join(by_kind.values()), is_clean=len(errors) == len(outcomes))


def kind_of(text: str) -> str:
    """What failures of one cause have in common: the exception, or what differs, without names and numbers."""
    errors = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception|Warning|Boom)\b.*)", text, re.MULTILINE)
    line = errors[-1] if errors else text.splitlines()[0]
    line = re.sub(r"^rank \d+: |step \d+, |/tmp/\S+", "", line.split(" off by ")[0])
    return re.sub(r"'[^']*'|\d+(\.\d+)*|(\bmodel\.|\bstage_0\.)*\b(entry|blocks|exit)\S*", "#", line)[:150]
