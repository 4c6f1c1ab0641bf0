"""A schedule: per rank, the ordered list of its actions in a step. Frozen data, which can be printed and saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from scale_pipe.integers import check_positive
from scale_pipe.schedules.action import COMPUTES, Action, Kind
from scale_pipe.schedules.placement import StagePlacement

FORMAT = 1

Orders = Sequence[Sequence[Action]]
"""By rank what it computes, in order, without transfers."""


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank in one step, in order; `print` shows them as a table, and `validate` checks them.

    Attributes:
        name: Its name in pictures and errors.
        placement: Which rank holds which stage.
        num_micro_batches: The number of micro-batches of a step.
        actions: By rank, in order.

    Raises:
        TypeError: num_micro_batches is not an integer.
        ValueError: num_micro_batches is less than 1, or the number of lists is not the number of ranks.

    Examples:
        >>> from scale_pipe.schedules.classic import one_forward_one_backward
        >>> schedule = one_forward_one_backward(num_ranks=2, num_micro_batches=2)
        >>> [str(action) for action in schedule.actions[0] if action.kind.value in "FB"]
        ['F0.0', 'F0.1', 'B0.0', 'B0.1']

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    name: str
    placement: StagePlacement
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        (number,) = check_positive(num_micro_batches=self.num_micro_batches)
        object.__setattr__(self, "num_micro_batches", number)  # One of Python's, whatever was given.
        if len(self.actions) != self.placement.num_ranks:
            raise ValueError(
                f"schedule {self.name!r} has one list of actions for each rank: the placement has "
                f"{self.placement.num_ranks} ranks, but there are {len(self.actions)} lists"
            )

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages

    @property
    def splits_backward(self) -> bool:
        """Whether any stage computes its two gradients apart."""
        return any(action.kind is Kind.INPUT_GRADIENT for actions in self.actions for action in actions)

    def compute_actions(self) -> tuple[tuple[Action, ...], ...]:
        """Returns by rank its computations, without transfers and steps."""
        return tuple(tuple(action for action in actions if action.kind in COMPUTES) for actions in self.actions)

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule as a value for `json.dumps`."""
        return {
            "format": FORMAT,
            "name": self.name,
            "rank_of_stage": list(self.placement.rank_of),
            "num_micro_batches": self.num_micro_batches,
            "actions": [" ".join(map(str, actions)) for actions in self.actions],
        }

    @classmethod
    def from_json(cls, content: Any) -> Schedule:
        """Reads a result of `to_json`.

        Raises:
            ValueError: It is not a schedule, or it has a different format.
        """
        try:
            file_format = content["format"]
            if file_format != FORMAT:
                raise ValueError(
                    f"expected a schedule of format {FORMAT}, but got format {file_format!r}; build it again"
                )
            return cls(
                name=str(content["name"]),
                placement=StagePlacement(tuple(map(int, content["rank_of_stage"]))),
                num_micro_batches=content["num_micro_batches"],
                actions=tuple(tuple(map(Action.parse, line.split())) for line in content["actions"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the content is not a schedule: {type(error).__name__}: {error}") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the schedule as JSON; a file that exists is replaced."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Schedule:
        """Reads a schedule that `save` has written.

        Raises:
            ValueError: The file holds no schedule.
            OSError: It cannot be read.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # Text that is no JSON is one as well.
            raise ValueError(f"{path} holds no schedule that can be read: {error}") from error

    def __str__(self) -> str:
        lines = self.compute_actions()
        width = max((len(str(action)) for actions in lines for action in actions), default=1)
        head = (
            f"{self.name}: {self.num_stages} stages on {self.num_ranks} ranks ({self.placement.shape}), "
            f"{self.num_micro_batches} micro-batches"
        )
        rows = (f"rank {r}: " + " ".join(f"{action!s:{width}}" for action in row) for r, row in enumerate(lines))
        return "\n".join([head, *(row.rstrip() for row in rows)])


class ScheduleError(ValueError):
    """A schedule is wrong.

    Attributes:
        rank: The rank where it goes wrong; None where it is not about one.
        action: The action; None where it is not about one.
        reason: The mistake in it.

    See also: [the guide to pipeline schedules](../guides/pipe.md#validate-and-simulate).
    """

    def __init__(self, reason: str, rank: int | None = None, action: Action | None = None) -> None:
        where = [f"rank {rank}"] * (rank is not None) + [str(action)] * (action is not None)
        super().__init__(f"{', '.join(where)}: {reason}" if where else reason)
        self.rank = rank
        self.action = action
        self.reason = reason


class DeadlockError(ScheduleError):
    """Ranks wait for each other in a circle. The message says for which action each rank waits.

    See also: [the guide to pipeline schedules](../guides/pipe.md#validate-and-simulate).
    """


class MemoryCapError(ScheduleError):
    """A rank holds more activations than its memory cap.

    See also: [the guide to pipeline schedules](../guides/pipe.md#validate-and-simulate).
    """
