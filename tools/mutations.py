"""Which changes of the source no test notices: mutations, one at a time, in a copy of the tree.

    python tools/mutations.py --package scale-core --count 100     # a sample; some hours
    python tools/mutations.py --package scale-core --files "flat.*" --seed 1
    python tools/mutations.py --package scale-core --list          # the sample, without running it
    python tools/mutations.py --smoke                              # one change, and the tests of one file
    python tools/mutations.py ... --date 2026-11-22                # also writes benchmarks/results/

A mutation flips a comparison, swaps + and -, takes a condition for true or false, leaves out a statement that is a
call, leaves out a `wait()`, or moves a bound of a slice by one. What only makes the text of an error, a representation
or a type is left as it is. The sample is drawn by `--seed`, evenly over all places of the package's source.

First all tests of the package run once, unchanged, and it is recorded which of them pass, how long each takes and which
places of the sample it reaches, in all of its ranks (`--recording` ends that earlier; what no test has reached by then
is not tried). With `--recording 0` nothing is recorded, as on a machine with much other work: the tests that are named
for a file and those of the three test files that name most often what it defines are taken for those that reach its
places, each for a second long. For each mutation the tests run that reach its place, those first that are named for its
file, then the others, each set until its first failure. Of each set as many run as take `--set-seconds` when nothing is
changed, one case of each test before the second cases. A set that takes eight times as long as without a change, and a
minute, counts as a failure, since a rank that waits for ever is what a wrong change often makes. A mutation that no set
notices is a survivor: it is printed with its line and the numbers of tests that ran and that reach it, and either gets
a test or is argued away. `--keep` keeps the record and what has become of each mutation, to go on later; the mutations
are tried in an order of chance, so that a part of the sample is a sample, too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import accumulate
from math import inf
from pathlib import Path
from queue import Queue
from random import Random

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from report import Table, save

ROOT = Path(__file__).parent.parent
FLIPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SWAPPED: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*"}
NO_BEHAVIOUR = re.compile(r"__(repr|str|init_subclass|dir)__|_?(describe|word|line|text|message|note)s?\b.*")
"""Functions that make text alone."""
NOT_STEPS = {"__init__", "compat", "ranks", "rank", "microbatch_grads"}
"""Files that are no part of a step: lists of names, versions of torch, what tests stand on."""
OF_FILE, OTHERS = "tests of the file", "other tests"


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        path: The file, relative to the repository.
        line: Where it stands, from 1.
        start: Where it begins in the file, in characters.
        before: What stands there.
        after: What is to stand there.
        kind: What sort of change it is.
        source: The line, or the lines, as they are.
    """

    path: str
    line: int
    start: int
    before: str
    after: str
    kind: str
    source: str

    def applied(self, text: str) -> str:
        """The text of the file with the change."""
        return text[: self.start] + self.after + text[self.start + len(self.before) :]

    def __str__(self) -> str:
        short = [" ".join(each.split()) for each in (self.before, self.after)]
        return f"{self.path.split('/src/')[1]}:{self.line}: {short[0]}  ->  {short[1]}   in   {self.source}"


class _Finder(ast.NodeVisitor):
    """All mutations of a file."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        lines = text.splitlines(keepends=True)
        self.begins = [0]
        for line in lines:
            self.begins.append(self.begins[-1] + len(line))
        self.lines = lines
        self.found: list[Mutation] = []

    def _at(self, line: int, column: int) -> int:
        """A place of the syntax tree, which counts bytes, in characters of the text."""
        return self.begins[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _source(self, node: ast.expr | ast.stmt) -> tuple[int, str]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._at(node.lineno, node.col_offset)
        return start, self.text[start : self._at(node.end_lineno, node.end_col_offset)]

    def _add(self, node: ast.expr | ast.stmt, after: str, kind: str) -> None:
        start, before = self._source(node)
        self._found(node.lineno, start, before, after, kind)

    def _found(self, line: int, start: int, before: str, after: str, kind: str) -> None:
        self.found.append(Mutation(self.path, line, start, before, after, kind, self.lines[line - 1].strip()))

    def _between(self, left: ast.expr, right: ast.expr, after: str, kind: str) -> None:
        """Changes the operator between two expressions."""
        first, text = self._source(left)
        start, end = first + len(text), self._source(right)[0]
        operator = re.search(r"(not\s+in|is\s+not|is|in|and|or|[<>=!]=?|//|[-+*])", self.text[start:end])
        if operator is not None:
            self._found(left.lineno, start + operator.start(), operator.group(), after, kind)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # ast's name
        if not NO_BEHAVIOUR.fullmatch(node.name):
            for statement in node.body:  # Neither decorators nor defaults nor types.
                self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Its text is for people."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Says what holds anyway."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text."""

    def visit_If(self, node: ast.If) -> None:
        source = self._source(node.test)[1]
        if "TYPE_CHECKING" not in source and "__main__" not in source:
            for value in ("True", "False"):
                self._add(node.test, value, "condition")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        for value in ("True", "False"):
            self._add(node.test, value, "condition")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._between(node.left, node.comparators[0], FLIPPED[type(node.ops[0])], "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(each, ast.Constant | ast.JoinedStr) and not _is_number(each) for each in _sides(node))
        if type(node.op) in SWAPPED and not texts:
            self._between(node.left, node.right, SWAPPED[type(node.op)], "arithmetic")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub) and not isinstance(node.value, ast.List | ast.JoinedStr):
            self._between(node.target, node.value, "-" if isinstance(node.op, ast.Add) else "+", "arithmetic")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "pass", "call left out")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "wait" and not node.args:
            self._add(node, self._source(node.func.value)[1], "wait left out")
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self._add(bound, f"({self._source(bound)[1]}) + 1", "slice")
        self.generic_visit(node)


def _sides(node: ast.BinOp) -> tuple[ast.expr, ast.expr]:
    return node.left, node.right


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def mutations_of(path: Path) -> list[Mutation]:
    """All mutations of a file that still are Python, in the order of the file."""
    text = path.read_text(encoding="utf-8")
    finder = _Finder(str(path.relative_to(ROOT)), text)
    finder.visit(ast.parse(text))
    kept = []
    for mutation in finder.found:
        try:
            ast.parse(mutation.applied(text))
        except SyntaxError:
            continue
        if mutation.before != mutation.after:
            kept.append(mutation)
    return kept


def sample(package: str, files: str, count: int, seed: int) -> list[Mutation]:
    """So many mutations of a package, drawn by a seed, in the order of the files."""
    home = ROOT / "packages" / package / "src"
    paths = [
        path
        for path in sorted(home.rglob("*.py"))
        if path.stem not in NOT_STEPS and fnmatch(path.relative_to(home / package.replace("-", "_")).as_posix(), files)
    ]
    found = [mutation for path in paths for mutation in mutations_of(path)]
    chosen = Random(f"{package} {seed}").sample(found, min(count, len(found)))
    return sorted(chosen, key=lambda mutation: (mutation.path, mutation.start))


def marked(text: str, places: Mapping[int, int]) -> str:
    """The text of a file in which a statement reports, by its number, that the one with a change is about to run.

    Args:
        text: The file's.
        places: Where each change begins, in characters, by its number.
    """
    lines = text.splitlines(keepends=True)
    begins = list(accumulate(map(len, lines), initial=0))
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    reports: dict[int, str] = {}
    for number, start in places.items():
        line = bisect_right(begins, start)
        for node in reversed(statements):  # The innermost last.
            indent = lines[node.lineno - 1][: node.col_offset]
            begins_line = not indent.strip() and not lines[node.lineno - 1].startswith("elif", node.col_offset)
            if node.lineno <= line <= (node.end_lineno or node.lineno) and begins_line:
                report = f'{indent}__import__("reached").reached({number})\n'
                reports[node.lineno] = reports.get(node.lineno, "") + report
                break
    return "".join(reports.get(number, "") + line for number, line in enumerate(lines, 1))


@dataclass(frozen=True)
class Record:
    """Which tests reach which changes: those that have passed without a change.

    Attributes:
        sample: What was recorded.
        seconds: How long each test took.
        reached: For each change the tests that come to its place.
        complete: Whether all tests have run.
    """

    sample: list[str]
    seconds: dict[str, float]
    reached: list[list[str]]
    complete: bool = True

    def sets_of(self, number: int, mutation: Mutation, seconds: float) -> dict[str, list[str]]:
        """The tests that may notice a change, those of its file first; of each set as many as so many seconds hold.

        Within a set one case of each test comes first, then the second cases, the fast ones before the slow ones.
        """
        seen: Counter[str] = Counter()
        ordered = []
        for test in sorted(self.reached[number], key=self.seconds.__getitem__):
            function = test.partition("[")[0]
            ordered.append((seen[function], self.seconds[test], test))
            seen[function] += 1
        sets: dict[str, list[str]] = {OF_FILE: [], OTHERS: []}
        left = dict.fromkeys(sets, seconds)
        for _, takes, test in sorted(ordered):
            own = Path(test.partition("::")[0]).stem.endswith(f"_{Path(mutation.path).stem}")
            words = OF_FILE if own else OTHERS
            if left[words] > 0:
                sets[words].append(test)
                left[words] -= takes
        return {words: tests for words, tests in sets.items() if tests}


@dataclass(frozen=True)
class Outcome:
    """What has become of a mutation.

    Attributes:
        mutation: The change.
        noticed_by: The set of tests that failed, or None.
        seconds: How long that took.
        ran: How many tests were to run.
        reaching: How many tests come to its place.
    """

    mutation: Mutation
    noticed_by: str | None
    seconds: float
    ran: int
    reaching: int

    def __str__(self) -> str:
        tests = f"{self.ran}/{self.reaching} tests"
        return f"{self.noticed_by or 'SURVIVED':17} {self.seconds:6.1f} s {tests:>14}  {self.mutation}"


class Copy:
    """A copy of the tree, in which files are changed and tests run.

    Args:
        folder: Where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        leave_out = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info", "dist")
        for name in ("packages", "tests/shared"):
            shutil.copytree(ROOT / name, folder / name, ignore=leave_out)
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / name, folder)
        (folder / "docs" / "guides").mkdir(parents=True)
        for path in (ROOT / "docs" / "guides").glob("*.py"):
            shutil.copy(path, folder / "docs" / "guides")
        sources = sorted(str(path) for path in folder.glob("packages/*/src"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*sources, str(Path(__file__).parent)]),
            "PYTHONDONTWRITEBYTECODE": "",  # What is not changed is compiled once.
            "OMP_NUM_THREADS": "1",
        }

    def record(self, chosen: Sequence[Mutation], tests: str, *, workers: int, seconds: float) -> Record:
        """Runs the tests of a package, unchanged, for so many seconds, and writes down what they reach."""
        texts = {path: path.read_text(encoding="utf-8") for path in {self.folder / each.path for each in chosen}}
        for path, text in texts.items():
            places = {number: each.start for number, each in enumerate(chosen) if self.folder / each.path == path}
            path.write_text(marked(text, places), encoding="utf-8")
        notes = self.folder / "reached.txt"
        package = chosen[0].path.split("/")[1]
        files = sorted(str(path) for path in (self.folder / "packages" / package / "tests").rglob(tests))
        several = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        # Tests that fail without a change are none that notice one.
        code = self._pytest("-p", "reached", *several, *files, seconds=seconds, MUTATIONS_REACHED=str(notes))
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        lines = [line.split("\t", 2) for line in notes.read_text(encoding="utf-8").splitlines()]
        seconds = {test: float(number) for what, number, test in lines if what == "passed"}
        reached: list[set[str]] = [set() for _ in chosen]
        for what, number, test in lines:
            if what == "reached" and test in seconds:
                reached[int(number)].add(test)
        return Record([str(each) for each in chosen], seconds, [sorted(each) for each in reached], code is not None)

    def select(self, chosen: Sequence[Mutation], tests: str) -> Record:
        """Guesses which tests reach a place, by names, and runs none."""
        package = self.folder / "packages" / chosen[0].path.split("/")[1]
        files = sorted((package / "tests").rglob(tests))
        texts = {str(path.relative_to(self.folder)): path.read_text(encoding="utf-8") for path in files}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *texts]
        collected = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if collected.returncode:  # Changes that only these tests notice would pass for survivors.
            raise RuntimeError(f"tests of {package.name} could not be collected:\n{collected.stdout[-3000:]}")
        found = [line for line in collected.stdout.splitlines() if "::" in line]
        reached = []
        for each in chosen:
            body = ast.parse((self.folder / each.path).read_text(encoding="utf-8")).body
            defined = "|".join(node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))
            named = {path: len(re.findall(rf"\b({defined})\b", text)) for path, text in texts.items()}
            most = sorted((path for path in texts if defined and named[path]), key=named.__getitem__, reverse=True)[:3]
            own = [path for path in texts if Path(path).stem.endswith(f"_{Path(each.path).stem}")]
            reached.append([test for test in found if test.partition("::")[0] in (*own, *most)])
        return Record([str(each) for each in chosen], dict.fromkeys(found, 1.0), reached, complete=False)

    def result_of(self, tests: Sequence[str], limit: float) -> str:
        """What comes of these tests: "passed", "failed", or "limit" where they do not end in so many seconds."""
        code = self._pytest("-x", *tests, seconds=limit)
        return "limit" if code is None else "failed" if code else "passed"

    def _pytest(self, *arguments: str, seconds: float, **environment: str) -> int | None:
        """Runs pytest, and ends all of it when the time is up; returns its code, or None where it was ended."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def try_one(self, mutation: Mutation, sets: Mapping[str, Sequence[str]], seconds: Mapping[str, float]) -> Outcome:
        """Changes a file, runs its tests, and changes it back.

        Args:
            mutation: The change.
            sets: The tests.
            seconds: How long all tests that reach it take unchanged.
        """
        path, began = self.folder / mutation.path, time.monotonic()
        text, noticed = path.read_text(encoding="utf-8"), None
        path.write_text(mutation.applied(text), encoding="utf-8")
        try:
            for words, tests in sets.items():
                result = self.result_of(tests, 60 + 8 * sum(seconds[test] for test in tests))
                if result != "passed":
                    noticed = f"{words}, by their limit" if result == "limit" else words
                    break
        finally:
            path.write_text(text, encoding="utf-8")
        return Outcome(mutation, noticed, time.monotonic() - began, sum(map(len, sets.values())), len(seconds))


def outcomes_of(
    chosen: Sequence[Mutation],
    folder: Path,
    tests: str,
    *,
    set_seconds: float,
    num_sets: int,
    workers: int,
    seconds: float,
    recording: float,
) -> list[Outcome]:
    """Tries mutations, several at a time and in any order, and returns what has become of them so far, in order.

    Args:
        chosen: The mutations.
        folder: Where the record and the outcomes are kept; what is there already is not done again.
        tests: A pattern for the names of test files.
        set_seconds: How long the tests of one set may take unchanged.
        num_sets: How many sets.
        workers: How many mutations at a time.
        seconds: After how many no other mutation is begun.
        recording: After how many the recording ends; 0 to guess which tests reach a place.

    Raises:
        ValueError: The record is of another sample.
    """
    until, recorded, kept = time.monotonic() + seconds, folder / "record.json", folder / "outcomes.jsonl"
    with tempfile.TemporaryDirectory(prefix="mutations-") as home, ThreadPoolExecutor(workers) as threads:
        copies = Queue[Copy]()
        for number in range(workers):
            copies.put(Copy(Path(home, str(number))))
        if not recorded.exists():
            copy = copies.queue[0]
            limits = {"workers": workers, "seconds": recording}
            record = copy.record(chosen, tests, **limits) if recording else copy.select(chosen, tests)
            recorded.write_text(json.dumps(asdict(record)), encoding="utf-8")
        record = Record(**json.loads(recorded.read_text(encoding="utf-8")))
        if record.sample != [str(each) for each in chosen]:
            raise ValueError(f"{recorded} is of another sample or of another source: delete it, or give another --keep")

        def try_one(number: int) -> Outcome | None:
            if time.monotonic() > until:
                return None
            sets = dict(list(record.sets_of(number, chosen[number], set_seconds).items())[:num_sets])
            copy = copies.get()
            try:
                return copy.try_one(
                    chosen[number], sets, {test: record.seconds[test] for test in record.reached[number]}
                )
            finally:
                copies.put(copy)

        lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
        known = {number: Outcome(chosen[number], *rest) for number, *rest in map(json.loads, lines)}
        tried = [number for number, each in enumerate(record.reached) if each or record.complete]
        left = [number for number in tried if number not in known]
        Random(0).shuffle(left)  # What is done in part of the time is a fair sample, too.
        tries = {threads.submit(try_one, number): number for number in left}
        for each in as_completed(tries):
            if (outcome := each.result()) is not None:
                known[tries[each]] = outcome
                line = [tries[each], outcome.noticed_by, outcome.seconds, outcome.ran, outcome.reaching]
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{tries[each]:3} {outcome}", flush=True)
    return [known[number] for number in sorted(known)]


def tables_of(outcomes: Sequence[Outcome]) -> list[Table]:
    """What was noticed, package by package, and what was not."""
    rows = []
    for package in sorted({outcome.mutation.path.split("/")[1] for outcome in outcomes}):
        own = [outcome for outcome in outcomes if outcome.mutation.path.split("/")[1] == package]
        noticed = [outcome for outcome in own if outcome.noticed_by]
        by_file = sum(outcome.noticed_by == OF_FILE for outcome in noticed)
        by_limit = sum((outcome.noticed_by or "").endswith("limit") for outcome in noticed)
        share = f"{len(noticed)} ({len(noticed) / len(own):.0%})"
        rows.append([package, str(len(own)), share, str(by_file), str(by_limit)])
    heads = ["package", "changes", "noticed", "by the tests of the file", "by a limit"]
    survivors = [
        [outcome.mutation.kind, f"{outcome.ran} of {outcome.reaching}", str(outcome.mutation).replace("|", "\\|")]
        for outcome in outcomes
        if not outcome.noticed_by
    ]
    return [
        Table("Changes and what noticed them", heads, rows),
        Table("Survivors", ["kind", "tests", "change"], survivors),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", default="scale-core", help="the distribution whose source is changed")
    parser.add_argument("--files", default="*", help="a pattern for paths below the package, such as 'state/*.py'")
    parser.add_argument("--count", type=int, default=50, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="which changes")
    parser.add_argument("--set-seconds", type=float, default=60.0, help="how long a set of tests may take unchanged")
    parser.add_argument("--sets", type=int, default=2, help="how many sets of tests: 1 is those of the file alone")
    parser.add_argument("--tests", default="test_*.py", help="a pattern for the names of test files")
    parser.add_argument("--keep", help="a folder for the record and the outcomes, to go on later")
    parser.add_argument("--seconds", type=float, default=inf, help="after how many no other change is begun")
    parser.add_argument("--recording", type=float, default=inf, help="after how many the recording ends; 0 for none")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="how many copies are worked on at a time")
    parser.add_argument("--list", action="store_true", help="print the sample and stop")
    parser.add_argument("--smoke", action="store_true", help="one change, and the tests of one file")
    parser.add_argument("--date", help="also write the results, under this date")
    given = parser.parse_args()
    if given.smoke:
        given.files, given.tests, given.count, given.sets, given.workers = "nested.py", "test_tree.py", 1, 1, 1
    chosen = sample(given.package, given.files, given.count, given.seed)
    if given.list:
        print(*chosen, sep="\n")
        return
    limits = {"set_seconds": given.set_seconds, "num_sets": given.sets, "workers": given.workers}
    times = {"seconds": given.seconds, "recording": given.recording}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        home = Path(given.keep or folder)
        home.mkdir(parents=True, exist_ok=True)
        outcomes = outcomes_of(chosen, home, given.tests, **limits, **times)
    tables = tables_of(outcomes)
    print(*(table.markdown() for table in tables), sep="\n")
    if given.date:
        figures = [{**asdict(outcome.mutation), "noticed_by": outcome.noticed_by} for outcome in outcomes]
        save(f"mutations-{given.package}", given.date, __doc__, tables, figures)


if __name__ == "__main__":
    main()
