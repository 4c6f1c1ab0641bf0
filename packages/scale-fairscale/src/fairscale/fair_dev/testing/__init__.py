"""What tests of programs on FairScale import. Begin with `testing.py`."""

from fairscale.fair_dev.testing.testing import *  # noqa: F403
from fairscale.fair_dev.testing.testing import __all__ as __all__
