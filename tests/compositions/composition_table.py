"""The table of docs/internals/composition.md, written by hand, and the tests behind each of its rows.

A test that runs several techniques in one loop says so: `@pytest.mark.composition("scale-pipe", "scale-fsdp")`. A row
of the table names the same techniques; its last two columns, the state and the tests, are made of these marks. So is
the matrix of pairs in docs/guides/which-technique.md. `python tests/compositions/composition_table.py` writes them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[2]
PAGE = HOME / "docs" / "internals" / "composition.md"
MATRIX_PAGE = HOME / "docs" / "guides" / "which-technique.md"
IN_MATRIX = {
    "scale-fsdp": "FSDP",
    "OSS": "OSS",
    "ShardedDataParallel": "Sharded DDP",
    "DistributedDataParallel": "DDP",
    "LocalSGD": "Local SGD",
    "scale-pipe": "pipeline",
    "scale-tp": "tensor",
    "context parallel": "context",
    "scale-moe": "experts",
    "scale-checkpoint": "checkpoint",
    "scale-adascale": "AdaScale",
}
"""The techniques of the matrix, in its order, and how it calls them."""
TECHNIQUES = {
    "scale-fsdp",
    "OSS",
    "ShardedDataParallel",
    "LocalSGD",
    "scale-pipe",
    "scale-tp",
    "context parallel",
    "scale-moe",
    "scale-checkpoint",
    "scale-adascale",
    "DistributedDataParallel",
    "ShardedGradScaler",
    "torch.utils.checkpoint",
    "torch.optim",
}
HEAD = "| together | how they meet | state | tests |"
BETWEEN = " × "


@dataclass(frozen=True)
class MarkedTest:
    """A test that bears a combination."""

    techniques: frozenset[str]
    path: str  # from the root of the repository
    name: str
    is_soak: bool
    refused: bool  # The combination raises an error, which the test looks at.

    def title(self) -> str:
        folder, *rest = Path(self.path).parts
        place = "/".join(rest) if folder == "tests" else f"{rest[0]}: {'/'.join(rest[2:])}"
        return f"`{place}` (soak)" if self.is_soak else f"`{place}`"


def marked_tests(home: Path = HOME) -> Iterator[MarkedTest]:
    """Yields what the tests of all packages are marked with; nothing is imported."""
    for path in sorted([*home.glob("tests/**/test_*.py"), *home.glob("packages/*/tests/**/test_*.py")]):
        text = path.read_text(encoding="utf-8")
        if ".composition(" not in text:
            continue
        for function in ast.parse(text).body:
            if isinstance(function, ast.FunctionDef):
                yield from _marks_of(function, str(path.relative_to(home)))


def _marks_of(function: ast.FunctionDef, path: str) -> Iterator[MarkedTest]:
    is_soak = any(ast.unparse(each) == "pytest.mark.soak" for each in function.decorator_list)
    for each in function.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.composition":
            techniques = frozenset(ast.literal_eval(argument) for argument in each.args)
            unknown = techniques - TECHNIQUES
            if unknown or len(techniques) < 2:
                raise ValueError(f"{path}, {function.name}: no combination of techniques: {ast.unparse(each)}")
            yield MarkedTest(techniques, path, function.name, is_soak, refused=bool(each.keywords))


def check(page: str, tests: list[MarkedTest]) -> list[str]:
    """Returns what does not agree: rows without a test that say ready, tests without a row, rows that are not made."""
    problems, seen = [], []
    for techniques, line in _rows(page):
        if techniques in seen:
            problems.append(f"two rows for {BETWEEN.join(sorted(techniques))}")
        seen.append(techniques)
        made = _made(line, [each for each in tests if each.techniques == techniques])
        if made != line:
            problems.append(f"the page has\n  {line}\nand its tests make\n  {made}")
    problems += [
        f"{each.path}, {each.name}: no row for {BETWEEN.join(sorted(each.techniques))}"
        for each in tests
        if each.techniques not in seen
    ]
    return problems


def write(page: str, tests: list[MarkedTest]) -> str:
    """Returns the page with the columns that tests make."""
    for techniques, line in _rows(page):
        page = page.replace(line, _made(line, [each for each in tests if each.techniques == techniques]))
    return page


def matrix(tests: list[MarkedTest]) -> str:
    """Returns a table of pairs: "yes" if a test runs both in one loop, "error" if tests only look at an error."""
    lines = ["| | " + " | ".join(IN_MATRIX.values()) + " |", "|---" * (len(IN_MATRIX) + 1) + "|"]
    for row, title in IN_MATRIX.items():
        cells = [_cell(row, column, tests) for column in IN_MATRIX]
        lines.append(f"| **{title}** | " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


def _cell(row: str, column: str, tests: list[MarkedTest]) -> str:
    """Returns the cell of two techniques. A test that expects an error of three says nothing of two of them."""
    both = [each for each in tests if {row, column} <= each.techniques and row != column]
    if any(not each.refused for each in both):
        return "yes"
    return "error" if any(len(each.techniques) == 2 for each in both) else ""


def write_matrix(page: str, tests: list[MarkedTest]) -> str:
    """Returns the page of the matrix with the matrix that the tests make."""
    before, begin, rest = page.partition("<!-- matrix -->\n\n")
    _, end, after = rest.partition("\n\n<!-- end of the matrix -->")
    if not end:
        raise ValueError(f"{MATRIX_PAGE} has no comments around its matrix")
    return before + begin + matrix(tests) + end + after


def ready_rows(page: str) -> list[frozenset[str]]:
    """Returns the techniques of each row that says ready."""
    return [techniques for techniques, line in _rows(page) if line.split(" | ")[2] == "ready"]


def _rows(page: str) -> Iterator[tuple[frozenset[str], str]]:
    _, _, rest = page.partition(HEAD + "\n")
    for line in rest.splitlines()[1:]:
        if not line.startswith("| "):
            return
        techniques = frozenset(line.split(" | ")[0].removeprefix("| ").split(BETWEEN))
        if unknown := techniques - TECHNIQUES:
            raise ValueError(
                f"docs/internals/composition.md: {sorted(unknown)} are no techniques; there are {sorted(TECHNIQUES)}"
            )
        yield techniques, line


def _made(line: str, tests: list[MarkedTest]) -> str:
    """Returns a row with the state and the tests that bear it."""
    together, how = line.removeprefix("| ").split(" | ")[:2]
    state = "not tested" if not tests else "refused" if all(each.refused for each in tests) else "ready"
    titles = list(dict.fromkeys(each.title() for each in tests))
    return f"| {together} | {how} | {state} | {', '.join(titles) or 'none'} |"


def main() -> None:
    """Writes the page, and says what has no row."""
    tests = list(marked_tests())
    page = write(PAGE.read_text(encoding="utf-8"), tests)
    PAGE.write_text(page, encoding="utf-8")
    MATRIX_PAGE.write_text(write_matrix(MATRIX_PAGE.read_text(encoding="utf-8"), tests), encoding="utf-8")
    print("\n".join(check(page, tests)) or f"{PAGE}: {len(tests)} marks")


if __name__ == "__main__":
    main()
