"""Which changes of the source no test notices: mutations, one at a time, in a copy of the tree.

    python benchmarks/mutations.py --package scale-core --count 100     # a sample; some hours
    python benchmarks/mutations.py --package scale-core --files "flat.*" --seed 1
    python benchmarks/mutations.py --package scale-core --list          # the sample, without running it
    python benchmarks/mutations.py --smoke                              # one change, and the tests of one file
    python benchmarks/mutations.py ... --date 2026-11-22                # also writes results/ too

A mutation flips a comparison, swaps + and -, takes a condition for true or false, leaves out a statement that is a
call, leaves out a `wait()`, or moves a bound of a slice by one. What only makes the text of an error, a representation
or a type is left as it is. The sample is drawn by `--seed`, evenly over all places of the package's source.

For each the tests of its package run, those first that are named for its file, then those that name what the file
defines, then all others, each set until its first failure; a set that does not end within the limit counts as a
failure, since a rank that waits for ever is what a wrong change often makes. The first two sets are run without a
change before, and must pass. A mutation that no set notices is a survivor: it is printed with its line, and either gets
a test or is argued away.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random

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
NOT_STEPS = {"__init__", "compat", "testing", "testing_rank", "samples"}
"""Files that are no part of a step: lists of names, versions of torch, what tests stand on."""


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


@dataclass(frozen=True)
class Outcome:
    """What has become of a mutation; `noticed_by` is the set of tests that failed, or None."""

    mutation: Mutation
    noticed_by: str | None
    seconds: float


class Copy:
    """A copy of the tree, in which files are changed and tests run.

    Args:
        folder: Where it is made.
        limit_seconds: How long one set of tests may take.
    """

    def __init__(self, folder: Path, limit_seconds: float) -> None:
        self.folder, self.limit_seconds = folder, limit_seconds
        leave_out = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info", "dist")
        shutil.copytree(ROOT / "packages", folder / "packages", ignore=leave_out)
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / "docs" / "guides").mkdir(parents=True)
        for path in (ROOT / "docs" / "guides").glob("*.py"):
            shutil.copy(path, folder / "docs" / "guides")
        sources = sorted(str(path) for path in folder.glob("packages/*/src"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sources),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def sets_of(self, mutation: Mutation) -> dict[str, list[str]]:
        """The tests that may notice a mutation, those first that are most likely to."""
        package = mutation.path.split("/")[1]
        tests = sorted((self.folder / "packages" / package / "tests").rglob("test_*.py"))
        stem = Path(mutation.path).stem
        module = mutation.path.split("/src/")[1].removesuffix(".py").replace("/", ".")
        tree = ast.parse((self.folder / mutation.path).read_text(encoding="utf-8"))
        defined = [each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        names = re.compile(
            "|".join([rf"{re.escape(module)}\b", *(rf"\b{name}\b" for name in defined if name[0] != "_")])
        )
        named = [path for path in tests if path.stem.endswith(f"_{stem}")]
        naming = [path for path in tests if path not in named and names.search(path.read_text(encoding="utf-8"))]
        rest = [path for path in tests if path not in named and path not in naming]
        sets = {"tests of the file": named, "tests that name it": naming, "other tests": rest}
        return {words: [str(path) for path in paths] for words, paths in sets.items() if paths}

    def result_of(self, tests: Sequence[str]) -> str:
        """What comes of these tests: "passed", "failed", or "limit" where they do not end within it."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(self.limit_seconds)
            return "passed" if code in {0, 5} else "failed"  # 5: all were marked for other runs.
        except subprocess.TimeoutExpired:
            return "limit"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def try_one(self, mutation: Mutation, *, num_sets: int) -> Outcome:
        """Changes a file, runs its tests, and changes it back."""
        path, began = self.folder / mutation.path, time.monotonic()
        sets, text = self.sets_of(mutation), path.read_text(encoding="utf-8")
        path.write_text(mutation.applied(text), encoding="utf-8")
        try:
            for words in list(sets)[:num_sets]:
                result = self.result_of(sets[words])
                if result != "passed":
                    break
            else:
                words, result = "", "passed"
        finally:
            path.write_text(text, encoding="utf-8")
        noticed = f"{words}, by their limit" if result == "limit" else words or None
        return Outcome(mutation, noticed, time.monotonic() - began)


def run(chosen: Sequence[Mutation], *, limit_seconds: float, num_sets: int, checks: bool) -> Iterator[Outcome]:
    """Tries mutations one after the other, and yields what has become of each.

    Raises:
        RuntimeError: Tests fail without a change.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Copy(Path(folder), limit_seconds)
        checked: set[str] = set()
        for mutation in chosen:
            likely = {test for tests in list(copy.sets_of(mutation).values())[: min(num_sets, 2)] for test in tests}
            if checks and likely - checked and copy.result_of(sorted(likely - checked)) != "passed":
                raise RuntimeError(f"some of these tests fail without any change: {sorted(likely - checked)}")
            checked |= likely
            yield copy.try_one(mutation, num_sets=num_sets)


def tables_of(outcomes: Sequence[Outcome]) -> list[Table]:
    """What was noticed, package by package, and what was not."""
    rows = []
    for package in sorted({outcome.mutation.path.split("/")[1] for outcome in outcomes}):
        own = [outcome for outcome in outcomes if outcome.mutation.path.split("/")[1] == package]
        noticed = [outcome for outcome in own if outcome.noticed_by]
        by_file = sum(outcome.noticed_by == "tests of the file" for outcome in noticed)
        by_limit = sum((outcome.noticed_by or "").endswith("limit") for outcome in noticed)
        share = f"{len(noticed)} ({len(noticed) / len(own):.0%})"
        rows.append([package, str(len(own)), share, str(by_file), str(by_limit)])
    heads = ["package", "changes", "noticed", "by the tests of the file", "by a limit"]
    survivors = [
        [outcome.mutation.kind, str(outcome.mutation).replace("|", "\\|")]
        for outcome in outcomes
        if not outcome.noticed_by
    ]
    return [Table("Changes and what noticed them", heads, rows), Table("Survivors", ["kind", "change"], survivors)]


def _slice(text: str) -> slice:
    first, _, last = text.partition(":")
    return slice(int(first or 0), int(last) if last else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", default="scale-core", help="the distribution whose source is changed")
    parser.add_argument("--files", default="*", help="a pattern for paths below the package, such as 'state/*.py'")
    parser.add_argument("--count", type=int, default=50, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="which changes")
    parser.add_argument("--only", default=":", help="a slice of the sample, as 20:40, to go on with a run")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one set of tests")
    parser.add_argument("--sets", type=int, default=3, help="how many sets of tests: 1 is those of the file alone")
    parser.add_argument("--unchecked", action="store_true", help="don't run the tests without a change before")
    parser.add_argument("--list", action="store_true", help="print the sample and stop")
    parser.add_argument("--smoke", action="store_true", help="one change, and the tests of one file")
    parser.add_argument("--date", help="also write the results, under this date")
    given = parser.parse_args()
    if given.smoke:
        given.package, given.files, given.count, given.sets, given.unchecked = "scale-core", "nested.py", 1, 1, True
    chosen = sample(given.package, given.files, given.count, given.seed)[_slice(given.only)]
    if given.list:
        print(*chosen, sep="\n")
        return
    outcomes = []
    tries = run(chosen, limit_seconds=given.limit, num_sets=given.sets, checks=not given.unchecked)
    for outcome in tries:
        outcomes.append(outcome)
        print(f"{outcome.noticed_by or 'SURVIVED':17} {outcome.seconds:6.1f} s  {outcome.mutation}", flush=True)
    tables = tables_of(outcomes)
    print(*(table.markdown() for table in tables), sep="\n")
    if given.date:
        figures = [{**asdict(outcome.mutation), "noticed_by": outcome.noticed_by} for outcome in outcomes]
        save(f"mutations-{given.package}", given.date, __doc__, tables, figures)


if __name__ == "__main__":
    main()
