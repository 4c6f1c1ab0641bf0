"""Feed-forward experts whose weights stand in one tensor each, and are divided between ranks by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_module import ShardedModule
from scale_moe.grouped_linear import grouped_linear
from scale_moe.token_dispatcher import experts_per_rank

Activation = Callable[[Tensor], Tensor]


class ExpertSharding(NamedTuple):
    """How a parameter [E, ...] is divided: each rank has those of its experts."""

    shape: tuple[int, ...]  # of the whole parameter
    sizes: tuple[int, ...]  # experts of each rank

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different elements."""
        return len(self.sizes) > 1

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return (self.sizes[rank], *self.shape[1:])

    def local_part(self, full: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole parameter, a view."""
        return full.narrow(0, sum(self.sizes[:rank]), self.sizes[rank])

    def shard_spec(self, group: Group, name: str = "") -> Shard:
        """What norms, optimizers and checkpoints of scale-core read of a rank's part."""
        first = sum(self.sizes[: group.rank])
        ranges = (((first, first + self.sizes[group.rank]),), *(((0, size),) for size in self.shape[1:]))
        return Shard.of_ranges(name, self.shape, ranges, (Axis(group, Placement.SHARD),))


@checked_arguments
class Experts(ShardedModule):
    """E feed-forward networks, of which this rank has some; rows come sorted by expert.

        gated:  down(activation(gate(x)) * up(x))      plain:  down(activation(up(x)))

    Parameters are those of transformers' experts: `gate_up_proj` [E, 2 * hidden, dim], gates first, or `up_proj`
    [E, hidden, dim]; and `down_proj` [E, dim, hidden]. Initial values are those of `torch.nn.Linear`, and the same at
    any number of ranks, where these have one seed.

    Args:
        num_experts: E, of all ranks.
        dim: Features of a token.
        hidden_dim: Features inside an expert.
        gated: See above.
        activation: A function of tensors.
        process_group: The ranks that divide them; None is the default group.
        device: Where the parameters are.
        dtype: Their dtype.
    """

    shardings: dict[str, ExpertSharding]

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        gated: bool = True,
        activation: Activation = F.silu,
        process_group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = group_of(process_group)
        sizes = tuple(experts_per_rank(num_experts, group.size))
        self.group, self.gated, self.activation, self.num_experts = group, gated, activation, num_experts
        up = ("gate_up_proj", 2 * hidden_dim) if gated else ("up_proj", hidden_dim)
        self.shardings = {
            up[0]: ExpertSharding((num_experts, up[1], dim), sizes),
            "down_proj": ExpertSharding((num_experts, dim, hidden_dim), sizes),
        }
        for name, sharding in self.shardings.items():
            shape = sharding.local_shape(group.rank)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the values of all experts, one after another, and keeps those of this rank's."""
        for name, (shape, sizes) in self.shardings.items():
            param = self.get_parameter(name)
            if param.is_meta:
                continue
            first, bound = sum(sizes[: self.group.rank]), 1 / math.sqrt(shape[2])
            for expert in range(shape[0]):
                drawn = torch.empty(shape[1:], dtype=param.dtype, device=param.device).uniform_(-bound, bound)
                if first <= expert < first + len(param):
                    param[expert - first].copy_(drawn)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns [R, dim] for the rows [R, dim] of this rank's experts, of which each has so many.

        Raises:
            ValueError: The counts are not those of this rank's experts, or do not add up to the rows.
        """
        up = divide_gradient(self.gate_up_proj if self.gated else self.up_proj, self.group.size)
        hidden = grouped_linear(rows, up, counts)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(hidden)
        return grouped_linear(hidden, divide_gradient(self.down_proj, self.group.size), counts)

    def extra_repr(self) -> str:
        rank = f", rank={self.group.rank} of {self.group.size}" if self.group.size > 1 else ""
        shapes = ", ".join(f"{name}={list(sharding.shape)}" for name, sharding in self.shardings.items())
        return f"{shapes}{rank}"


def divide_gradient(param: Any, num_ranks: int) -> Tensor:
    """Returns the same values, whose gradient is divided by the ranks that send tokens to an expert.

    An expert gets tokens from all these ranks, so its gradient is the sum over them, where that of any other parameter
    is averaged over the ranks. Divided, it is the average as well.
    """
    if num_ranks == 1:
        return cast(Tensor, param)
    return cast(Tensor, _DivideGradient.apply(param, num_ranks))  # type: ignore[no-untyped-call]


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None
