"""Compares a training on several ranks with the same one in one process, and names the first tensor that differs.

Begin with `parity`, for programs that a test builds; `script.command` runs an unchanged training script. `recording`
keeps what a training computes, `noise` measures its rounding, and `comparison` finds the first difference.
"""

import logging

from scale_check.comparison import FirstDifference, ParityVerdict, Report
from scale_check.harness import ParityError, parity

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"

__all__ = ["FirstDifference", "ParityError", "ParityVerdict", "Report", "parity"]

# Tracebacks and documentation show the path that people import from.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
