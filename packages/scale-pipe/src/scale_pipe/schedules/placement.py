"""Which rank holds which stage.

Four ranks with two or four stages each, by the stage's number:

    rank    loop, 2    V (wave, 2)    wave, 4
    0       0  4       0  7           0  7  8  15
    1       1  5       1  6           1  6  9  14
    2       2  6       2  5           2  5  10 13
    3       3  7       3  4           3  4  11 12

In a wave the tensors turn round at the last and at the first rank without leaving them, and the first rank holds the
last stage as well as the first: the gradient comes back where the batch went in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from scale_pipe.integers import check_positive


@dataclass(frozen=True)
class Placement:
    """The rank of each stage.

    Attributes:
        rank_of: By stage, in the order of the model.

    Raises:
        ValueError: There is no stage, or a rank between 0 and the highest holds none.
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of:
            raise ValueError("a placement has at least one stage, but rank_of is empty; write Placement((0, 1, 2, 3))")
        empty = sorted(set(range(max(self.rank_of) + 1)) - set(self.rank_of))
        if min(self.rank_of) < 0 or empty:
            raise ValueError(
                f"ranks are counted from 0 and each holds a stage, but in rank_of={self.rank_of} "
                + (f"rank {empty[0]} holds none" if empty else f"there is rank {min(self.rank_of)}")
            )

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Returns the placement that starts again at the first rank: stage s stands on rank s mod P.

        Args:
            num_ranks: P.
            stages_per_rank: How many rounds.

        Raises:
            ValueError: A number is not positive.
        """
        num_ranks, stages_per_rank = check_positive(num_ranks=num_ranks, stages_per_rank=stages_per_rank)
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def wave(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Returns the placement that turns round at the last and at the first rank; a V with two stages per rank.

        Args:
            num_ranks: P.
            stages_per_rank: How many times the ranks are passed.

        Raises:
            ValueError: A number is not positive.
        """
        num_ranks, stages_per_rank = check_positive(num_ranks=num_ranks, stages_per_rank=stages_per_rank)
        there, back = tuple(range(num_ranks)), tuple(reversed(range(num_ranks)))
        return cls(tuple(rank for turn in range(stages_per_rank) for rank in (back if turn % 2 else there)))

    @cached_property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return max(self.rank_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in the order of the model."""
        stages = range(self.num_stages)
        return tuple(tuple(s for s in stages if self.rank_of[s] == rank) for rank in range(self.num_ranks))

    @property
    def shape(self) -> str:
        """`loop`, `V`, `wave`, or `ranks 0 1 0` where it is none of these."""
        rounds, rest = divmod(self.num_stages, self.num_ranks)
        if not rest and self == Placement.loop(self.num_ranks, rounds):
            return "loop"
        if not rest and self == Placement.wave(self.num_ranks, rounds):
            return "V" if rounds == 2 else "wave"
        return f"ranks {' '.join(map(str, self.rank_of))}"
