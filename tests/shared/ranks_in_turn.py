"""Tests of a file that run one after the other in one start of ranks: `@pytest.mark.ranks(2, in_turn=True)`.

Ranks take longer to start than most tests take to run. A test gets its parameters; a `tmp_path` that is one folder for
all ranks; and other fixtures as the first test gets them, so they may not depend on parameters. A test must not depend
on what others leave in the process. An error of a test ends the ranks, and the tests after it get others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scale_check.fuzz.pool import run_in_turn
from scale_core.testing.ranks import run_test

MOST_CASES = 12  # Workers of pytest divide the tests of a file: each begins its own, and may run some for nothing.
_FAILURES: dict[str, str] = {}  # Of the tests that have run, by their names; "" where there is none


class _Case(NamedTuple):
    name: str
    test: Callable[..., object]
    arguments: dict[str, Any]
    has_folder: bool
    is_local: bool

    def __str__(self) -> str:
        return self.name


def run_case(item: pytest.Function, num_ranks: int) -> None:
    """Runs a test, and the next ones of its file; raises what it fails with."""
    if item.nodeid not in _FAILURES:
        fixtures = {name: value for name, value in item.funcargs.items() if name not in _parameters(item)}
        cases = [_case_of(other, fixtures) for other in _next_tests(item, {*fixtures})]
        for outcome in run_in_turn(_call, cases, num_ranks):
            _FAILURES[outcome.program.name] = outcome.failure
    if failure := _FAILURES.pop(item.nodeid):
        raise AssertionError(failure)


def _next_tests(item: pytest.Function, fixtures: set[str]) -> list[pytest.Function]:
    """The test, and those after it with the same number of ranks and the same filters of warnings."""
    tests, items = [item], item.session.items
    for other in items[items.index(item) + 1 :]:
        if other.path != item.path or len(tests) == MOST_CASES:
            break
        if not isinstance(other, pytest.Function) or _start_of(other) != _start_of(item):
            continue
        is_skipped = any(other.get_closest_marker(name) for name in ("skip", "skipif", "xfail"))
        if not is_skipped and set(other._fixtureinfo.argnames) <= {*fixtures, *_parameters(other), "tmp_path"}:
            tests.append(other)
    return tests


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _start_of(item: pytest.Function) -> tuple[Any, list[Any]] | None:
    """What tests need to have in common to share a start of ranks; None where a test has one for itself."""
    marker = item.get_closest_marker("ranks")
    if marker is None or not marker.kwargs.get("in_turn"):
        return None
    number = marker.args[0] if len(marker.args) == 1 else _parameters(item)["num_ranks"]
    return _parameters(item).get(number, number), [mark.args for mark in item.iter_markers("filterwarnings")]


def _case_of(item: pytest.Function, fixtures: Mapping[str, Any]) -> _Case:
    names = item._fixtureinfo.argnames
    arguments = {name: {**fixtures, **_parameters(item)}[name] for name in names if name != "tmp_path"}
    is_local = item.get_closest_marker("local_tensors") is not None
    return _Case(item.nodeid, item.function, arguments, "tmp_path" in names, is_local)


def _call(case: _Case, folder: Path) -> None:
    random.seed(0)
    torch.manual_seed(0)
    arguments = dict(case.arguments)
    if case.has_folder:
        folder.mkdir(exist_ok=True)
        arguments["tmp_path"] = folder
    run_test(case.test, arguments, case.is_local)
