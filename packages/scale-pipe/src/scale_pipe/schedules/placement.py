"""Which rank holds which stage.

Four ranks with two or four stages each, by the stage's number:

    rank    loop, 2    V (wave, 2)    wave, 4
    0       0  4       0  7           0  7  8  15
    1       1  5       1  6           1  6  9  14
    2       2  6       2  5           2  5  10 13
    3       3  7       3  4           3  4  11 12

In a wave the tensors turn round at the last and at the first rank without leaving them, and the first rank holds the
last stage as well as the first: the gradient ends where the batch has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from scale_pipe.integers import check_positive, checked_arguments


@checked_arguments
@dataclass(frozen=True)
class StagePlacement:
    """The rank of each stage.

    Attributes:
        rank_of: By stage, in the order of the model.

    Raises:
        ValueError: There is no stage, or a rank between 0 and the highest holds none.

    Examples:
        >>> from scale_pipe.schedules.placement import StagePlacement
        >>> StagePlacement((0, 1, 1, 0)).rank_of  # a V of four stages on two ranks
        (0, 1, 1, 0)

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of:
            raise ValueError(
                "a placement has at least one stage, but rank_of is empty; write StagePlacement((0, 1, 2, 3))"
            )
        empty = sorted(set(range(max(self.rank_of) + 1)) - set(self.rank_of))
        if min(self.rank_of) < 0 or empty:
            raise ValueError(
                f"ranks are counted from 0 and each holds a stage, but in rank_of={self.rank_of} "
                + (f"rank {empty[0]} holds none" if empty else f"there is rank {min(self.rank_of)}")
            )

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> StagePlacement:
        """Returns the placement that starts again at the first rank: stage s on rank s mod `num_ranks`.

        Raises:
            ValueError: A number is not positive.
        """
        num_ranks, stages_per_rank = check_positive(num_ranks=num_ranks, stages_per_rank=stages_per_rank)
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def wave(cls, num_ranks: int, stages_per_rank: int = 2) -> StagePlacement:
        """Returns the placement that turns round at the last and at the first rank; a V with two stages per rank.

        Raises:
            ValueError: A number is not positive.
        """
        num_ranks, stages_per_rank = check_positive(num_ranks=num_ranks, stages_per_rank=stages_per_rank)
        ranks = tuple(range(num_ranks))
        return cls(tuple(rank for turn in range(stages_per_rank) for rank in (ranks[::-1] if turn % 2 else ranks)))

    @cached_property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @cached_property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return max(self.rank_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in the order of the model."""
        return tuple(tuple(s for s, r in enumerate(self.rank_of) if r == rank) for rank in range(self.num_ranks))

    @property
    def shape(self) -> str:
        """`loop`, `V`, `wave`, or `ranks 0 1 0` where it is none of these."""
        rounds, remainder = divmod(self.num_stages, self.num_ranks)
        if not remainder and self == StagePlacement.loop(self.num_ranks, rounds):
            return "loop"
        if not remainder and self == StagePlacement.wave(self.num_ranks, rounds):
            return "V" if rounds == 2 else "wave"
        return f"ranks {' '.join(map(str, self.rank_of))}"
