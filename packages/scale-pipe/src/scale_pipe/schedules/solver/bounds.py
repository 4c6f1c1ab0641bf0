"""What no schedule can beat: lower bounds of the makespan, each with its proof.

With P ranks, M micro-batches, times F, I and W of each stage, and rank r's cap of C live (stage, micro-batch):

*Critical path.* A micro-batch passes all stages forwards, all stages back, and the first stage's weight gradient.

*Rank.* A rank r can't start before a micro-batch has come to its first stage (`head`), and has M times its stages'
work to do. Until the first gradient can have come back to it, at time `turn`, it has only forwards to do, and of
these only C, since a place becomes free with a weight gradient only, which needs an input gradient. So it is idle for
turn - head less the C longest forwards, if that is positive. In the same way, after its last input gradient it has
only weight gradients left, C at most, but the gradient it sent still passes all stages before (`tail`), and the first
stage's weight gradient. The two idle times do not overlap: the one lies before the first input gradient, the other
after the last. So

    makespan >= head + work + max(0, turn - head - forwards of C) + max(0, tail - weight gradients of C)

and the largest over all ranks counts. It does not depend on how finely the weight gradients are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.validate import caps_by_rank


@dataclass(frozen=True)
class RankBound:
    """The terms of one rank's bound.

    Attributes:
        head: When its first forward can start.
        work: The time of all of its computations.
        idle_at_start: How long it has nothing to do before its first gradient comes.
        idle_at_end: How long it has nothing to do while its last gradient passes the stages before.
    """

    head: float
    work: float
    idle_at_start: float
    idle_at_end: float

    @property
    def makespan(self) -> float:
        """The bound."""
        return self.head + self.work + self.idle_at_start + self.idle_at_end


@dataclass(frozen=True)
class Bound:
    """What no schedule of a placement can beat.

    Attributes:
        critical_path: The way of one micro-batch there and back.
        ranks: By rank.
    """

    critical_path: float
    ranks: tuple[RankBound, ...]

    @property
    def makespan(self) -> float:
        """The largest of all."""
        return max(self.critical_path, *(rank.makespan for rank in self.ranks))

    @property
    def bubble(self) -> float:
        """The bubble that no schedule can beat."""
        return 1 - max(rank.work for rank in self.ranks) / self.makespan if self.makespan else 0.0

    @property
    def reason(self) -> str:
        """What it is that holds a schedule up, in a few words."""
        busiest = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].makespan)
        if self.critical_path > self.ranks[busiest].makespan:
            return f"one micro-batch takes {self.critical_path:g} there and back"
        terms = self.ranks[busiest]
        return (
            f"rank {busiest} starts at {terms.head:g} at the soonest, works {terms.work:g}, and has nothing to do for "
            f"{terms.idle_at_start:g} before its first gradient and {terms.idle_at_end:g} after its last"
        )


def lower_bound(
    placement: Placement,
    num_micro_batches: int,
    costs: Costs,
    memory_cap: float | Sequence[float] | None = None,
) -> Bound:
    """Returns what no schedule of a placement can beat.

    Args:
        placement: Which rank holds which stage.
        num_micro_batches: M.
        costs: Times of its stages and links.
        memory_cap: Live micro-batches in model equivalents, for all ranks or by rank; None for no limit.

    Raises:
        ValueError: The costs are for another number of stages, or there is not one cap for each rank.
    """
    costs.check_for(placement)
    caps = caps_by_rank(memory_cap, placement.num_ranks)
    last = placement.num_stages - 1
    rank_of = placement.rank_of
    links = [costs.link[stage] if rank_of[stage] != rank_of[stage + 1] else 0.0 for stage in range(last)]

    def there(stage: int) -> float:
        """When a stage's first forward can start."""
        return sum(costs.forward[:stage]) + sum(links[:stage])

    def back(stage: int) -> float:
        """When a stage's first input gradient can start."""
        return there(last) + costs.forward[last] + sum(links[stage:]) + sum(costs.input_gradient[stage + 1 :])

    ranks = []
    for rank, stages in enumerate(placement.stages_of):
        places = cap_in_stages(caps[rank], len(stages), num_micro_batches)
        forwards = sorted((costs.forward[s] for s in stages for _ in range(num_micro_batches)), reverse=True)
        weights = sorted((costs.weight_gradient[s] for s in stages for _ in range(num_micro_batches)), reverse=True)
        head, turn, first = min(map(there, stages)), min(map(back, stages)), min(stages)
        tail = sum(costs.input_gradient[:first]) + sum(links[:first]) + (costs.weight_gradient[0] if first else 0.0)
        ranks.append(
            RankBound(
                head=head,
                work=num_micro_batches * sum(map(costs.work, stages)),
                idle_at_start=max(0.0, turn - head - sum(forwards[:places])),
                idle_at_end=max(0.0, tail - sum(weights[:places])),
            )
        )
    return Bound(back(0) + costs.input_gradient[0] + costs.weight_gradient[0], tuple(ranks))


def cap_in_stages(cap: float, num_stages: int, num_micro_batches: int) -> int:
    """Returns how many (stage, micro-batch) a cap in model equivalents lets live on a rank.

    Args:
        cap: Live micro-batches in model equivalents.
        num_stages: Stages of the rank.
        num_micro_batches: More than all of them never live.
    """
    return int(min(cap, num_micro_batches) * num_stages + 1e-9)
