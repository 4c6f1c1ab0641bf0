"""Lower bounds of the makespan, each with its proof.

With P ranks, M micro-batches, times F, I and W of each stage, and rank r's cap of C live (stage, micro-batch):

*Critical path.* A micro-batch passes all stages forwards, all stages back, and the first stage's weight gradient.

*Rank.* A rank r can't start before a micro-batch has come to its first stage (`head`), and has M times its stages'
work to do. Until the first gradient can have come back to it, at time `turn`, it has only forwards to do, and of
these only C, since only a weight gradient, which needs an input gradient, frees a place. So it is idle for turn - head
less the C longest forwards, if that is positive. In the same way, after its last input gradient it has only weight
gradients left, C at most, but the gradient it sent still passes all stages before (`tail`), and the first stage's
weight gradient. The two idle times do not overlap: the one lies before the first input gradient, the other after the
last. So

    makespan >= head + work + max(0, turn - head - forwards of C) + max(0, tail - weight gradients of C)

and the largest over all ranks counts. It does not depend on how finely the weight gradients are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_pipe.integers import check_positive, checked_arguments
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.validate import caps_by_rank


@dataclass(frozen=True)
class RankBound:
    """The terms of one rank's bound.

        >>> from scale_pipe import Costs
        >>> from scale_pipe.schedules.placement import StagePlacement
        >>> from scale_pipe.schedules.solver.bounds import lower_bound
        >>> [bound.work for bound in lower_bound(StagePlacement((0, 1)), 4, Costs.uniform(2)).ranks]
        [12.0, 12.0]

    Attributes:
        head: When its first forward can start.
        work: The time of all of its computations.
        idle_at_start: How long it has nothing to do before its first gradient comes.
        idle_at_end: How long it has nothing to do while its last gradient passes the stages before.

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    head: float
    work: float
    idle_at_start: float
    idle_at_end: float

    @property
    def makespan(self) -> float:
        """The sum of the terms."""
        return self.head + self.work + self.idle_at_start + self.idle_at_end


@dataclass(frozen=True)
class Bound:
    """A lower bound of the makespan of all schedules of a placement.

        >>> from scale_pipe import Costs
        >>> from scale_pipe.schedules.placement import StagePlacement
        >>> from scale_pipe.schedules.solver.bounds import lower_bound
        >>> lower_bound(StagePlacement((0, 1)), 4, Costs.uniform(2)).critical_path
        5.0

    Attributes:
        critical_path: The time of one micro-batch through all stages and back.
        ranks: The bound of each rank.

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    critical_path: float
    ranks: tuple[RankBound, ...]

    @property
    def makespan(self) -> float:
        """The largest of the bounds."""
        return max(self.critical_path, *(rank.makespan for rank in self.ranks))

    @property
    def bubble(self) -> float:
        """The least bubble of any schedule."""
        return 1 - max(rank.work for rank in self.ranks) / self.makespan if self.makespan else 0.0

    @property
    def reason(self) -> str:
        """The reason why schedules can't be faster, in words."""
        busiest = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].makespan)
        if self.critical_path > self.ranks[busiest].makespan:
            return f"one micro-batch takes {self.critical_path:g} through all stages and back"
        terms = self.ranks[busiest]
        return (
            f"rank {busiest} starts at {terms.head:g} at the soonest, works {terms.work:g}, and has nothing to do for "
            f"{terms.idle_at_start:g} before its first gradient and {terms.idle_at_end:g} after its last"
        )


@checked_arguments
def lower_bound(
    placement: StagePlacement,
    num_micro_batches: int,
    costs: Costs,
    memory_cap: float | Sequence[float] | None = None,
) -> Bound:
    """Returns a lower bound of the makespan of all schedules of a placement.

    Args:
        placement: The rank of each stage.
        num_micro_batches: M.
        costs: Times of its stages and links.
        memory_cap: Live micro-batches in model equivalents, for all ranks or by rank; None for no limit.

    Raises:
        ValueError: The costs are for a different number of stages, or the number of caps is not the number of ranks.

    Examples:
        >>> from scale_pipe import Costs
        >>> from scale_pipe.schedules.placement import StagePlacement
        >>> from scale_pipe.schedules.solver.bounds import lower_bound
        >>> bound = lower_bound(StagePlacement((0, 1)), 4, Costs.uniform(2))
        >>> bound.makespan
        13.0

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    check_positive(num_micro_batches=num_micro_batches)
    costs.check_for(placement)
    caps = caps_by_rank(memory_cap, placement.num_ranks)
    last = placement.num_stages - 1
    rank_of = placement.rank_of
    links = [costs.link[stage] if rank_of[stage] != rank_of[stage + 1] else 0.0 for stage in range(last)]

    def first_forward(stage: int) -> float:
        return sum(costs.forward[:stage]) + sum(links[:stage])

    def first_gradient(stage: int) -> float:
        return first_forward(last) + costs.forward[last] + sum(links[stage:]) + sum(costs.input_gradient[stage + 1 :])

    ranks = []
    for rank, stages in enumerate(placement.stages_of):
        places = cap_in_stages(caps[rank], len(stages), num_micro_batches)
        forwards = sorted((costs.forward[s] for s in stages for _ in range(num_micro_batches)), reverse=True)
        weights = sorted((costs.weight_gradient[s] for s in stages for _ in range(num_micro_batches)), reverse=True)
        head, turn, first = min(map(first_forward, stages)), min(map(first_gradient, stages)), min(stages)
        tail = sum(costs.input_gradient[:first]) + sum(links[:first]) + (costs.weight_gradient[0] if first else 0.0)
        ranks.append(
            RankBound(
                head=head,
                work=num_micro_batches * sum(map(costs.stage_time, stages)),
                idle_at_start=max(0.0, turn - head - sum(forwards[:places])),
                idle_at_end=max(0.0, tail - sum(weights[:places])),
            )
        )
    return Bound(first_gradient(0) + costs.input_gradient[0] + costs.weight_gradient[0], tuple(ranks))


def cap_in_stages(cap: float, num_stages: int, num_micro_batches: int) -> int:
    """Returns how many (stage, micro-batch) may live on a rank of so many stages, from a cap in model equivalents."""
    return int(min(cap, num_micro_batches) * num_stages + 1e-9)
