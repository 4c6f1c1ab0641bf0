"""The older path of `fairscale.fair_dev.testing`."""

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
