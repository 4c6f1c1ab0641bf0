"""What is wrong with a schedule, and where."""

from __future__ import annotations

from scale_pipe.schedules.action import Action


class ScheduleError(ValueError):
    """A schedule does not do what it is for.

    Attributes:
        rank: Where it goes wrong; None where no rank does it.
        action: At which action; None where it is not about one.
        reason: What is wrong with it.
    """

    def __init__(self, reason: str, rank: int | None = None, action: Action | None = None) -> None:
        where = [f"rank {rank}"] * (rank is not None) + [str(action)] * (action is not None)
        super().__init__(f"{', '.join(where)}: {reason}" if where else reason)
        self.rank = rank
        self.action = action
        self.reason = reason


class DeadlockError(ScheduleError):
    """Ranks wait for one another in a circle. The message says for each what it waits for."""


class MemoryCapError(ScheduleError):
    """A rank holds more activations than it may."""
