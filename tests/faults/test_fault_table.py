"""Faults: every row of the matrix with tests that are there, and the points of the guide as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

import fault_marks
from fault_marks import expected_column, marked_tests, rows

from scale_core.fault_points import POINTS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "faults.md").read_text(encoding="utf-8")
# The numbers of the matrix; those that it leaves out were never rows of it.
ROWS = {*range(1, 116)} - {4, 12, 28, 32, 44, 46, 50, 54, 62, 65, 73, 75, 79, 94}


def test_every_row_has_a_result_and_tests_with_its_mark() -> None:
    marked = expected_column()
    assert rows().keys() == marked.keys() == ROWS
    for number, (fault, outcome, tests) in rows().items():
        assert fault and outcome
        assert tests == marked[number], f"row {number} is not up to date: python {fault_marks.__file__}"


def test_ranks_and_cases_of_a_test_are_read_from_it() -> None:
    found = {test.name: test for test in marked_tests()}
    test = found["test_the_others_abort_the_step_and_all_go_on"]
    assert (test.package, test.num_cases, test.rows) == ("scale-fsdp", 16, (105,))
    assert found["test_ranks_wait_for_one_whose_reads_fail_for_a_moment"].ranks == (2,)


def test_the_guide_lists_the_points_as_the_code_does() -> None:
    listed = dict(re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)?)` \| (.*) \|$", GUIDE, re.MULTILINE))
    assert listed == POINTS
