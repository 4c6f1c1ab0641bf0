"""Functions of torch on shards: the result of the full tensor or an error, for every entry of torch's own tables."""

from __future__ import annotations

import pytest
from operator_calls import TABLES
from operator_outcomes import Plan, Report, report_of

SOURCES = (*TABLES, "overrides")
# The first three read the memory of a tensor without asking its class, and torch has no hook for that. A file has the
# elements of the rank that writes it: optimizer states that each rank saves for itself are such files.
UNNOTICED = ("torch.Tensor", "torch.tensor", "vmap", "saved and loaded")


def lines_of(report: Report) -> str:
    return "\n".join(map(str, report.findings))


def test_every_operator_of_torch_on_2_ranks() -> None:
    report = report_of(Plan(SOURCES), 2)
    assert not report.findings, lines_of(report)
    assert len(report.equal_entries) > 480  # Else it would pass with an error for everything; 504 on 2026-11-29.


def test_a_part_of_torch_s_operators_on_3_ranks() -> None:
    report = report_of(Plan(SOURCES, every=7), 3)
    assert not report.findings, lines_of(report)


def test_what_reads_tensors_without_their_class() -> None:
    report = report_of(Plan(("beside dispatch",)), 2)
    findings = [finding for finding in report.findings if finding.call not in UNNOTICED]
    assert not findings, lines_of(report)
    assert {finding.call for finding in report.findings} == set(UNNOTICED), "a limit is gone: shorten the list"


def test_parts_that_do_not_know_it_are_noticed_here() -> None:
    names = ("sum", "mm", "is larger", "deepcopy", "row and write", "operator with dim", "operator matmul")
    report = report_of(Plan(("op_db", "beside dispatch"), only=names, as_plain=True), 2)
    assert {finding.call.partition("[")[0] for finding in report.findings} == set(names), lines_of(report)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("source", SOURCES)
def test_every_operator_on_every_layout_and_argument(source: str, num_ranks: int) -> None:
    layouts = 7 if num_ranks == 2 else 11
    report = report_of(Plan((source,), samples=6, layouts=layouts, every_argument=True), num_ranks)
    assert not report.findings, lines_of(report)
