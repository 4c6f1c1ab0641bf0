"""The classic schedules: GPipe, 1F1B, interleaved 1F1B and looped breadth-first, each a pure function.

They have P ranks (`num_ranks`) and M micro-batches.

Sources: GPipe, arXiv 1811.06965; 1F1B, PipeDream-Flush, arXiv 2006.09503; interleaved, arXiv 2104.04473; breadth-first,
arXiv 2211.05953.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from scale_pipe.integers import check_positive
from scale_pipe.schedules.action import Action, backward, forward
from scale_pipe.schedules.lowering import build_schedule
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import Schedule


def gpipe(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """GPipe: all forwards, then all backwards in the reverse order. Holds all micro-batches.

    With 2 ranks and 3 micro-batches:

        rank 0: F0.0 F0.1 F0.2                B0.2 B0.1 B0.0
        rank 1:      F1.0 F1.1 F1.2 B1.2 B1.1 B1.0

    With several stages per rank (in a loop) each micro-batch passes a rank's stages as it arrives.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import gpipe
        >>> round(simulate(gpipe(4, 8)).bubble, 2)  # (P - 1) / (M + P - 1)
        0.27

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    placement, num_micro_batches = _looped(num_ranks, num_micro_batches, stages_per_rank)
    orders = []
    for stages in placement.stages_of:
        passes = sorted((s + m, m, s) for s in stages for m in range(num_micro_batches))
        forwards = [forward(s, m) for _, m, s in passes]
        orders.append([*forwards, *(backward(f.stage, f.micro_batch) for f in reversed(forwards))])
    return build_schedule("GPipe", placement, num_micro_batches, orders)


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B: as few forwards as fill the pipeline, then a backward after each forward.

    With 2 ranks and 3 micro-batches:

        rank 0: F0.0 F0.1           B0.0 F0.2      B0.1      B0.2
        rank 1:      F1.0 B1.0 F1.1 B1.1      F1.2 B1.2

    Rank r holds P - r micro-batches; the bubble is the same as in GPipe.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import one_forward_one_backward
        >>> round(simulate(one_forward_one_backward(4, 8)).bubble, 2)  # as GPipe, with P live micro-batches
        0.27

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    placement, num_micro_batches = _looped(num_ranks, num_micro_batches)
    batches = range(num_micro_batches)
    orders = [
        _alternate([forward(rank, m) for m in batches], [backward(rank, m) for m in batches], warmup)
        for rank, warmup in enumerate(reversed(range(placement.num_ranks)))
    ]
    return build_schedule("1F1B", placement, num_micro_batches, orders)


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B with several stages per rank, in a loop: the pipeline fills in stages, which are shorter than ranks.

    Any number of micro-batches passes all stages in rounds of at least P, so that no rank waits. There are as many
    rounds as possible, of equal sizes if possible. Its bubble is minimal from P micro-batches on; where P does not
    divide their number, larger rounds hold more. With one stage per rank it is 1F1B.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import interleaved_1f1b
        >>> round(simulate(interleaved_1f1b(4, 8, stages_per_rank=2)).bubble, 2)
        0.16

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    placement, num_micro_batches = _looped(num_ranks, num_micro_batches, stages_per_rank)
    num_ranks = placement.num_ranks
    if placement.num_stages == num_ranks:
        return one_forward_one_backward(num_ranks, num_micro_batches)
    num_rounds = max(1, num_micro_batches // num_ranks)
    sizes = [len(range(turn, num_micro_batches, num_rounds)) for turn in range(num_rounds)]
    orders = []
    for rank, stages in enumerate(placement.stages_of):
        forwards = [forward(s, m) for s, m in _in_rounds(stages, sizes)]
        backwards = [backward(s, m) for s, m in _in_rounds(stages[::-1], sizes)]
        orders.append(_alternate(forwards, backwards, 2 * (num_ranks - rank - 1) + (len(stages) - 1) * sizes[0]))
    return build_schedule("Interleaved 1F1B", placement, num_micro_batches, orders)


def looped_breadth_first(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """All micro-batches through one stage before the next stage of the rank's loop; backwards in the same way.

    Holds all micro-batches; a stage's weights are used in one go, which suits weights that are gathered for their use.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.classic import looped_breadth_first
        >>> round(simulate(looped_breadth_first(4, 8, stages_per_rank=2)).bubble, 2)
        0.16

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    placement, num_micro_batches = _looped(num_ranks, num_micro_batches, stages_per_rank)
    batches = range(num_micro_batches)
    orders = [
        [forward(s, m) for s in stages for m in batches]
        + [backward(s, m) for s in reversed(stages) for m in reversed(batches)]
        for stages in placement.stages_of
    ]
    return build_schedule("Looped breadth-first", placement, num_micro_batches, orders)


def _looped(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> tuple[StagePlacement, int]:
    """Returns the loop of stages, and the number of micro-batches as an int."""
    num_ranks, num_micro_batches, stages_per_rank = check_positive(
        num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank
    )
    return StagePlacement.loop(num_ranks, stages_per_rank), num_micro_batches


def _in_rounds(stages: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (stage, micro-batch): each round of micro-batches passes all stages before the next round."""
    starts = accumulate(sizes, initial=0)
    return [(s, start + m) for start, size in zip(starts, sizes, strict=False) for s in stages for m in range(size)]


def _alternate(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Action]:
    """Returns forwards and backwards in turn, after some warm-up forwards."""
    num_warmup = min(num_warmup, len(forwards))
    order = forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        order += pair
    return order + backwards[len(forwards) - num_warmup :]
