"""What tests of programs on FairScale import. Begin with `testing.py`."""

from fairscale.fair_dev.testing.testing import (
    DummyProcessGroup,
    dist_init,
    objects_are_equal,
    skip_if_no_cuda,
    skip_if_single_gpu,
    teardown,
    temp_files_ctx,
)

__all__ = [
    "DummyProcessGroup",
    "dist_init",
    "objects_are_equal",
    "skip_if_no_cuda",
    "skip_if_single_gpu",
    "teardown",
    "temp_files_ctx",
]
