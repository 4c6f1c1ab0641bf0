"""From squares that each rank has measured to those of all ranks: one small vector, summed by one all-reduce.

It is under way while whatever stands between backward pass and step goes on, and nobody waits for it before the gain is
asked for. It has two numbers per parameter group; for Adam three per parameter, the third of which is the part that a
rank has of the second moments, since what gradients are divided by is known when these are added up. Only where ranks
have other parts of the model, and so other parameters, second moments travel ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_adascale.adam_preconditioner import sum_over
from scale_adascale.gradient_checks import not_averaged, own_part
from scale_adascale.param_info import identity_of, plan_of
from scale_adascale.squared_norms import Tally, inner_product, part_of, sum_of_squares
from scale_core import compat
from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group, group_of
from scale_core.comm.work import Pending


class Measured(NamedTuple):
    """What all ranks have measured together, per parameter group.

    Attributes:
        local: The sum of the squared norms of all gradients that the step averages.
        total: The squared norm of their average.
    """

    local: list[float]
    total: list[float]


class Compared(NamedTuple):
    """What is known of the gradients of two successive steps, per parameter group.

    Attributes:
        product: Their inner product.
        last: The squared norm of the older one.
        new: That of the newer one.
    """

    product: list[float]
    last: list[float]
    new: list[float]


class Sent:
    """What is on its way between the ranks, if anything is; nobody may drop it before it has come."""

    def __init__(self) -> None:
        self.pending: Pending | None = None

    def take(self) -> None:
        """Forgets it, once it has come."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()

    def abandon(self) -> None:
        """Gives it up: nobody is left who would wait for it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.abandon()


class Meter:
    """Adds up what ranks have measured.

    Args:
        optimizer: What steps; its parameter groups are measured one by one.
        data: The ranks that have other data.
        model: The ranks that have other parts of the model.
        preconditioned: Gradients are measured as Adam sees them.

    Raises:
        ValueError: See `weights_of`.
    """

    def __init__(self, optimizer: Optimizer, data: Group, model: Group, *, preconditioned: bool) -> None:
        self._optimizer, self._data, self._model = optimizer, data, model
        self.preconditioned = preconditioned
        self._plan = plan_of(optimizer, data, model)
        self._is_by_param = False  # What was sent is told by parameter, and not by group.
        self._num_looks = 0  # at whether gradients are averaged
        self._num_groups_agreed = 0  # Of how many parameter groups all ranks are known to have as many.

    @property
    def params(self) -> list[Tensor]:
        """The parameters at the last `look_up`, group by group."""
        return self._plan.params

    @property
    def holders(self) -> list[Tensor]:
        """What has the averaged gradient of each of these: the parameter itself, or this rank's piece of it."""
        return self._plan.holders

    @property
    def model_ranks(self) -> tuple[int, ...]:
        """The ranks that have other parts of the model, this one among them."""
        return self._model.ranks

    def look_up(self) -> None:
        """Looks up again who has what, if there are other parameters than before or somebody else reduces them.

        Raises:
            ValueError: See `weights_of`.
        """
        if identity_of(self._optimizer) != self._plan.made_for:
            self._plan = plan_of(self._optimizer, self._data, self._model)

    @torch.no_grad()
    def send(self, sums: Iterable[Tensor], *, by_moments: bool, elsewhere: frozenset[int] = frozenset()) -> Pending:
        """Starts to add up what all ranks have; all of them call it together.

        Args:
            sums: Vectors [k], fp64, of the squares of the gradients of each parameter on this rank, on any devices.
            by_moments: There are second moments to divide gradients by.
            elsewhere: Numbers of parameters that other ranks have as well, and count.

        Returns:
            A handle for `read`.
        """
        self.look_up()
        plan = self._plan
        local = _added_up([each.to(plan.device) for each in sums], plan.local_weights)
        weights = [_without(elsewhere, plan.local_weights), _without(elsewhere, plan.total_weights)]
        return self._send([local, self._total_squares()], weights, by_moments)

    @torch.no_grad()
    def send_products(
        self, others: Sequence[Tensor | None], *, by_moments: bool, elsewhere: frozenset[int] = frozenset()
    ) -> Pending:
        """Starts to add up what the averaged gradients and others of the same parameters have in common.

        Args:
            others: The gradients of the step before, in the order of `holders`.
            by_moments: See `send`.
            elsewhere: Numbers of parameters that are not to count: other ranks do, or they were frozen in one of both
                steps.

        Returns:
            A handle for `read_compared`.
        """
        assert self._data.size == 1, "of several ranks, each has a gradient of its own"
        self.look_up()
        plan = self._plan
        products, last = torch.zeros_like(plan.total_weights), torch.zeros_like(plan.total_weights)
        for number, (holder, other) in enumerate(zip(plan.holders, others, strict=True)):
            if other is not None:
                last[number] = sum_of_squares(other).to(plan.device)
                if holder.grad is not None:
                    products[number] = inner_product(holder.grad, other).to(plan.device)
        weights = [_without(elsewhere, plan.total_weights)] * 3
        return self._send([products, last, self._total_squares()], weights, by_moments)

    def _send(self, rows: list[Tensor], weights: list[Tensor], by_moments: bool) -> Pending:
        """Starts to add up rows of squares, [k] each, with their weights."""
        self._is_by_param = by_moments and self._model.size == 1
        if self._is_by_param:
            rows = [*(row * weight for row, weight in zip(rows, weights, strict=True)), self._plan.moments.part()]
        else:
            self._check_groups()
            factors = self._plan.moments.divisors() if by_moments else None
            weights = weights if factors is None else [weight * factors for weight in weights]
            rows = [self._by_group(row, weight) for row, weight in zip(rows, weights, strict=True)]
        return self._sum_over_ranks(torch.cat([*rows, self._check()]))

    def _check_groups(self) -> None:
        """Asks all ranks of the sum, before the first one, for the length of theirs: other lengths end a process.

        Raises:
            RuntimeError: They have other numbers of parameter groups; on all ranks that were asked.
        """
        number = len(self._optimizer.param_groups)
        if number == self._num_groups_agreed:
            return
        for group in self._groups_of_sum():
            found = [row[0] for row in exchange([number], group)]
            if len(set(found)) > 1:
                raise RuntimeError(
                    "expected the same number of parameter groups on all ranks, whose gains are measured group by "
                    f"group, got {', '.join(map(str, found))} on the ranks {', '.join(map(str, group.ranks))}: pass "
                    "the same groups everywhere; a group without a parameter on this rank is {'params': []}"
                )
        self._num_groups_agreed = number

    def _check(self) -> Tensor:
        """A number, [1], that is zero when ranks with other data are summed up, if they have the same averages."""
        plan = self._plan
        rows = zip(plan.params, plan.holders, plan.is_shared, strict=True)
        shared = [holder.grad for param, holder, is_shared in rows if is_shared and param.requires_grad]
        look, self._num_looks = self._num_looks, self._num_looks + 1
        return own_part(self._data, plan.fingerprint, shared, plan.device, look=look)

    def _total_squares(self) -> Tensor:
        """The squares of what this rank has of the averaged gradients; of what all have alike it measures its part."""
        plan = self._plan
        rows = zip(plan.params, plan.holders, plan.portions, strict=True)
        for number, (param, holder, portion) in enumerate(rows):
            grad = holder.grad
            if grad is None or portion is None or not param.requires_grad:  # Frozen, one is left from before.
                continue
            if grad.device not in plan.totals:
                plan.totals[grad.device] = Tally(len(plan.holders), grad.device)
            plan.totals[grad.device].take(number, grad if portion == (0, 1) else part_of(grad, *portion), stays=True)
        found = [tally.squares().to(plan.device) for tally in plan.totals.values()]
        for tally in plan.totals.values():
            tally.clear()
        return _added_up(found, plan.total_weights)

    def read(self, pending: Pending) -> Measured:
        """Waits for what was sent, and returns it as numbers.

        Raises:
            RuntimeError: Ranks with other data have other gradients, or other parameters.
        """
        return Measured(*self._numbers(pending, 2))

    def read_compared(self, pending: Pending) -> Compared:
        """As `read`, of what `send_products` has sent."""
        return Compared(*self._numbers(pending, 3))

    def _numbers(self, pending: Pending, parts: int) -> list[list[float]]:
        """By part and group; the one place where a step waits for the device."""
        size = len(self._optimizer.param_groups)
        vector = pending.wait()
        if self._is_by_param:
            *rows, moments = vector[:-1].view(parts + 1, -1)
            factors = self._plan.moments.divisors_of(moments)
            vector = torch.cat([*(self._by_group(row, factors) for row in rows), vector[-1:]])
        *values, check = compat.values_of(vector, simulated=[1.0] * (parts * size) + [0.0])
        if check and all(map(math.isfinite, values)):
            raise not_averaged(self._data)
        return [values[size * part : size * (part + 1)] for part in range(parts)]

    def _groups_of_sum(self) -> list[Group]:
        """The groups over which vectors are added up, one after the other."""
        found = [group for group in (self._data, self._model) if group.size > 1]
        everyone = group_of() if len(found) > 1 else Group()
        return [everyone] if everyone.size > 1 and everyone.size == self._data.size * self._model.size else found

    def _sum_over_ranks(self, vector: Tensor) -> Pending:
        *first, last = self._groups_of_sum() or [Group()]
        for group in first:
            vector = sum_over(vector, group).wait()
        return Pending("all_reduce", [], vector) if last.size == 1 else sum_over(vector, last)

    def _by_group(self, squares: Tensor, weights: Tensor) -> Tensor:
        """Sums weighted squares [k] by parameter group, [number of groups]."""
        num_groups = len(self._optimizer.param_groups)
        if num_groups == 1:
            return torch.dot(squares, weights).reshape(1)
        index = self._plan.index.to(squares.device)
        return squares.new_zeros(num_groups).index_add_(0, index, squares * weights)


def _added_up(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of vectors [k]; zeros where there are none."""
    return sum(vectors[1:], vectors[0]) if vectors else torch.zeros_like(like)


def _without(elsewhere: frozenset[int], weights: Tensor) -> Tensor:
    """Weights [k] with zeros at these numbers."""
    if not elsewhere:
        return weights
    numbers = torch.tensor(sorted(elsewhere)).to(weights.device, non_blocking=True)
    return weights.index_fill(0, numbers, 0.0)
