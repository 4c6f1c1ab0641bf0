"""From squares that each rank has measured to those of all ranks: one small vector, summed by one all-reduce.

It is under way while whatever stands between backward pass and step goes on, and nobody waits for it before the gain is
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_adascale.agreement import fingerprint, not_averaged, own_part
from scale_adascale.preconditioning import base_of, divisors, second_moments
from scale_adascale.sharing import Weights, splits_of, weights_of
from scale_adascale.squares import inner_product, part_of, sum_of_squares
from scale_core import compat
from scale_core.collectives import all_reduce
from scale_core.group import Group, group_of
from scale_core.host_transport import torch_group
from scale_core.pending import Pending
from scale_core.shard import Held, shard_of


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
    """

    def __init__(self, optimizer: Optimizer, data: Group, model: Group, *, preconditioned: bool) -> None:
        self._optimizer, self._data, self._model = optimizer, data, model
        self.preconditioned = preconditioned
        self._planned_for: tuple[int, bool] | None = None

    @property
    def holders(self) -> list[Tensor]:
        """What has the averaged gradient of each parameter: the parameter itself, or this rank's piece of it."""
        self._plan()
        return self._holders

    def check(self) -> None:
        """Refuses parameters that are shared by ranks it does not know.

        Raises:
            ValueError: See `weights_of`.
        """
        self._plan()

    @torch.no_grad()
    def send(self, sums: Iterable[Tensor], *, by_moments: bool) -> Pending:
        """Starts to add up what all ranks have; all of them call it together.

        Args:
            sums: Vectors [k], fp64, of the squares of the gradients of each parameter on this rank, on any devices.
            by_moments: There are second moments to divide gradients by.

        Returns:
            A handle for `read`.
        """
        self._plan()
        device = self._device
        local = torch.zeros_like(self._local_weights)
        for each in sums:
            local += each.to(device)
        factors = self._divisors(device) if by_moments else None
        parts = [(local, self._local_weights), (self._total_squares(), self._total_weights)]
        return self._sum_over_ranks(torch.cat([*(self._by_group(*part, factors) for part in parts), self._check()]))

    @torch.no_grad()
    def send_products(self, others: Sequence[Tensor | None], *, by_moments: bool) -> Pending:
        """Starts to add up what the averaged gradients and others of the same parameters have in common.

        Args:
            others: The gradients of the step before, in the order of `holders`.
            by_moments: See `send`.

        Returns:
            A handle for `read_compared`.
        """
        assert self._data.size == 1, "of several ranks, each has a gradient of its own"
        products, last = torch.zeros_like(self._total_weights), torch.zeros_like(self._total_weights)
        for number, (holder, other) in enumerate(zip(self._holders, others, strict=True)):
            if other is not None:
                last[number] = sum_of_squares(other).to(self._device)
                if holder.grad is not None:
                    products[number] = inner_product(holder.grad, other).to(self._device)
        factors = self._divisors(self._device) if by_moments else None
        parts = [self._by_group(each, self._total_weights, factors) for each in (products, last, self._total_squares())]
        return self._sum_over_ranks(torch.cat([*parts, self._check()]))

    def _check(self) -> Tensor:
        """A number, [1], that is zero when ranks with other data are summed up, if they have the same averages."""
        shared = [h.grad for h, is_shared in zip(self._holders, self._is_shared, strict=True) if is_shared]
        return own_part(self._data, self._fingerprint, shared, self._device)

    def _total_squares(self) -> Tensor:
        """The squares of what this rank has of the averaged gradients; of what all have alike it measures its part."""
        rank, ranks = self._data.rank, self._data.size
        found = torch.zeros_like(self._total_weights)
        for number, holder in enumerate(self._holders):
            if holder.grad is not None:
                grad = part_of(holder.grad, rank, ranks) if self._is_shared[number] else holder.grad
                found[number] = sum_of_squares(grad).to(self._device)
        return found

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
        *values, check = compat.values_of(pending.wait(), simulated=[1.0] * (parts * size) + [0.0])
        if check and all(map(math.isfinite, values)):
            raise not_averaged(self._data)
        return [values[size * part : size * (part + 1)] for part in range(parts)]

    def _sum_over_ranks(self, vector: Tensor) -> Pending:
        data, model = self._data, self._model
        if data.size * model.size == 1:
            return Pending("all_reduce", [], vector)
        everyone = group_of()
        if data.size > 1 and model.size > 1 and data.size * model.size == everyone.size:
            return all_reduce(self._movable(vector, everyone), everyone)
        if data.size > 1 and model.size > 1:
            vector = all_reduce(self._movable(vector, data), data).wait()
        last = model if model.size > 1 else data
        return all_reduce(self._movable(vector, last), last)

    def _movable(self, vector: Tensor, group: Group) -> Tensor:
        return vector.to(compat.control_device(torch_group(group), vector.device))

    def _by_group(self, squares: Tensor, weights: Tensor, factors: Tensor | None) -> Tensor:
        """Sums weighted squares [k] by parameter group, [number of groups]."""
        squares = squares * weights if factors is None else squares * weights * factors
        num_groups = len(self._optimizer.param_groups)
        if num_groups == 1:
            return squares.sum().reshape(1)
        return squares.new_zeros(num_groups).index_add_(0, self._index, squares)

    def _divisors(self, device: torch.device) -> Tensor:
        """What squares of each parameter's gradients are multiplied by, [k], fp64; equal on all ranks."""
        groups = [self._optimizer.param_groups[number] for number in self._group_of]
        sums = second_moments(base_of(self._optimizer), self._states, groups).to(device)
        means = sums * torch.tensor(self._of_moments, dtype=torch.float64, device=device)
        if self._data.size > 1 and self._states_are_divided:
            means = all_reduce(self._movable(means, self._data), self._data).wait().to(device)
        for group, numbers in self._split.items():
            index = torch.tensor(numbers, device=device)
            means[index] = all_reduce(self._movable(means[index], group), group).wait().to(device)
        return divisors(means, torch.tensor([group["eps"] for group in groups], dtype=torch.float64, device=device))

    def _plan(self) -> None:
        """Looks up, when there are other parameters or somebody else reduces them, who has what."""
        groups = self._optimizer.param_groups
        reduces = bool(getattr(self._optimizer, "gets_reduced_gradients", False))
        key = (sum(len(group["params"]) for group in groups), reduces)
        if key == self._planned_for:
            return
        params: list[Tensor] = [param for group in groups for param in group["params"]]
        measured: Any = getattr(self._optimizer, "measured", None)
        pieces = {} if measured is None else {id(param): piece for param, piece in measured()}
        states: list[Tensor] = [pieces.get(id(param), param) for param in params]
        holders = states if reduces else params
        self._splits = splits_of(params, self._data)
        self._weights = [self._weights_of(param, each) for param, each in zip(params, holders, strict=True)]
        ranks = self._data.size
        self._is_shared = [ranks > 1 and math.isclose(each.share * ranks, 1.0) for each in self._weights]
        shared = zip(self._weights, self._is_shared, strict=True)
        self._device = device = next((holder.device for holder in holders), torch.device("cpu"))
        self._local_weights = torch.tensor([w.local for w in self._weights], dtype=torch.float64, device=device)
        self._total_weights = torch.tensor(
            [w.local if is_shared else w.total for w, is_shared in shared], dtype=torch.float64, device=device
        )
        self._group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        self._index = torch.tensor(self._group_of, device=device)
        self._holders, self._states = holders, states
        self._fingerprint = fingerprint(params)
        self._plan_moments(params)
        self._planned_for = key

    def _plan_moments(self, params: Sequence[Tensor]) -> None:
        """Who has the second moments of each parameter, and how many there are."""
        self._of_moments, self._split = [], dict[Group, list[int]]()
        data = set(self._data.ranks)
        self._states_are_divided = False
        for number, (param, state) in enumerate(zip(params, self._states, strict=True)):
            shard, part = shard_of(param), shard_of(state)
            numel = param.numel() if shard is None else shard.numel
            axes = () if part is None else part.axes
            over = [axis.group for axis in axes if axis.held is Held.SHARD and axis.group.size > 1]
            divided = [group for group in over if set(group.ranks) <= data]
            self._states_are_divided |= bool(divided)
            counted = float(shard is None or shard.counted)
            self._of_moments.append(counted * self._weights_of(param, state).share / max(1, numel))
            for axis in () if shard is None else shard.axes:
                if axis.held is Held.SHARD and axis.group.ranks in self._splits:
                    self._split.setdefault(axis.group, []).append(number)
        if not self._states_are_divided:  # Every rank has all of them, and adds up nothing.
            self._of_moments = [each * self._data.size for each in self._of_moments]

    def _weights_of(self, param: Tensor, holder: Tensor) -> Weights:
        return weights_of(param, holder, self._data, self._model, self._splits.values())
