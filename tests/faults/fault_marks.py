"""Which tests try which fault, read from their marks, and of each what it tries: techniques, ranks, places and cases.

A test has `@pytest.mark.fault(number, ...)` with the rows of `faults.md` that it shows. `place=` says where and when in
a run the fault happens, where no `Case` and no point says so, and `techniques=` which techniques the test goes through,
where no parameter `kind` and no package does. Files are parsed and not imported, since each package is tested in an
environment of its own.

    python tests/faults/fault_marks.py   # writes the last column of faults.md
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MATRIX = Path(__file__).with_name("faults.md")
ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (\d+) \| (.*) \| (.*) \| (.*) \| (.*) \|$")
# Functions that start ranks, of this project's tests; the number of ranks is an argument, as of the mark `ranks`.
_STARTERS = frozenset({"run_ranks", "launch_local"})
_INJECTED = {
    "kill_at": "killed",
    "stop_at": "frozen",
    "raise_at": "raises",
    "delay_at": "late",
    "enospc_at": "disk full",
}
TECHNIQUE_OF = {f"scale-{name}": name for name in ("fsdp", "oss", "tp", "pipe", "moe", "adascale")}


class Row(NamedTuple):
    """A row of the page.

    Attributes:
        fault: What happens.
        result: What comes of it.
        techniques: Which of them can meet it; empty where none has a part in it.
        tests: The last column.
    """

    fault: str
    result: str
    techniques: tuple[str, ...]
    tests: str


class Value(NamedTuple):
    """One value of a parametrization."""

    node: ast.expr
    in_soak: bool


class Tried(NamedTuple):
    """One case of a test.

    Attributes:
        rows: The only ones that it shows; empty where it shows all of its test's.
        kind: The technique; "" where the case names none.
        details: Number of ranks, place and time, in words.
        in_soak: It is run by `nox -s soak` alone.
    """

    rows: tuple[int, ...]
    kind: str
    details: str
    in_soak: bool


@dataclass(frozen=True)
class FaultTest:
    """A test with the mark of a fault.

    Attributes:
        rows: Of the matrix.
        file: The name of its file.
        name: Of the function.
        package: Whose test it is; "" of one that tests several.
        ranks: The numbers of ranks that the test itself starts; empty where it starts none, or by another function.
        num_cases: Of its parametrization, as far as that is written down in the file.
        techniques: What its mark says that it goes through.
        place: Where and when, as its mark says.
        tried: Its cases, where they name techniques or places.
        in_soak: It is run by `nox -s soak` alone.
    """

    rows: tuple[int, ...]
    file: str
    name: str
    package: str
    ranks: tuple[int, ...]
    num_cases: int
    techniques: tuple[str, ...]
    place: str
    tried: tuple[Tried, ...]
    in_soak: bool

    def tried_in(self, row: int) -> list[Tried]:
        """The cases of a row."""
        return [case for case in self.tried if not case.rows or row in case.rows]

    def techniques_of(self, row: int) -> set[str]:
        """The techniques with which it tries a row."""
        kinds = {case.kind for case in self.tried_in(row) if case.kind}
        return kinds | {*self.techniques} | ({TECHNIQUE_OF[self.package]} if self.package in TECHNIQUE_OF else set())

    def cell(self, row: int) -> str:
        """What stands in the table."""
        ranks = f"{' or '.join(map(str, self.ranks))} rank{'s' if self.ranks != (1,) else ''}" if self.ranks else ""
        tried = self.tried_in(row)
        cases = f"{self.num_cases} cases" if self.num_cases > 1 and not tried else ""
        kinds: dict[tuple[str, bool], list[str]] = {}
        for case in tried:
            of_kind = kinds.setdefault((case.kind, case.in_soak and not self.in_soak), [])
            if case.details and case.details not in of_kind:
                of_kind.append(case.details)
        in_all, in_soak = (
            _joined(
                (f"{kind}: " if kind and details else kind) + " / ".join(details)
                for (kind, of_soak), details in kinds.items()
                if of_soak == wanted
            )
            for wanted in (False, True)
        )
        soak = f"in the soak {in_soak}" if in_soak else ""
        parts = [self.package, ", ".join(self.techniques), in_all, soak, ranks, cases, self.place]
        details = "; ".join(filter(None, [*parts, "in the soak" if self.in_soak else ""]))
        return f"`{self.file}::{self.name}`" + (f" ({details})" if details else "")


def _joined(parts: Iterable[str]) -> str:
    words = list(parts)
    return ("; " if any(":" in word for word in words) else ", ").join(words)


def marked_tests() -> list[FaultTest]:
    """All tests with such a mark, by package and file, in the order of the file."""
    found = []
    for path in sorted([*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]):
        text = path.read_text(encoding="utf-8")
        if "mark.fault(" in text:
            found += _tests_of(ast.parse(text), path)
    return found


def expected_column() -> dict[int, str]:
    """By row, what the last column says."""
    cells: dict[int, list[str]] = {}
    for test in marked_tests():
        for row in test.rows:
            cells.setdefault(row, []).append(test.cell(row))
    return {row: "<br>".join(of_row) for row, of_row in cells.items()}


def tried_techniques() -> dict[int, set[str]]:
    """By row, the techniques with which tests try it."""
    techniques: dict[int, set[str]] = {}
    for test in marked_tests():
        for row in test.rows:
            techniques.setdefault(row, set()).update(test.techniques_of(row))
    return techniques


def rows() -> dict[int, Row]:
    """The page by number."""
    matches = filter(None, map(_ROW.match, MATRIX.read_text(encoding="utf-8").splitlines()))
    return {
        int(match[1]): Row(match[2], match[3], tuple(filter(None, match[4].strip().split(", "))), match[5])
        for match in matches
    }


def write() -> None:
    """Writes the last column of the page."""
    column = expected_column()
    lines = MATRIX.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if match := _ROW.match(line):
            lines[number] = f"| {match[1]} | {match[2]} | {match[3]} | {match[4]} | {column.get(int(match[1]), '')} |"
    MATRIX.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return constants | {
        node.target.id: node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }


def _tests_of(tree: ast.Module, path: Path) -> Iterator[FaultTest]:
    constants = _constants_of(tree)
    for node in tree.body:  # Names of a module beside the tests.
        if isinstance(node, ast.ImportFrom) and (beside := path.with_name(f"{node.module}.py")).exists():
            constants = _constants_of(ast.parse(beside.read_text(encoding="utf-8"))) | constants
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        decorators = [each for each in function.decorator_list if isinstance(each, ast.Call)]
        marks = [each for each in decorators if _mark_of(each) == "fault"]
        if not marks:
            continue
        cases = [each for each in decorators if _mark_of(each) == "parametrize"]
        parameters = [dict(_parameters(each, constants)) for each in cases]
        values = {name: [value.node for value in of_name] for each in parameters for name, of_name in each.items()}
        num_cases = 1
        for of_mark in parameters:
            num_cases *= max([len(of_name) for of_name in of_mark.values()], default=0) or 1
        fixtures = [functions[arg.arg] for arg in function.args.args if arg.arg in functions]
        ranks = sorted({rank for each in (function, *fixtures) for rank in _ranks_of(each, values, constants)})
        rows = tuple(sorted({arg.value for each in marks for arg in each.args if isinstance(arg, ast.Constant)}))
        words = {word.arg: word.value for each in marks for word in each.keywords}
        folder, package, *_ = path.relative_to(ROOT).parts
        yield FaultTest(
            rows=rows,
            file=path.name,
            name=function.name,
            package=package if folder == "packages" else "",
            ranks=tuple(ranks),
            num_cases=num_cases,
            techniques=tuple(
                str(value.node.value)
                for value in _items(words.get("techniques", ast.Tuple([])), constants)
                if isinstance(value.node, ast.Constant)
            ),
            place=str(ast.literal_eval(words["place"])) if "place" in words else "",
            tried=tuple(_tried(parameters)),
            in_soak=any(isinstance(each, ast.Attribute) and each.attr == "soak" for each in function.decorator_list),
        )


def _tried(parameters: list[dict[str, list[Value]]]) -> Iterator[Tried]:
    """The cases of a parametrization by `case`, or by `kind` with `num_ranks`, `fault` and `point`."""
    for of_mark in parameters:
        for value in of_mark.get("case", ()):
            if isinstance(value.node, ast.Call) and len(value.node.args) > 3:
                of_rows, kind, num_ranks, put = value.node.args[:4]
                rows = tuple(int(row) for row in _text(of_rows).split(", ") if row.isdecimal())
                yield Tried(rows, _text(kind), f"{_text(num_ranks)} ranks, {_place(put)}", value.in_soak)
        names = [name for name in ("kind", "num_ranks", "fault", "point") if name in of_mark]
        if "kind" not in names and "point" not in names:
            continue
        for row in zip(*(of_mark[name] for name in names), strict=True):
            by_name = dict(zip(names, row, strict=True))
            kind = _text(by_name["kind"].node) if "kind" in by_name else ""
            ranks = f"{_text(by_name['num_ranks'].node)} ranks" if "num_ranks" in by_name else ""
            place = _place(by_name["fault"].node) if "fault" in by_name else ""
            point = f"at {_text(by_name['point'].node)}" if "point" in by_name else ""
            yield Tried((), kind, ", ".join(filter(None, (ranks, place, point))), row[0].in_soak)


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _place(node: ast.expr) -> str:
    """What happens where and when, of calls such as `kill_at("all_gather", 1, 5)`."""
    places = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _INJECTED:
            words = {word.arg: _text(word.value) for word in call.keywords}
            point, rank, step = map(_text, call.args[:3])
            where = f" of {words['detail']}" if "detail" in words else ""
            where += f" in {words['during']}" if "during" in words else ""
            places.append(f"rank {rank} {_INJECTED[call.func.id]} at {point}{where} of step {step}")
    return " and ".join(places)


def _mark_of(decorator: ast.Call) -> str:
    return decorator.func.attr if isinstance(decorator.func, ast.Attribute) else ""


def _parameters(mark: ast.Call, constants: Mapping[str, ast.expr]) -> Iterator[tuple[str, list[Value]]]:
    """The values of each parameter that is written down."""
    names = mark.args[0]
    if isinstance(names, ast.Constant) and "," in str(names.value):
        names = ast.Tuple([ast.Constant(name.strip()) for name in str(names.value).split(",")])
    items = _items(mark.args[1], constants)
    if isinstance(names, ast.Constant):
        yield str(names.value), items
    elif isinstance(names, ast.Tuple):
        for place, name in enumerate(names.elts):
            if isinstance(name, ast.Constant):
                rows = [(item.node.elts, item.in_soak) for item in items if isinstance(item.node, ast.Tuple)]
                yield str(name.value), [Value(elements[place], in_soak) for elements, in_soak in rows]


def _items(node: ast.expr, constants: Mapping[str, ast.expr]) -> list[Value]:
    if isinstance(node, ast.Name):
        node = constants.get(node.id, node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        numbers = range(*bounds) if len(bounds) == len(node.args) else ()
        return [Value(ast.Constant(number), False) for number in numbers]
    if isinstance(node, ast.Dict):
        return [Value(each, False) for each in node.values]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        bounds = [None if each is None else ast.literal_eval(each) for each in (node.slice.lower, node.slice.upper)]
        return _items(node.value, constants)[slice(*bounds)]
    if isinstance(
        node, ast.ListComp | ast.GeneratorExp
    ):  # `pytest.param(each, marks=pytest.mark.soak) for each in ...`
        in_soak = _is_in_soak(node.elt)
        inner = _items(node.generators[0].iter, constants)
        return [Value(value.node, value.in_soak or in_soak) for value in inner]
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return []
    items: list[Value] = []
    for each in node.elts:
        if isinstance(each, ast.Starred):
            items += _items(each.value, constants)
        elif isinstance(each, ast.Call) and _mark_of(each) == "param" and each.args:
            value = each.args[0] if len(each.args) == 1 else ast.Tuple(each.args)
            items.append(Value(value, _is_in_soak(each)))
        else:
            items.append(Value(each, False))
    return items


def _is_in_soak(node: ast.expr) -> bool:
    """Whether `pytest.param` has that mark."""
    return any(isinstance(each, ast.Attribute) and each.attr == "soak" for each in ast.walk(node))


def _ranks_of(
    function: ast.FunctionDef, values: Mapping[str, list[ast.expr]], constants: Mapping[str, ast.expr]
) -> Iterator[int]:
    """The numbers of ranks that a function starts."""
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        numbers = call.args if name == "ranks" else call.args[1:2] if name in _STARTERS else []
        for number in numbers:
            if name == "ranks" and isinstance(number, ast.Constant) and isinstance(number.value, str):
                number = ast.Name(number.value)  # The mark names a parameter of the test.
            candidates = [number]
            if isinstance(number, ast.Name):
                candidates = values.get(number.id, [constants.get(number.id, number)])
            yield from (each.value for each in candidates if isinstance(each, ast.Constant) and type(each.value) is int)


if __name__ == "__main__":
    write()
