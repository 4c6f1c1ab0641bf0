"""What holds for the tests of every package: some need a CUDA device, and ranks import once what many tests need."""

import re
import sys

import pytest

# Of what the tests have imported, this takes ranks so long to import that it shows in every test.
SHARED = re.compile(
    r"pytest|hypothesis|scale_\w+|peft|transformers\.modeling_outputs|transformers\.models\.\w+\.modeling_\w+"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no CUDA device; torch is asked only if there is such a test."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Has the server that ranks are forked from import what the tests have imported."""
    testing = sys.modules.get("scale_core.testing")
    if testing is not None:
        testing.preload(*filter(SHARED.fullmatch, sorted(sys.modules)))
