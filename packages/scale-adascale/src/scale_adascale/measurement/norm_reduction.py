"""Sums the squared norms that ranks have measured over all ranks: one small vector, one asynchronous all-reduce.

It runs while other work between backward pass and step goes on, and is waited for when the gain is read. The vector has
two numbers per parameter group; for Adam three per parameter, where the third is this rank's part of the second
moments, since the divisor of gradients is known when these are added up. Only where ranks have other parts of the
model, and so other parameters, second moments are reduced ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_adascale.measurement.param_info import all_params, param_info_of
from scale_adascale.squared_norms import NormAccumulator, inner_product, part_of, stored_values, sum_of_squares
from scale_core import compat
from scale_core.comm.collectives import all_reduce, exchange, torch_group
from scale_core.comm.group import Group, group_of
from scale_core.comm.work import CollectiveWork
from scale_core.shard import title_of
from scale_core.state.param_ownership import flat_buffer_of


class NormReducer:
    """Adds up the ranks' measurements of the gradients of each parameter group.

    Raises as `norm_weights` does and, where gradients are `preconditioned`, as `check_not_flattened`.
    """

    def __init__(self, optimizer: Optimizer, data: Group, model: Group, *, preconditioned: bool) -> None:
        if preconditioned:
            check_not_flattened(all_params(optimizer))
        self._optimizer, self._data, self.model = optimizer, data, model
        self.preconditioned = preconditioned  # Gradients are measured as Adam sees them.
        self.info, self._key = param_info_of(optimizer, data, model), key_of(optimizer)
        self._num_rows = 0  # of the vector that is under way
        self._is_by_param = False  # It has numbers per parameter, not per group.
        self._num_steps = 0  # whose gradients' bits were compared
        self._num_groups_agreed = 0  # All ranks are known to have so many parameter groups.

    def refresh(self) -> None:
        """Looks up the parts of the ranks again, if there are other parameters than before or another reducer."""
        if key_of(self._optimizer) != self._key:
            if self.preconditioned:
                check_not_flattened(all_params(self._optimizer))
            self.info = param_info_of(self._optimizer, self._data, self.model)
            self._key = key_of(self._optimizer)

    @torch.no_grad()
    def start(
        self, squares: Iterable[Tensor], *, by_moments: bool, uncounted: frozenset[int] = frozenset()
    ) -> CollectiveWork:
        """Starts the sums over all ranks of |g|^2 of all local gradients, and of |G|^2 of their average, per group.

        `squares` are vectors [k], fp64, of this rank's own gradients by parameter, on any devices; with `by_moments`
        they are divided by second moments. Other ranks count the parameters of the indices in `uncounted`. All ranks
        call it together, and then `read`.
        """
        info = self.info
        local = _sum_of([square.to(info.device) for square in squares], info.local_weights)
        weights = [_zeroed(info.local_weights, uncounted), _zeroed(info.total_weights, uncounted)]
        return self._start([local, self._total_squares()], weights, by_moments)

    @torch.no_grad()
    def start_consecutive(
        self, last_grads: Sequence[Tensor | None], *, by_moments: bool, uncounted: frozenset[int] = frozenset()
    ) -> CollectiveWork:
        """Starts the sum of products of the gradients of `holders` and of the step before, of one rank of data.

        `uncounted` has those that were frozen in one of both steps, too.
        """
        assert self._data.size == 1, "of several ranks, each has a gradient of its own"
        info = self.info
        products, last = torch.zeros_like(info.total_weights), torch.zeros_like(info.total_weights)
        for index, (holder, other) in enumerate(zip(info.holders, last_grads, strict=True)):
            if other is not None:
                last[index] = sum_of_squares(other).to(info.device)
                if holder.grad is not None:
                    products[index] = inner_product(holder.grad, other).to(info.device)
        weights = [_zeroed(info.total_weights, uncounted)] * 3
        return self._start([products, last, self._total_squares()], weights, by_moments)

    def _total_squares(self) -> Tensor:
        """The squares of this rank's part of the averaged gradients, [k]; of shared gradients, of its portion."""
        info = self.info
        rows = zip(info.params, info.holders, info.portions, strict=True)
        for index, (param, holder, portion) in enumerate(rows):
            grad = holder.grad
            if grad is None or portion is None or not param.requires_grad:  # Frozen, one is left from before.
                continue
            if grad.device not in info.totals:
                info.totals[grad.device] = NormAccumulator(len(info.holders), grad.device)
            info.totals[grad.device].set(index, grad if portion == (0, 1) else part_of(grad, *portion), stays=True)
        totals = [accumulator.squares().to(info.device) for accumulator in info.totals.values()]
        for accumulator in info.totals.values():
            accumulator.clear()
        return _sum_of(totals, info.total_weights)

    def _start(self, rows: list[Tensor], weights: list[Tensor], by_moments: bool) -> CollectiveWork:
        """Starts the sum over all ranks of rows [k] with their weights, and of a checksum of the averaged gradients."""
        info = self.info
        self._num_rows, self._is_by_param = len(rows), by_moments and self.model.size == 1
        if self._is_by_param:
            rows = [*(row * weight for row, weight in zip(rows, weights, strict=True)), info.moments.local_means()]
        else:
            if len(self._optimizer.param_groups) != self._num_groups_agreed:
                self._check_num_groups()
            factors = info.moments.divisors() if by_moments else None
            weights = weights if factors is None else [weight * factors for weight in weights]
            rows = [self._by_group(row, weight) for row, weight in zip(rows, weights, strict=True)]
        owners = zip(info.params, info.holders, info.is_shared, strict=True)
        shared = [holder.grad for param, holder, is_shared in owners if is_shared and param.requires_grad]
        checksum = checksum_term(self._data, info.fingerprint, shared, info.device, step=self._num_steps)
        self._num_steps += 1
        vector = torch.cat([*rows, checksum])
        pending = None
        for group in self._groups_of_sum():
            vector = vector if pending is None else pending.wait()
            pending = all_reduce(vector.to(compat.control_device(torch_group(group), vector.device)), group)
        return CollectiveWork("all_reduce", [], vector) if pending is None else pending

    def _check_num_groups(self) -> None:
        """Compares the number of parameter groups: vectors of other lengths would end a process."""
        number = len(self._optimizer.param_groups)
        for group in self._groups_of_sum():
            group_counts = [row[0] for row in exchange([number], group)]
            if len(set(group_counts)) > 1:
                raise RuntimeError(
                    "expected the same number of parameter groups on all ranks, whose gains are measured group by "
                    f"group, got {', '.join(map(str, group_counts))} on the ranks {', '.join(map(str, group.ranks))}. "
                    "Pass the same groups everywhere; a group without a parameter on this rank is {'params': []}"
                )
        self._num_groups_agreed = number

    def read(self, pending: CollectiveWork) -> list[list[float]]:
        """Waits for the sums, the one place where a step waits for the device; returns a list for each row.

        Raises RuntimeError if ranks with other data have other averaged gradients.
        """
        size = len(self._optimizer.param_groups)
        vector = pending.wait()
        if self._is_by_param:
            *rows, moments = vector[:-1].view(self._num_rows + 1, -1)
            factors = self.info.moments.divisors_of(moments)
            vector = torch.cat([*(self._by_group(row, factors) for row in rows), vector[-1:]])
        *values, checksum = compat.values_of(vector, simulated=[1.0] * (self._num_rows * size) + [0.0])
        if checksum and all(map(math.isfinite, values)):
            raise RuntimeError(
                f"expected the ranks {list(self._data.ranks)} to have the same averaged gradients when the last "
                "backward pass ended, but they have others, or other parameters. Wrap the model in "
                "DistributedDataParallel, ShardedDataParallel or fully_shard over these ranks; for a pipeline or "
                "tensor parallelism pass AdaScale(..., process_group=the ranks with other data, "
                "model_parallel_group=those with other parts of the model); and where gradients are averaged by hand "
                "after backward(), call optimizer.unhook() and the steps have the last gain"
            )
        return [values[size * row : size * (row + 1)] for row in range(self._num_rows)]

    def _groups_of_sum(self) -> list[Group]:
        """The groups over which vectors are added up, one after the other."""
        groups = [group for group in (self._data, self.model) if group.size > 1]
        if len(groups) > 1 and (everyone := group_of()).size == self._data.size * self.model.size:
            return [everyone]
        return groups

    def _by_group(self, squares: Tensor, weights: Tensor) -> Tensor:
        """Sums weighted squares [k] by parameter group, [number of groups]."""
        num_groups = len(self._optimizer.param_groups)
        if num_groups == 1:
            return torch.dot(squares, weights).reshape(1)
        index = self.info.group_index.to(squares.device)
        return squares.new_zeros(num_groups).index_add_(0, index, squares * weights)


def key_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """The inputs of a `ParamInfo`: the parameters by identity and group, and whether a reducer fills the pieces."""
    is_given_reduced = getattr(optimizer, "gets_reduced_gradients", False)
    return (is_given_reduced, *(tuple(map(id, group["params"])) for group in optimizer.param_groups))


def _sum_of(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of vectors [k]; zeros where there are none."""
    return sum(vectors[1:], vectors[0]) if vectors else torch.zeros_like(like)


def _zeroed(weights: Tensor, indices: frozenset[int]) -> Tensor:
    """Weights [k] with zeros at these indices."""
    if not indices:
        return weights
    return weights.index_fill(0, torch.tensor(sorted(indices)).to(weights.device, non_blocking=True), 0.0)


def check_not_flattened(params: Iterable[Tensor]) -> None:
    """Raises ValueError for a flat parameter, where each tensor's gradient is divided by its own second moments."""
    for param in params:
        buffer = flat_buffer_of(param)
        if buffer is not None:
            raise ValueError(
                f"expected one tensor per parameter, got {title_of(param)}, a flat parameter that holds "
                f"{len(buffer.names)}, for example '{buffer.names[0]}'. AdaScale divides the gradient of each "
                "parameter by the root of its mean second moment, so a flat parameter would have a different gain. "
                "Shard the model with flatten_parameters=False, or measure plain gradients by "
                "AdaScale(..., options=AdaScaleOptions(preconditioned=False))"
            )


# Whether ranks with other data really average their gradients, by one number in the sum that is sent anyway.
#
# Of gradients that should be equal on all ranks each rank adds up bits, and multiplies the sum by an integer of its
# own; these numbers sum up to zero. So do the products, if all have the same; all of it is exact in fp64. Where
# gradients are not averaged, or only after the backward pass, or ranks have other parts of the model, it is almost
# surely another number: sums that differ by a multiple of 2^24 - 3 pass for equal.
#
# A gradient may have zeros wherever one looks, as an embedding's has, and only one layer may be left out of the
# gradients that averages. So the first steps look at all elements of all gradients, and later ones at some of one
# gradient, each step at others. If no gradient is averaged any more, that is found in the same step even so, unless
# these are zeros there.

_NUM_SAMPLED = 32  # elements of one gradient, where not all of all are looked at
_NUM_FULL_STEPS = 8  # A scaler may have to leave out the first ones, whose gradients are no numbers.
_PRIME = 2**24 - 3  # so that each bit counts
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rank_factor(rank: int, size: int) -> int:
    """An integer for each rank, at most 250 either way; the integers of all ranks sum up to zero."""

    def term(number: int) -> int:
        return (7 * number * number + 3 * number) % 251

    return term(rank) - term((rank - 1) % size)


def checksum_term(
    data: Group, shapes: int, grads: Sequence[Tensor | None], device: torch.device, *, step: int
) -> Tensor:
    """This rank's summand, [1], fp64: of the parameters' fingerprint, and of gradients that are equal on `data`."""
    factor = float(rank_factor(data.rank, data.size)) if data.size > 1 else 0.0
    bits = bit_checksum(grads if factor else [], device, step=step).add_(shapes)
    return bits.to(torch.float64).mul_(factor).reshape(1)


def bit_checksum(grads: Sequence[Tensor | None], device: torch.device, *, step: int) -> Tensor:
    """An integer below 2^24, the sum of the bits of gradients of any kind; scalar, int64. Zeros are as None.

    Which elements are read depends on the step's number, which is equal on all ranks.
    """
    checksum = torch.zeros((), dtype=torch.int64, device=device)
    turn, index = divmod(step, max(1, len(grads)))
    for grad in grads if step < _NUM_FULL_STEPS else grads[index : index + 1]:
        if grad is None or not grad.numel():
            continue
        flat = stored_values(grad.detach()).reshape(-1)
        if step >= _NUM_FULL_STEPS:
            stride = max(1, flat.numel() // _NUM_SAMPLED)
            flat = flat[turn % stride :: stride].contiguous()
        checksum += flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64).to(device)
    return checksum.remainder_(_PRIME)
