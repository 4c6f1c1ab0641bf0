"""Schedules that compute the gradients of inputs and of weights apart: ZB-H1, ZB-V, V-Half, V-Min and DualPipe-V.

Only the gradient of the input is waited for, so weight gradients fill what would be idle time. They differ in the
placement and in how many micro-batches may be live, in model equivalents:

    ZB-H1     one stage per rank     P             1F1B's memory, a third of its bubble
    ZB-V      a V                    P             no bubble but the fill where the three times are equal
    V-Half    a V                    P/2 + 1       half the memory
    V-Min     a V                    (P + 4) / 3   a third of it

ZB-H1 is 1F1B with every weight gradient put off by as many micro-batches as 1F1B leaves free on that rank. The V
schedules are list schedules: a free rank does what can be done of forwards and input gradients, the one kind before
the other, and a weight gradient only where there is neither, or where no activation fits any more. Several rules are
tried, and the one is taken that is best where the three times are equal. Where measured times are far from equal,
`solve` finds better ones.

Sources: arXiv 2401.10241 (ZB-H1), 2405.15362 (the V schedules).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from math import inf

from scale_pipe.integers import check_positive
from scale_pipe.schedules.action import Action, backward, forward, input_gradient, weight_gradient
from scale_pipe.schedules.classic import without_surplus
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.lowering import weave
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.solver.list_scheduling import list_schedule
from scale_pipe.schedules.solver.problem import Codes, Problem, evaluate

PATIENCE = (0.0, 0.5, 0.99)
LEADING_TIMES = (
    (1, 1, 1),
    (1, 1.6, 0.8),
    (1, 1.6, 1),
    (0.8, 1.2, 0.6),
    (0.8, 1.2, 1),
    (0.8, 1, 1),
    (0.6, 1, 0.6),
    (0.6, 1.2, 0.8),
)
"""Times of forward, input gradient and weight gradient that the rules are led by: which order follows depends on
them."""


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns ZB-H1: one stage per rank, P micro-batches live.

    Args:
        num_ranks: P.
        num_micro_batches: M.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    orders = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank - 1, num_micro_batches)
        order = [forward(rank, m) for m in range(ahead)]
        for m in range(num_micro_batches):
            order += [forward(rank, m + ahead)] if m + ahead < num_micro_batches else []
            order += [input_gradient(rank, m)]
            order += [weight_gradient(rank, m - rank)] if m >= rank else []
        put_off = range(max(num_micro_batches - rank, 0), num_micro_batches)
        orders.append(order + [weight_gradient(rank, m) for m in put_off])
    return weave("ZB-H1", Placement.loop(num_ranks), num_micro_batches, orders)


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns ZB-V: two stages per rank in a V, P micro-batches live.

    Args:
        num_ranks: P.
        num_micro_batches: M.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    return _at_equal_times("ZB-V", num_ranks, num_micro_batches, 2 * num_ranks)


def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns V-Half: two stages per rank in a V, P/2 + 1 micro-batches live.

    Args:
        num_ranks: P.
        num_micro_batches: M.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    return _at_equal_times("V-Half", num_ranks, num_micro_batches, 2 * ((num_ranks + 2) // 2))


def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns V-Min: two stages per rank in a V, (P + 4) / 3 micro-batches live.

    Args:
        num_ranks: P.
        num_micro_batches: M.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    return _at_equal_times("V-Min", num_ranks, num_micro_batches, 2 * ((num_ranks + 4) // 3))


def rules(problem: Problem) -> Iterator[tuple[list[float], float]]:
    """Yields the urgencies and patience of each rule: which kind and which stage of a rank goes first.

    Args:
        problem: Any.
    """
    for forwards_first in (False, True):
        for deep_gradients_first in (True, False):
            by_kind: list[list[float]] = [[], [], []]
            for stage, rank in enumerate(problem.placement.rank_of):
                depth = 0.01 * problem.placement.stages_of[rank].index(stage)
                by_kind[0].append((0.0 if forwards_first else 2.0) - depth)
                by_kind[1].append(1.0 - depth if deep_gradients_first else 1.0 + depth)
                by_kind[2].append(3.0 - depth)
            urgencies = [value for kind in by_kind for value in kind for _ in range(problem.num_micro_batches)]
            for patience in PATIENCE:
                yield urgencies, patience


@lru_cache(maxsize=64)
def _at_equal_times(name: str, num_ranks: int, num_micro_batches: int, cap: int) -> Schedule:
    """Returns the best rule where all times are one unit and a rank holds at most `cap` (stage, micro-batch)."""
    placement = Placement.wave(num_ranks)

    def problem(forward: float, input_gradient: float, weight_gradient: float) -> Problem:
        times = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
        return Problem.of(placement, num_micro_batches, Costs.uniform(2 * num_ranks, **times), (cap,) * num_ranks)

    equal, usual = problem(1, 1, 1), problem(1, 1.4, 0.6)
    best: tuple[float, float] = (inf, inf)
    orders: Codes = []
    for times in LEADING_TIMES:
        leading = problem(*times)
        for urgencies, patience in rules(leading):
            codes, makespan = list_schedule(leading, urgencies, patience)
            assert makespan < inf
            here, there = evaluate(equal, codes), evaluate(usual, codes)
            assert here is not None
            assert there is not None
            if (here.makespan, there.makespan) < best:
                best, orders = (here.makespan, there.makespan), codes
    return weave(name, placement, num_micro_batches, equal.orders(orders))


# DualPipe-V: two stages per rank in a V, and forwards of one beside backwards of the other.
#
# The published DualPipe holds the model twice; cut in half it is a V, which holds it once. A rank passes eight phases;
# `n` is how often each is repeated on rank r of P with M micro-batches, and 0 and 1 are the rank's first and second
# stage:
#
#     phase  n              what
#     1      2 (P - r - 1)  F0
#     2      r + 1          F0 F1
#     3      P - r - 1      I1 W1 F1
#     4      M - 2P + r + 1 F0 B1 F1 B0
#     5      P - r - 1      B1 F1 B0
#     6      r + 1          B1 B0, with the weight gradients of the second half put off
#     7      P - r - 1      W I0
#     8      r + 1          W
#
# Its aim is to hide transfers: in phases 4 and 5 a forward and a backward of different micro-batches stand side by
# side, so one's transfer passes while the other computes. It needs M >= 2P; with fewer it is made for 2P, and the
# micro-batches that are not there are left out.
#
# Source: the DualPipe repository's description, and "DualPipe could be better without the dual" (2025).


def dual_pipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Returns DualPipe-V.

    Args:
        num_ranks: P.
        num_micro_batches: M.

    Raises:
        ValueError: A number is not positive.
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    full = max(num_micro_batches, 2 * num_ranks)
    orders = [_order(rank, num_ranks, full) for rank in range(num_ranks)]
    placement = Placement.wave(num_ranks)
    return weave("DualPipe-V", placement, num_micro_batches, without_surplus(orders, num_micro_batches))


class _Rank:
    """A rank's list in the making: which micro-batch is next is counted by stage and kind."""

    def __init__(self, first: int, second: int) -> None:
        self.stages = first, second
        self.actions: list[Action] = []
        self.num_forwards = [0, 0]
        self.num_gradients = [0, 0]
        self.put_off: deque[tuple[int, int]] = deque()

    def forward(self, index: int) -> None:
        self.actions.append(forward(self.stages[index], self.num_forwards[index]))
        self.num_forwards[index] += 1

    def backward(self, index: int, *, apart: bool = False) -> None:
        stage, micro_batch = self.stages[index], self.num_gradients[index]
        self.actions.append((input_gradient if apart else backward)(stage, micro_batch))
        if apart:
            self.put_off.append((stage, micro_batch))
        self.num_gradients[index] += 1

    def weight(self) -> None:
        self.actions.append(weight_gradient(*self.put_off.popleft()))


def _order(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    """Returns what a rank computes; M is at least 2P."""
    program = _Rank(rank, 2 * num_ranks - 1 - rank)
    behind, ahead = num_ranks - rank - 1, rank + 1
    for _ in range(2 * behind):
        program.forward(0)
    for _ in range(ahead):
        program.forward(0)
        program.forward(1)
    for _ in range(behind):
        program.backward(1, apart=True)
        program.weight()
        program.forward(1)
    for _ in range(num_micro_batches - 2 * num_ranks + ahead):
        program.forward(0)
        program.backward(1)
        program.forward(1)
        program.backward(0)
    for _ in range(behind):
        program.backward(1)
        program.forward(1)
        program.backward(0)
    for turn in range(ahead):
        half = ahead // 2  # from here on apart; on even ranks the change falls between the two stages
        program.backward(1, apart=turn > half or (turn == half and rank % 2 == 1))
        program.backward(0, apart=turn >= half)
    for _ in range(behind):
        program.weight()
        program.backward(0, apart=True)
    while program.put_off:
        program.weight()
    return program.actions
