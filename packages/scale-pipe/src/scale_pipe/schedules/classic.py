"""The classic schedules: GPipe, 1F1B, interleaved 1F1B and looped breadth-first, each a pure function.

Sources: GPipe, arXiv 1811.06965; 1F1B, PipeDream-Flush, arXiv 2006.09503; interleaved, arXiv 2104.04473; breadth-first,
arXiv 2211.05953.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from scale_pipe.integers import check_positive
from scale_pipe.schedules.action import Action, backward, forward
from scale_pipe.schedules.lowering import weave
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule


def gpipe(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards in the reverse order.

    With 2 ranks and 3 micro-batches:

        rank 0: F0.0 F0.1 F0.2                B0.2 B0.1 B0.0
        rank 1:      F1.0 F1.1 F1.2 B1.2 B1.1 B1.0

    Holds all micro-batches. With several stages per rank each micro-batch passes a rank's stages as it comes.

    Args:
        num_ranks: P.
        num_micro_batches: M.
        stages_per_rank: Stages of one rank, in a loop.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches, stages_per_rank = check_positive(
        num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank
    )
    placement = Placement.loop(num_ranks, stages_per_rank)
    batches = range(num_micro_batches)

    def order(rank: int) -> list[Action]:
        passes = sorted(
            (
                (stage + micro_batch, stage, micro_batch)
                for stage in placement.stages_of[rank]
                for micro_batch in batches
            ),
            key=lambda entry: (entry[0], -entry[1]),
        )
        there = [forward(stage, micro_batch) for _, stage, micro_batch in passes]
        return there + [backward(stage, micro_batch) for _, stage, micro_batch in reversed(passes)]

    return weave("GPipe", placement, num_micro_batches, [order(rank) for rank in range(num_ranks)])


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B: as few forwards as fill the pipeline, then a backward after each forward.

    With 2 ranks and 3 micro-batches:

        rank 0: F0.0 F0.1           B0.0 F0.2      B0.1      B0.2
        rank 1:      F1.0 B1.0 F1.1 B1.1      F1.2 B1.2

    Rank r holds P - r micro-batches; the bubble is that of GPipe.

    Args:
        num_ranks: P.
        num_micro_batches: M.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    batches = range(num_micro_batches)
    orders = [
        _alternating([forward(rank, m) for m in batches], [backward(rank, m) for m in batches], num_ranks - rank - 1)
        for rank in range(num_ranks)
    ]
    return weave("1F1B", Placement.loop(num_ranks), num_micro_batches, orders)


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B with several stages per rank: the pipeline fills in stages, which are shorter than ranks.

    Micro-batches pass all stages in rounds of at least P, so that none waits for another: as many rounds as there can
    be, and even ones. Its bubble is the least that there is from P micro-batches on; where P does not divide their
    number, larger rounds hold more.

    Args:
        num_ranks: P.
        num_micro_batches: M; needs no multiple of P.
        stages_per_rank: v, in a loop; with 1 it is 1F1B.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches, stages_per_rank = check_positive(
        num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank
    )
    if stages_per_rank == 1:
        return one_forward_one_backward(num_ranks, num_micro_batches)
    placement = Placement.loop(num_ranks, stages_per_rank)
    num_rounds = max(1, num_micro_batches // num_ranks)
    sizes = [len(range(turn, num_micro_batches, num_rounds)) for turn in range(num_rounds)]
    orders = []
    for rank, stages in enumerate(placement.stages_of):
        there = [forward(s, m) for s, m in _in_rounds(stages, sizes)]
        back = [backward(s, m) for s, m in _in_rounds(stages[::-1], sizes)]
        orders.append(_alternating(there, back, 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * sizes[0]))
    return weave("Interleaved 1F1B", placement, num_micro_batches, orders)


def looped_breadth_first(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """All micro-batches through one stage before the next stage of the rank; backwards likewise.

    Holds all micro-batches; a stage's weights are used in one go, which suits weights that are gathered for their use.

    Args:
        num_ranks: P.
        num_micro_batches: M.
        stages_per_rank: Stages of one rank, in a loop.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches, stages_per_rank = check_positive(
        num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank
    )
    placement = Placement.loop(num_ranks, stages_per_rank)
    batches = range(num_micro_batches)
    orders = [
        [forward(s, m) for s in stages for m in batches]
        + [backward(s, m) for s in reversed(stages) for m in reversed(batches)]
        for stages in placement.stages_of
    ]
    return weave("Looped breadth-first", placement, num_micro_batches, orders)


def without_surplus(orders: Sequence[Sequence[Action]], num_micro_batches: int) -> list[list[Action]]:
    """Returns orders without the micro-batches that are not there.

    What one micro-batch does never waits for another's, so what is left still runs, and holds no more.

    Args:
        orders: By rank, for at least as many micro-batches.
        num_micro_batches: How many there are.
    """
    return [[action for action in order if action.micro_batch < num_micro_batches] for order in orders]


def _in_rounds(stages: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (stage, micro-batch): each round of micro-batches passes all stages before the next round."""
    starts = accumulate(sizes, initial=0)
    return [(s, start + m) for start, size in zip(starts, sizes, strict=False) for s in stages for m in range(size)]


def _alternating(there: list[Action], back: list[Action], num_ahead: int) -> list[Action]:
    """Returns forwards and backwards in turn, after some forwards ahead."""
    num_ahead = min(num_ahead, len(there))
    order = there[:num_ahead]
    for index, action in enumerate(there[num_ahead:]):
        order += [action, back[index]]
    return order + back[len(there) - num_ahead :]
