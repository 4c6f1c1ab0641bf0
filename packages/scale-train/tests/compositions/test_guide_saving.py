"""The examples of the guide on saving and loading."""

from __future__ import annotations

import doctest
from pathlib import Path

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "saving.md"


def test_the_examples_of_the_guide_on_saving_run() -> None:
    failed, run = doctest.testfile(str(GUIDE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert run > 20
    assert failed == 0
