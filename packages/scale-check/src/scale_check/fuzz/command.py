"""`scale-check fuzz`: draws programs, runs each with a library and in one process, and makes smaller what differs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_check.comparison import ParityVerdict, Report, compare
from scale_check.fuzz.pool import LIMIT_SECONDS, Outcome, kind_of, run_in_turn
from scale_check.fuzz.programs import Program, Run, program_of, smaller
from scale_check.harness import ParityProgram
from scale_check.recording import Recording

_SHRINK_AT_ONCE = 12  # Smaller programs that are run on one set of ranks.


@dataclass(frozen=True)
class FuzzFinding:
    """A program that does not compute what one process does.

    Attributes:
        program: The program, as small as it was made.
        kind: "different", "error" (all ranks have raised one), or "ended" (a rank hung, died or raised alone).
        text: The first difference, or the error.
        report: Of one that is different.
    """

    program: Program
    kind: str
    text: str
    report: Report | None = None

    @property
    def cause(self) -> str:
        """What findings of one cause have in common: the error, or what the smallest program does."""
        if self.report is None:
            return f"{self.kind}: {kind_of(self.text)}"
        program = self.program
        parts = (program.model.blocks, program.units and "units", program.optimizer, program.groups, program.steps)
        return f"{self.kind}: {parts}"

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON knows it."""
        report = None if self.report is None else self.report.to_json()
        return {"program": repr(self.program), "kind": self.kind, "text": self.text, "report": report}


@dataclass(frozen=True)
class FuzzSummary:
    """What a number of programs have come to."""

    num_programs: int
    findings: tuple[FuzzFinding, ...]

    def count(self, kind: str) -> int:
        """How many programs are of a kind of finding."""
        return sum(finding.kind == kind for finding in self.findings)

    @property
    def is_right(self) -> bool:
        """Whether no program has computed anything else, hung or ended; errors are no wrong numbers."""
        return not self.count("different") and not self.count("ended")

    def __str__(self) -> str:
        num_right = self.num_programs - len(self.findings)
        lines = [
            f"{self.num_programs} programs: {num_right} compute what one process does, {self.count('different')} do "
            f"not, {self.count('error')} raise an error, {self.count('ended')} hang, die, or raise on some ranks only"
        ]
        causes = Counter(finding.cause for finding in self.findings)
        lines += [f"  {count} times {cause}" for cause, count in causes.most_common()]
        return "\n".join(lines)


def fuzz(
    engine: str,
    seeds: Sequence[int],
    ranks: int,
    *,
    shrinks: bool = True,
    tell: Callable[[FuzzFinding], object] = lambda finding: None,
) -> FuzzSummary:
    """Runs the programs of some seeds with a library.

    `tell` is called with the first finding of each cause, as soon as it is there.
    """
    os.environ.setdefault("SCALE_LIMIT_SECONDS", str(LIMIT_SECONDS / 4))  # Our libraries say then why they wait.
    findings: list[FuzzFinding] = []
    causes: set[str] = set()
    for finding in _findings([program_of(engine, seed) for seed in seeds], ranks):
        smallest = _shrunk(finding, ranks) if shrinks and finding.kind == "different" else finding
        findings.append(smallest)
        if smallest.cause not in causes:
            causes.add(smallest.cause)
            tell(smallest)
    return FuzzSummary(len(seeds), tuple(findings))


def _findings(programs: Sequence[Program], ranks: int) -> Iterator[FuzzFinding]:
    for outcome in run_in_turn(_run_on_rank, programs, ranks):
        if (finding := _finding(outcome, ranks)) is not None:
            yield finding


def _finding(outcome: Outcome[Program, Recording], ranks: int) -> FuzzFinding | None:
    program = outcome.program
    if outcome.failure:
        return FuzzFinding(program, "error" if outcome.is_clean else "ended", outcome.failure)
    plain, rounding = _parity_program(program, ranks).measure()
    report = compare(plain, outcome.results, rounding)
    return FuzzFinding(program, "different", str(report), report) if report.verdict is ParityVerdict.BUG else None


def _parity_program(program: Program, ranks: int) -> ParityProgram:
    run = Run(program)
    return ParityProgram(
        run.build, run.step, run.wrap, run.optimizer, tuple(run.batches(ranks)), "split", None, program.seed
    )


def _run_on_rank(program: Program, folder: Path) -> Recording:
    import torch.distributed as dist

    return _parity_program(program, dist.get_world_size()).run_on_rank()


def _shrunk(finding: FuzzFinding, ranks: int) -> FuzzFinding:
    """The smallest program that is found to differ likewise, by leaving out one thing after the other."""
    while True:
        candidates = list(smaller(finding.program))
        for start in range(0, len(candidates), _SHRINK_AT_ONCE):
            others = _findings(candidates[start : start + _SHRINK_AT_ONCE], ranks)
            smallest = next((other for other in others if other.kind == finding.kind), None)
            if smallest is not None:
                finding = smallest
                break
        else:
            return finding
