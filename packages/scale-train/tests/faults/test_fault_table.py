"""Faults: every row of the matrix with tests that are there, and the points of the guide as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from scale_core.fault_points import POINTS

ROOT = Path(__file__).parents[4]
GUIDE = (ROOT / "docs" / "guides" / "faults.md").read_text(encoding="utf-8")
MATRIX = Path(__file__).with_name("faults.md").read_text(encoding="utf-8")
# The numbers of the matrix; those that it leaves out were never rows of it.
ROWS = {*range(1, 105)} - {4, 12, 28, 32, 44, 46, 50, 54, 62, 65, 73, 75, 79, 94}


def rows() -> dict[int, tuple[str, list[str]]]:
    """What comes of each fault, and its tests."""
    found = re.findall(r"^\| (\d+) \| .* \| (.*) \| (.*) \|$", MATRIX, re.MULTILINE)
    return {int(number): (outcome, re.findall(r"`([^`]+)`", tests)) for number, outcome, tests in found}


def test_every_row_of_the_matrix_has_a_result_and_tests() -> None:
    assert rows().keys() == ROWS
    assert all(outcome and tests for outcome, tests in rows().values())


def test_the_tests_that_it_names_are_there() -> None:
    places: dict[str, str] = {}
    for path in (ROOT / "packages").glob("*/tests/**/test_*.py"):
        places[path.name] = places.get(path.name, "") + path.read_text(encoding="utf-8")
    for number, (_, tests) in rows().items():
        for name in tests:
            file, _, function = name.partition("::")
            assert f"\ndef {function}(" in places.get(file, ""), f"row {number}: there is no {name}"


def test_the_guide_lists_the_points_as_the_code_does() -> None:
    listed = dict(re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)?)` \| (.*) \|$", GUIDE, re.MULTILINE))
    assert listed == POINTS
