"""Faults: every row of the matrix with tests that are there, and the points of the guide as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

import fault_marks
from fault_marks import expected_column, marked_tests, rows, tried_techniques

from scale_core.fault_points import POINTS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "internals" / "faults.md").read_text(encoding="utf-8")
# The numbers of the matrix; those that it leaves out were never rows of it.
RANKS_FAIL = {*range(1, 34), 97, 105, 116}
ROWS = {*range(1, 117)} - {4, 12, 28, 32, 44, 46, 50, 54, 62, 65, 73, 75, 79, 94}


def test_every_row_has_a_result_and_tests_with_its_mark() -> None:
    marked = expected_column()
    assert rows().keys() == marked.keys() == ROWS
    for number, (fault, outcome, _, tests) in rows().items():
        assert fault and outcome
        assert tests == marked[number], f"row {number} is not up to date: python {fault_marks.__file__}"


def test_each_row_is_tried_with_every_technique_that_can_meet_it() -> None:
    tried = tried_techniques()
    missing = {number: {*row.techniques} - tried[number] for number, row in rows().items()}
    assert not {number: names for number, names in missing.items() if names}


def test_what_injects_a_fault_says_where_and_when() -> None:
    """Of faults of ranks (sections A and B), in tests that go through techniques."""
    silent = [
        f"{test.file}::{test.name}, row {row}"
        for test in marked_tests()
        for row in test.rows
        if not test.package and row in RANKS_FAIL and test.techniques_of(row)
        if not test.place and not all(case.details for case in test.tried_in(row))
    ]
    assert not silent


def test_ranks_and_cases_of_a_test_are_read_from_it() -> None:
    found = {test.name: test for test in marked_tests()}
    test = found["test_the_others_abort_the_step_and_all_go_on"]
    assert (test.package, test.num_cases, test.ranks, test.rows) == ("scale-fsdp", 4, (2, 3), (105,))
    assert found["test_ranks_wait_for_one_whose_reads_fail_for_a_moment"].ranks == (2,)
    cell = found["test_nothing_is_lost_with_a_rank_wherever_it_is"].cell(6)
    assert "tp: 2 ranks, rank 0 killed at all_gather in backward of step 5" in cell and "in the soak" in cell
    assert "killed" in found["test_nothing_is_lost_with_a_rank"].cell(2) and "frozen" not in cell
    assert found["test_a_rank_that_runs_out_of_data_is_named"].techniques_of(20) == {"fsdp", "oss", "tp", "pipe", "moe"}
    assert "(fsdp; in the soak oss, tp, pipe, moe; 2 ranks" in found["test_a_rank_that_runs_out_of_data_is_named"].cell(
        20
    )


def test_the_guide_lists_the_points_as_the_code_does() -> None:
    listed = dict(re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)?)` \| (.*) \|$", GUIDE, re.MULTILINE))
    assert listed == POINTS
