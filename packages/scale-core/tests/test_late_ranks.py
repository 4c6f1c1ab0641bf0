"""late_ranks.py: the rank for which the others wait is named with its milliseconds."""

from __future__ import annotations

import logging
import re
from datetime import timedelta

import pytest

from scale_core import LateRanks, group_of
from scale_core.comm.group import Group
from scale_core.comm.work import WaitClock, wait_for
from scale_core.consistency import late_ranks
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, PassKind
from scale_core.testing import run_ranks


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def logged() -> list[str]:
    """What is logged under scale_core from now on."""
    records = Records()
    logging.getLogger("scale_core").addHandler(records)
    return records.texts


@pytest.mark.ranks(3)
def test_a_rank_that_others_wait_for_is_named_with_its_time() -> None:
    """Three ranks whose clocks say that two of them have waited for rank 2, which takes 200 ms longer."""
    texts, rank = logged(), group_of().rank
    late = LateRanks(threshold_ms=150, every=2)
    lateness = []
    for _ in range(4):
        WaitClock.seconds += [0.2, 0.15, 0.0][rank]
        lateness.append(late.step())
    if rank:
        assert not texts
        return
    assert lateness[0] is lateness[2] is None
    assert lateness[1] is not None and lateness[1][2] == max(lateness[1]) >= 150
    warnings = [text for text in texts if "rank 2 of 3 came" in text]
    assert len(warnings) == 2
    assert re.match(
        r"WARNING scale_core.consistency.late_ranks: rank 2 of 3 came \d+ ms after the others on average over the last "
        r"2 steps \(step 2; ms waited per step, by rank: \d+, \d+, \d+\): find out what keeps it",
        warnings[0],
    )


def test_who_waits_least_is_the_latest() -> None:
    assert late_ranks.lateness_of([100.0, 20.0, 100.0]) == [0.0, 80.0, 0.0]
    assert late_ranks.lateness_of([]) == []


class Done:
    """An operation that has ended."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def test_each_wait_counts() -> None:
    for limit in (None, 5.0):
        before = WaitClock.seconds
        wait_for("all_gather", 0, Done(), limit)
        assert WaitClock.seconds > before


def passes() -> list[str]:
    texts = logged()
    contract = Contract(group_of())
    for _ in range(50):
        contract.begin(PassKind("backward", grad=True, training=True), new_step=True)
        contract.record(Event("reduction", "layer"))
        WaitClock.seconds += 0.5 * (group_of().rank == 0)
        contract.end_checked()
    return texts


def test_the_environment_makes_each_compared_pass_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALE_LATE_RANKS_MS", raising=False)
    assert run_ranks(passes, 2) == [[], []]
    monkeypatch.setenv("SCALE_LATE_RANKS_MS", "300")
    texts, others = run_ranks(passes, 2)
    assert not others and len(texts) == 1 and "rank 1 of 2 came" in texts[0] and "last 50 steps" in texts[0]


def test_what_is_no_number_of_milliseconds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"threshold_ms": 0.0}, {"every": 0}, {"threshold_ms": float("nan")}):
        with pytest.raises(ValueError, match="expected threshold_ms above 0"):
            LateRanks(**options)  # type: ignore[arg-type]
    monkeypatch.setenv("SCALE_LATE_RANKS_MS", "soon")
    with pytest.raises(ValueError, match="SCALE_LATE_RANKS_MS, got 'soon'"):
        late_ranks.late_ranks_by_environment(Group(0, 2))
