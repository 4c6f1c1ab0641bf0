"""Writes down which places of the source each test reaches, in all of its processes, and how long it takes.

A plugin of pytest for `mutations.py`, which calls `reached` in a copy of the source, once before each place. What it
writes into the file that `MUTATIONS_REACHED` names are lines of three columns: "reached", a place and a test; or
"passed", a test's seconds and the test.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest

_known: set[tuple[int, str]] = set()


def reached(place: int) -> None:
    """Writes that the test that runs in this process, or that has started it, has come to a place."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (place, test) not in _known:
        _known.add((place, test))
        _write(f"reached\t{place}\t{test}\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts one case of each test first, then the second cases: what is cut off has been reached by others, mostly.

    The tests of a turn come in an order of chance, the same in all workers, so that all files have their share.
    """
    Random(0).shuffle(items)
    seen: Counter[str] = Counter()
    turns = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        turns[item] = seen[function]
        seen[function] += 1
    items.sort(key=turns.__getitem__)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes that a test has passed, once where pytest has workers."""
    if report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        _write(f"passed\t{report.duration:.3f}\t{report.nodeid}\n")


def _write(line: str) -> None:
    """Appends a line at once, since ranks end without closing their files."""
    if path := os.environ.get("MUTATIONS_REACHED"):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
