"""The examples of the guides on checkpoints."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@pytest.mark.parametrize("guide", ["saving.md", "checkpoint-formats.md"])
def test_the_examples_of_the_guides_on_checkpoints_run(guide: str) -> None:
    failed, run = doctest.testfile(str(GUIDES / guide), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert run > 20
    assert failed == 0
