"""What a wrapper is doing, and the errors of methods that are called at another time."""

from __future__ import annotations

import enum


class TrainingState(enum.Enum):
    """What a wrapper is doing."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


class TrainingStateError(ValueError, RuntimeError):
    """A method was called amid a pass; a ValueError as in FairScale, and a RuntimeError as in scale-fsdp."""


class NotTheRootError(AssertionError, ValueError):
    """A method of the outermost wrapper was called on one inside; an AssertionError as in FairScale."""
