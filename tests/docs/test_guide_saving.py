"""The examples of the guide on checkpoints."""

from __future__ import annotations

import doctest
from pathlib import Path

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def test_the_examples_of_the_guide_on_checkpoints_run() -> None:
    failed, run = doctest.testfile(str(GUIDES / "saving.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert run > 60
    assert failed == 0
