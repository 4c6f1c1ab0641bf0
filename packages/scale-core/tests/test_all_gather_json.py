"""all_ranks.py: what ranks say to each other, and to the user, when a pass is aborted."""

from __future__ import annotations

import pytest

from scale_core.comm.group import Group, group_of
from scale_core.consistency.all_ranks import all_gather_failures, all_gather_json, format_abort, format_traceback
from scale_core.consistency.contract import Contract


def raised(words: str) -> ValueError:
    try:
        raise ValueError(words)
    except ValueError as error:
        return error


@pytest.mark.ranks(3)
def test_all_ranks_hear_what_each_says_and_why_some_have_failed() -> None:
    contract, rank = Contract(group_of()), group_of().rank
    told = all_gather_json({"rank": rank, "missing": [[rank, 1]] * rank}, contract)
    told, reasons = told, all_gather_failures(None if rank == 0 else raised(f"bad batch {rank}"), contract)
    assert told == [{"rank": rank, "missing": [[rank, 1]] * rank} for rank in range(3)]
    assert [reason.splitlines()[-1:] for reason in reasons] == [
        [],
        *([f"ValueError: bad batch {r}"] for r in (1, 2)),
    ]
    assert "in raised" in reasons[1]  # It has its traceback.


def test_a_world_of_one_says_it_to_itself() -> None:
    contract = Contract(Group())
    assert all_gather_json([1, 2], contract) == [[1, 2]] and all_gather_failures(None, contract) == [""]


def test_the_first_rank_that_failed_is_quoted_and_all_are_named() -> None:
    reasons = ["", format_traceback(raised("one")), format_traceback(raised("two"))]
    words = format_abort("step 7", reasons, "All is as before.")
    assert words.startswith("step 7 was aborted on all ranks, because ranks 1, 2 failed. All is as before. What rank 1")
    assert words.splitlines()[-1] == "  ValueError: one" and "two" not in words
    assert "because rank 1 failed" in format_abort("step 7", reasons[:2], "")
