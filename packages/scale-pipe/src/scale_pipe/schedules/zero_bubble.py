"""Schedules that compute the gradients of inputs and of weights apart: ZB-H1, ZB-V, V-Half, V-Min and DualPipe-V.

Other ranks wait for the gradient of the input only, so weight gradients fill the idle time. The schedules
differ in the placement and in how many micro-batches may be live, in model equivalents:

    ZB-H1     one stage per rank     P             1F1B's memory, a third of its bubble
    ZB-V      a V                    P             no bubble but the fill where the three times are equal
    V-Half    a V                    P/2 + 1       half the memory
    V-Min     a V                    (P + 4) / 3   a third of it

ZB-H1 is 1F1B with every weight gradient delayed by as many micro-batches as 1F1B leaves free on that rank. The V
schedules are list schedules: a free rank takes a forward or an input gradient that is ready, the one kind before the
other, and a weight gradient only where neither is ready, or where no activation fits any more. Several priority rules
are tried, and the one is taken that is best where the three times are equal. Where measured times are far from equal,
`solve` finds better ones.

Sources: arXiv 2401.10241 (ZB-H1), 2405.15362 (the V schedules).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache
from math import inf

from scale_pipe.integers import check_positive
from scale_pipe.schedules.action import Action, Kind, forward, input_gradient, weight_gradient
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.list_scheduling import Codes, Problem, evaluate, list_schedule
from scale_pipe.schedules.lowering import build_schedule
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import Schedule

PATIENCE = (0.0, 0.5, 0.99)
ASSUMED_TIMES = (
    (1, 1, 1),
    (1, 1.6, 0.8),
    (1, 1.6, 1),
    (0.8, 1.2, 0.6),
    (0.8, 1.2, 1),
    (0.8, 1, 1),
    (0.6, 1, 0.6),
    (0.6, 1.2, 0.8),
)
"""Times of forward, input and weight gradient that list scheduling assumes; the order that follows depends on them."""


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns ZB-H1 for P ranks and M micro-batches: one stage per rank, P micro-batches live.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.zero_bubble import zb_h1
        >>> round(simulate(zb_h1(4, 8)).bubble, 2)
        0.11

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    orders = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - rank - 1, num_micro_batches)
        order = [forward(rank, m) for m in range(warmup)]
        for m in range(num_micro_batches):
            order += [forward(rank, m + warmup)] if m + warmup < num_micro_batches else []
            order += [input_gradient(rank, m)]
            order += [weight_gradient(rank, m - rank)] if m >= rank else []
        delayed = range(max(num_micro_batches - rank, 0), num_micro_batches)
        orders.append(order + [weight_gradient(rank, m) for m in delayed])
    return build_schedule("ZB-H1", StagePlacement.loop(num_ranks), num_micro_batches, orders)


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns ZB-V for P ranks and M micro-batches: two stages per rank in a V, P micro-batches live.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.zero_bubble import zb_v
        >>> round(simulate(zb_v(4, 8)).bubble, 2)
        0.06

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    return _best_list_schedule("ZB-V", num_ranks, num_micro_batches, 2 * num_ranks)


def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns V-Half for P ranks and M micro-batches: two stages per rank in a V, P/2 + 1 micro-batches live.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.zero_bubble import v_half
        >>> simulate(v_half(4, 8)).schedule.placement.rank_of
        (0, 1, 2, 3, 3, 2, 1, 0)

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    return _best_list_schedule("V-Half", num_ranks, num_micro_batches, 2 * ((num_ranks + 2) // 2))


def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns V-Min for P ranks and M micro-batches: two stages per rank in a V, (P + 4) / 3 micro-batches live.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.zero_bubble import v_min
        >>> round(simulate(v_min(4, 8)).bubble, 2)
        0.29

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    return _best_list_schedule("V-Min", num_ranks, num_micro_batches, 2 * ((num_ranks + 4) // 3))


def priority_rules(problem: Problem) -> Iterator[tuple[list[float], float]]:
    """Yields the priorities and patience of each rule: which kind and which stage of a rank goes first."""
    for forwards_first in (False, True):
        for deep_gradients_first in (True, False):
            by_kind: list[list[float]] = [[], [], []]
            for stage, rank in enumerate(problem.placement.rank_of):
                depth = 0.01 * problem.placement.stages_of[rank].index(stage)
                by_kind[0].append((0.0 if forwards_first else 2.0) - depth)
                by_kind[1].append(1.0 - depth if deep_gradients_first else 1.0 + depth)
                by_kind[2].append(3.0 - depth)
            priorities = [value for kind in by_kind for value in kind for _ in range(problem.num_micro_batches)]
            for patience in PATIENCE:
                yield priorities, patience


@lru_cache(maxsize=64)
def _best_list_schedule(name: str, num_ranks: int, num_micro_batches: int, cap: int) -> Schedule:
    """Returns the best rule's V at equal times, with at most `cap` (stage, micro-batch) live on a rank."""
    placement = StagePlacement.wave(num_ranks)

    def problem(forward: float, input_gradient: float, weight_gradient: float) -> Problem:
        times = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
        return Problem.build(placement, num_micro_batches, Costs.uniform(2 * num_ranks, **times), (cap,) * num_ranks)

    equal, usual = problem(1, 1, 1), problem(1, 1.4, 0.6)
    best: tuple[float, float] = (inf, inf)
    orders: Codes = []
    for times in ASSUMED_TIMES:
        assumed = problem(*times)
        for priorities, patience in priority_rules(assumed):
            codes, makespan = list_schedule(assumed, priorities, patience)
            assert makespan < inf
            if (makespans := (max(evaluate(equal, codes)), max(evaluate(usual, codes)))) < best:
                best, orders = makespans, codes
    return build_schedule(name, placement, num_micro_batches, equal.orders(orders))


# DualPipe-V: two stages per rank in a V, with forwards of one next to backwards of the other.
#
# The published DualPipe holds the model twice; cut in half it is a V, which holds it once. A rank passes eight phases;
# `n` is how often each is repeated on rank r of P with M micro-batches, and 0 and 1 are the rank's first and second
# stage:
#
#     phase  n              work
#     1      2 (P - r - 1)  F0
#     2      r + 1          F0 F1
#     3      P - r - 1      I1 W1 F1
#     4      M - 2P + r + 1 F0 B1 F1 B0
#     5      P - r - 1      B1 F1 B0
#     6      r + 1          B1 B0, with the weight gradients of the second half delayed
#     7      P - r - 1      W I0
#     8      r + 1          W
#
# Its aim is to hide transfers: in phases 4 and 5 a forward and a backward of different micro-batches alternate,
# so one's transfer passes while the other computes. It needs M >= 2P; with fewer it is built for 2P, and the
# surplus micro-batches are left out: a micro-batch never waits for another one, so the rest still runs.
#
# Source: the DualPipe repository's description, and "DualPipe could be better without the dual" (2025).


def dual_pipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns DualPipe-V for P ranks and M micro-batches: two stages per rank in a V, P + 1/2 micro-batches live.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from scale_pipe import simulate
        >>> from scale_pipe.schedules.zero_bubble import dual_pipe_v
        >>> round(simulate(dual_pipe_v(2, 8)).bubble, 2)
        0.02

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    full = max(num_micro_batches, 2 * num_ranks)
    orders = [
        [action for action in _dual_pipe_order(rank, num_ranks, full) if action.micro_batch < num_micro_batches]
        for rank in range(num_ranks)
    ]
    return build_schedule("DualPipe-V", StagePlacement.wave(num_ranks), num_micro_batches, orders)


def _dual_pipe_order(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    """Returns the computations of a rank; M is at least 2P."""
    before, ahead = num_ranks - rank - 1, rank + 1
    half = ahead // 2  # Of phase 6; on even ranks, the change falls between the two stages.
    sixth: list[str] = []
    for turn in range(ahead):
        sixth += ["I1" if turn >= half + 1 - rank % 2 else "B1", "I0" if turn >= half else "B0"]
    order: list[Action] = []
    num_done: Counter[tuple[int, bool]] = Counter()  # By stage and direction, which micro-batch is next.
    delayed: deque[tuple[int, int]] = deque()  # Their weight gradients are still to come.
    for entry in [
        *before * 2 * ["F0"],
        *ahead * ["F0", "F1"],
        *before * ["I1", "W", "F1"],
        *(num_micro_batches - 2 * num_ranks + ahead) * ["F0", "B1", "F1", "B0"],
        *before * ["B1", "F1", "B0"],
        *sixth,
        *before * ["W", "I0"],
        *ahead * ["W"],
    ]:
        if entry == "W":
            order.append(weight_gradient(*delayed.popleft()))
            continue
        kind, stage = Kind(entry[0]), 2 * num_ranks - 1 - rank if entry[1] == "1" else rank
        line = stage, kind is Kind.FORWARD
        order.append(Action(kind, stage, num_done[line]))
        if kind is Kind.INPUT_GRADIENT:
            delayed.append((stage, num_done[line]))
        num_done[line] += 1
    return order
