"""The language of the source: locals are nouns of the domain, and prose has the field's plain words.

`python tests/test_language.py` prints what is over the limits, by file and line.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
SOURCES = sorted((HOUSE / "packages").glob("*/src/**/*.py"))
# Pronouns, participles and adverbs that say nothing about a value. Call it what an engineer would search for.
POOR_NAMES = frozenset(
    (
        *("found", "each", "own", "given", "held", "what", "known", "mine", "here", "rest", "place", "whole", "few"),
        *("told", "made", "there", "theirs", "ours", "this", "that", "alike", "kept", "taken", "wanted", "asked"),
        *("said", "gone", "which", "who", "beside", "of", "at"),
    )
)
# Say instead: the field's noun, for example, during, again, equal, full.
HARD_WORDS = re.compile(r"\b(what|of which|such as|beside|anew|alike|whole|told)\b", re.IGNORECASE)
MOST_POOR_NAMES = 0.01  # of all locals
MOST_HARD_WORDS = 0.004  # of all words in comments and docstrings

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def locals_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields the names that functions assign, each once per function, with the first line of each."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, _FUNCTIONS):
            continue
        first_lines: dict[str, int] = {}
        nodes: list[ast.AST] = list(function.body) if isinstance(function.body, list) else [function.body]
        while nodes:
            node = nodes.pop()
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                first_lines[node.id] = min(node.lineno, first_lines.get(node.id, node.lineno))
            nodes += ast.iter_child_nodes(node)
        yield from ((line, name) for name, line in first_lines.items())


def prose_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields comments and docstrings, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield getattr(node, "lineno", 1), docstring


def poor_names() -> tuple[list[str], int]:
    """The places of locals with a poor name, and the number of all locals."""
    places, num_locals = [], 0
    for path in SOURCES:
        for line, name in locals_in(path.read_text(encoding="utf-8")):
            num_locals += 1
            if name in POOR_NAMES:
                places.append(f"{path.relative_to(HOUSE)}:{line}: {name}")
    return places, num_locals


def hard_words() -> tuple[list[str], int]:
    """The places of hard words in prose, and the number of all words."""
    places, num_words = [], 0
    for path in SOURCES:
        for line, text in prose_in(path.read_text(encoding="utf-8")):
            num_words += len(text.split())
            places += [f"{path.relative_to(HOUSE)}:{line}: {word}" for word in HARD_WORDS.findall(text)]
    return places, num_words


def test_locals_are_nouns_of_the_domain() -> None:
    places, num_locals = poor_names()
    assert len(places) <= MOST_POOR_NAMES * num_locals, "\n".join(places)


def test_comments_and_docstrings_have_plain_words() -> None:
    places, num_words = hard_words()
    assert len(places) <= MOST_HARD_WORDS * num_words, "\n".join(places)


@pytest.mark.parametrize(
    "source, names",
    [
        ("def f(given):\n    found = given\n    return [each for each in found]\n", ["each", "found"]),
        ("def f():\n    def g():\n        at = 1\n", ["at"]),
        ("found = 1\nclass A:\n    found = 2\n", []),
    ],
)
def test_locals_are_those_of_functions(source: str, names: list[str]) -> None:
    assert sorted(name for _, name in locals_in(source)) == names


def test_prose_is_of_comments_and_docstrings() -> None:
    source = '"""A whole file."""\nx = "what"  # as told\n'
    assert [word for _, text in prose_in(source) for word in HARD_WORDS.findall(text)] == ["told", "whole"]


if __name__ == "__main__":
    print("\n".join([*poor_names()[0], *hard_words()[0]]))
