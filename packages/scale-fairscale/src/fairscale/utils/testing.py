"""The older path of `fairscale.fair_dev.testing`."""

from fairscale.fair_dev.testing.testing import *  # noqa: F403
from fairscale.fair_dev.testing.testing import __all__ as __all__
