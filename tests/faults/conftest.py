"""Runs without faults, to which the tests compare."""

from functools import cache
from pathlib import Path

import pytest
from fault_trainings import Whole, train

from scale_core.testing import run_ranks


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Gives the folder of a run without faults, which is run once for each kind and number of ranks."""

    @cache
    def folder(kind: str, num_ranks: int) -> Path:
        path = tmp_path_factory.mktemp(kind)
        assert run_ranks(train, num_ranks, kind, str(path)) == [0] * num_ranks
        return path

    return folder
