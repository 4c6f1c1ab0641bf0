"""DualPipe-V: two stages per rank in a V, and forwards of one beside backwards of the other.

The published DualPipe holds the model twice; cut in half it is a V, which holds it once. A rank passes eight phases;
`n` is how often each is repeated on rank r of P with M micro-batches, and 0 and 1 are the rank's first and second
stage:

    phase  n              what
    1      2 (P - r - 1)  F0
    2      r + 1          F0 F1
    3      P - r - 1      I1 W1 F1
    4      M - 2P + r + 1 F0 B1 F1 B0
    5      P - r - 1      B1 F1 B0
    6      r + 1          B1 B0, with the weight gradients of the second half put off
    7      P - r - 1      W I0
    8      r + 1          W

Its aim is to hide transfers: in phases 4 and 5 a forward and a backward of different micro-batches stand side by
side, so one's transfer passes while the other computes. It needs M >= 2P; with fewer it is made for 2P, and the
micro-batches that are not there are left out.

Source: the DualPipe repository's description, and "DualPipe could be better without the dual" (2025).
"""

from __future__ import annotations

from collections import deque

from scale_pipe.integers import check_positive
from scale_pipe.schedules.action import Action, backward, forward, input_gradient, weight_gradient
from scale_pipe.schedules.classic import without_surplus
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.weave import weave


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
    todo = _Rank(rank, 2 * num_ranks - 1 - rank)
    behind, ahead = num_ranks - rank - 1, rank + 1
    for _ in range(2 * behind):
        todo.forward(0)
    for _ in range(ahead):
        todo.forward(0)
        todo.forward(1)
    for _ in range(behind):
        todo.backward(1, apart=True)
        todo.weight()
        todo.forward(1)
    for _ in range(num_micro_batches - 2 * num_ranks + ahead):
        todo.forward(0)
        todo.backward(1)
        todo.forward(1)
        todo.backward(0)
    for _ in range(behind):
        todo.backward(1)
        todo.forward(1)
        todo.backward(0)
    for turn in range(ahead):
        half = ahead // 2  # from here on apart; on even ranks the change falls between the two stages
        todo.backward(1, apart=turn > half or (turn == half and rank % 2 == 1))
        todo.backward(0, apart=turn >= half)
    for _ in range(behind):
        todo.weight()
        todo.backward(0, apart=True)
    while todo.put_off:
        todo.weight()
    return todo.actions
