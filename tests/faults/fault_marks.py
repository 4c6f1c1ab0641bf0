"""Which tests try which fault, read from their marks, and of each what it tries: techniques, ranks and cases.

A test has `@pytest.mark.fault(number, ...)` with the rows of `faults.md` that it shows. Files are parsed and not
imported, since each package is tested in an environment of its own.

    python tests/faults/fault_marks.py   # writes the last column of faults.md
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MATRIX = Path(__file__).with_name("faults.md")
ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (\d+) \| (.*) \| (.*) \| (.*) \|$")
# Functions that start ranks, of this project's tests; the number of ranks is an argument, as of the mark `ranks`.
_STARTERS = frozenset({"run_ranks", "launch_local"})


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
        kinds: The techniques of its parameter `kind`.
        kinds_of_row: For a row, the techniques and numbers of ranks of its `Case`s.
        in_soak: It is run by `nox -s soak` alone.
    """

    rows: tuple[int, ...]
    file: str
    name: str
    package: str
    ranks: tuple[int, ...]
    num_cases: int
    kinds: tuple[str, ...]
    kinds_of_row: dict[int, list[str]]
    in_soak: bool

    def cell(self, row: int) -> str:
        """What stands in the table."""
        ranks = f"{' or '.join(map(str, self.ranks))} rank{'s' if self.ranks != (1,) else ''}" if self.ranks else ""
        cases = f"{self.num_cases} cases" if self.num_cases > 1 and not self.kinds else ""
        parts = [self.package, *self.kinds, ranks, cases]
        if row in self.kinds_of_row:
            parts = [self.package, *dict.fromkeys(self.kinds_of_row[row])]
        details = ", ".join(filter(None, [*parts, "in the soak" if self.in_soak else ""]))
        return f"`{self.file}::{self.name}`" + (f" ({details})" if details else "")


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


def rows() -> dict[int, tuple[str, str, str]]:
    """By number, the fault, its result, and the tests that the page names."""
    matches = filter(None, map(_ROW.match, MATRIX.read_text(encoding="utf-8").splitlines()))
    return {int(match[1]): (match[2], match[3], match[4]) for match in matches}


def write() -> None:
    """Writes the last column of the page."""
    column = expected_column()
    lines = MATRIX.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if match := _ROW.match(line):
            lines[number] = f"| {match[1]} | {match[2]} | {match[3]} | {column.get(int(match[1]), '')} |"
    MATRIX.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tests_of(tree: ast.Module, path: Path) -> Iterator[FaultTest]:
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    constants |= {
        node.target.id: node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        marks = {_mark_of(each): each for each in function.decorator_list if isinstance(each, ast.Call)}
        if "fault" not in marks:
            continue
        values = dict(_parameters(function, constants))
        num_cases = 1
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and _mark_of(mark) == "parametrize":
                num_cases *= len(_items(mark.args[1], constants)) or 1
        fixtures = [functions[arg.arg] for arg in function.args.args if arg.arg in functions]
        ranks = sorted({rank for each in (function, *fixtures) for rank in _ranks_of(each, values, constants)})
        rows = tuple(arg.value for arg in marks["fault"].args if isinstance(arg, ast.Constant))
        folder, package, *_ = path.relative_to(ROOT).parts
        package = package if folder == "packages" else ""
        kinds = tuple(each.value for each in values.get("kind", ()) if isinstance(each, ast.Constant))
        cases = [each for each in values.get("case", ()) if isinstance(each, ast.Call) and len(each.args) > 2]
        of_rows = _kinds_of_rows(cases)
        in_soak = any(isinstance(each, ast.Attribute) and each.attr == "soak" for each in function.decorator_list)
        yield FaultTest(rows, path.name, function.name, package, tuple(ranks), num_cases, kinds, of_rows, in_soak)


def _kinds_of_rows(cases: list[ast.Call]) -> dict[int, list[str]]:
    """Of `Case(row, kind, number of ranks, ...)` the techniques and ranks of each row."""
    found: dict[int, list[str]] = {}
    for case in cases:
        row, kind, num_ranks = (each.value if isinstance(each, ast.Constant) else "" for each in case.args[:3])
        if str(row).isdecimal():
            found.setdefault(int(str(row)), []).append(f"{kind} on {num_ranks} ranks")
    return found


def _mark_of(decorator: ast.Call) -> str:
    return decorator.func.attr if isinstance(decorator.func, ast.Attribute) else ""


def _parameters(function: ast.FunctionDef, constants: dict[str, ast.expr]) -> Iterator[tuple[str, list[ast.expr]]]:
    """The values of each parameter that is written down."""
    for mark in function.decorator_list:
        if not isinstance(mark, ast.Call) or _mark_of(mark) != "parametrize":
            continue
        names = mark.args[0]
        if isinstance(names, ast.Constant) and "," in str(names.value):
            names = ast.Tuple([ast.Constant(name.strip()) for name in str(names.value).split(",")])
        if isinstance(names, ast.Constant):
            yield str(names.value), _items(mark.args[1], constants)
        elif isinstance(names, ast.Tuple):
            items = _items(mark.args[1], constants)
            for place, name in enumerate(names.elts):
                if isinstance(name, ast.Constant):
                    of_name = [item.elts[place] for item in items if isinstance(item, ast.Tuple)]
                    yield str(name.value), of_name


def _items(node: ast.expr, constants: dict[str, ast.expr]) -> list[ast.expr]:
    if isinstance(node, ast.Name):
        node = constants.get(node.id, node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        return [ast.Constant(number) for number in range(*bounds)] if len(bounds) == len(node.args) else []
    if isinstance(node, ast.Dict):
        return node.values
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return []
    items: list[ast.expr] = []
    for each in node.elts:
        if isinstance(each, ast.Starred):
            inner = each.value.generators[0].iter if isinstance(each.value, ast.GeneratorExp) else each.value
            items += _items(inner, constants)
        else:
            is_param = isinstance(each, ast.Call) and _mark_of(each) == "param" and each.args
            items.append(each.args[0] if isinstance(each, ast.Call) and is_param else each)
    return items


def _ranks_of(
    function: ast.FunctionDef, values: dict[str, list[ast.expr]], constants: dict[str, ast.expr]
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
