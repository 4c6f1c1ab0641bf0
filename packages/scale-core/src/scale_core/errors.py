"""The errors that scale raises of its own accord while a program runs, in one tree.

    ScaleError
    |-- LaunchError                the ranks did not find each other
    |-- ScaleDistributedError      the ranks run different things, or can't reach each other
    |   |-- ContractError          they run, or are about to run, different things
    |   |   `-- DivergenceError    they hold different values of what must be equal
    |   `-- StepError              another rank failed, so all gave the step up; training can go on
    |-- TransferError              one collective failed or timed out; above it, a ScaleDistributedError says why
    `-- SnapshotError              saving or loading failed on all ranks alike

A wrong argument is a `ValueError` or a `TypeError`, as anywhere in Python. The text of a transport (gloo, NCCL) is the
cause of such an error, never its message.
"""

from __future__ import annotations

import re

# All errors of a transport are of one type; only their texts differ.
_CLOSED_BY_PEER = re.compile("(closed|reset) by peer")


class ScaleError(RuntimeError):
    """The base of all of them."""


class LaunchError(ScaleError):
    """The ranks did not find each other; the message lists the variables that this rank saw."""


class ScaleDistributedError(ScaleError):
    """The ranks of a group run different things, or can't reach each other.

    Attributes:
        step: The pass in which it was seen, counted from 1.
        unit: The unit at which it was seen.
    """

    def __init__(self, message: str, *, step: int = 0, unit: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.unit = unit


class ContractError(ScaleDistributedError):
    """The ranks have run, or are about to run, different things."""


class DivergenceError(ContractError):
    """The ranks hold different values of a parameter, a buffer or an input that must be the same on all of them.

    Attributes:
        names: What differs, by qualified name and shape.
        ranks: Those of the group's ranks that hold others than most do.
    """

    def __init__(
        self, message: str, *, step: int = 0, names: tuple[str, ...] = (), ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message, step=step)
        self.names = names
        self.ranks = ranks


class StepError(ScaleDistributedError):
    """Another rank failed in this step, so all ranks gave it up; a rank that failed itself raises its own error.

    Parameters and the optimizer's state are as they were before the step, and training can go on with the next batch.
    For gradients accumulated before it, see the guide of the technique.
    """


class TransferError(ScaleError):
    """A collective failed or timed out.

    Attributes:
        op: The collective, such as "all_gather".
        peer: The rank of the group that was waited for, or None where the transport does not say.
        gone: The same, where that rank has closed the connection, as it does by ending; otherwise None.
    """

    def __init__(self, op: str, peer: int | None, cause: str) -> None:
        whom = "the group" if peer is None else f"rank {peer}"
        super().__init__(f"{op} with {whom} failed: {cause}")
        self.op = op
        self.peer = peer
        self.gone = peer if _CLOSED_BY_PEER.search(cause) else None
        self._cause = cause

    def __reduce__(self) -> tuple[type[TransferError], tuple[str, int | None, str]]:
        return type(self), (self.op, self.peer, self._cause)


class SnapshotError(ScaleError):
    """Saving or loading failed, on every rank alike; `__cause__` is what was raised where it failed."""
