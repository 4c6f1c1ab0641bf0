"""Feed-forward experts whose weights stand in one tensor each, and are divided between ranks by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group
from scale_core.hooks.source_grads import has_source_grad_hooks, with_source_grads
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_module import ShardedModule
from scale_core.sharded_tensor.tensor import local_tensor
from scale_moe.grouped_linear import grouped_linear
from scale_moe.mesh_info import ExpertMesh, ExpertMeshLike, resolve_expert_mesh
from scale_moe.token_dispatcher import DispatchPlan, experts_per_rank

Activation = Callable[[Tensor], Tensor]
ParamByName = Callable[[str], Tensor]
# Given rows [R, dim], how many of them each expert of this rank has, and the parameters to compute with.
Compute = Callable[[Tensor, Sequence[int], ParamByName], Tensor]

Ranges = tuple[tuple[int, int], ...]


class ExpertSharding(NamedTuple):
    """How a parameter [E, ...] is divided: each rank has its experts, with all or some of their hidden features."""

    shape: tuple[int, ...]  # of the full parameter
    sizes: tuple[int, ...]  # experts of each rank of the expert axis
    dim: int = 1  # that of the hidden features
    hidden_ranges: tuple[Ranges, ...] = ()  # of these, by rank of the tensor axis; empty without one

    @classmethod
    def over(cls, mesh: ExpertMesh, shape: Sequence[int], dim: int = 1, *, stacked: int = 1) -> ExpertSharding:
        """Divides a parameter over a mesh; `stacked` matrices, one behind the other in `dim`, each by itself."""
        sizes = tuple(experts_per_rank(shape[0], mesh.expert.size))
        if mesh.tensor.size == 1:
            return cls(tuple(shape), sizes)
        rows_per_expert = shape[dim] // stacked
        cuts = pairwise(accumulate(experts_per_rank(rows_per_expert, mesh.tensor.size), initial=0))
        starts = range(0, shape[dim], rows_per_expert)
        hidden_ranges = tuple(tuple((start + first, start + last) for start in starts) for first, last in cuts)
        return cls(tuple(shape), sizes, dim, hidden_ranges)

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different elements."""
        return len(self.sizes) * max(1, len(self.hidden_ranges)) > 1

    def local_ranges(self, rank: int) -> tuple[Ranges, ...]:
        """Of each dimension, which indices a rank has."""
        expert, tensor = divmod(rank, max(1, len(self.hidden_ranges)))
        first = sum(self.sizes[:expert])
        ranges: list[Ranges] = [((0, size),) for size in self.shape]
        ranges[0] = ((first, first + self.sizes[expert]),)
        if self.hidden_ranges:
            ranges[self.dim] = self.hidden_ranges[tensor]
        return tuple(ranges)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        return tuple(sum(last - first for first, last in ranges) for ranges in self.local_ranges(rank))

    def local_part(self, full: Tensor, rank: int) -> Tensor:
        """A rank's shard of the full parameter, a view where no more than the experts are divided."""
        first, last = self.local_ranges(rank)[0][0]
        return self.local_features(full.narrow(0, first, last - first), rank, self.dim)

    def local_features(self, full: Tensor, rank: int, dim: int) -> Tensor:
        """The hidden features of a rank, which stand in `dim`."""
        if not self.hidden_ranges:
            return full
        ranges = self.hidden_ranges[rank % len(self.hidden_ranges)]
        return torch.cat([full.narrow(dim, first, last - first) for first, last in ranges], dim)

    def shard_spec(self, group: Group, name: str = "") -> Shard:
        """The description of a rank's shard for norms, optimizers and checkpoints of scale-core."""
        axis = Axis(group, Placement.SHARD, num_sources=len(self.sizes))
        return Shard.of_ranges(name, self.shape, self.local_ranges(group.rank), (axis,))


@checked_arguments
class Experts(ShardedModule):
    """E feed-forward networks, divided over the ranks; rows come sorted by expert.

        gated:  down(activation(gate(x)) * up(x))      plain:  down(activation(up(x)))

    Parameters are as in transformers' experts: `gate_up_proj` [E, 2 * hidden, dim], gates first, or `up_proj`
    [E, hidden, dim]; and `down_proj` [E, dim, hidden]. Initial values are as in `torch.nn.Linear`, and the same at
    any number of ranks, where these have one seed.

    Args:
        num_experts: E, of all ranks.
        dim: Features of a token.
        hidden_dim: Features inside an expert.
        gated: See above.
        activation: A function of tensors.
        process_group: The ranks that divide them; None is the default group. With a mesh of two dimensions, the ranks
            of the second divide the hidden features of each expert, and `forward` returns summands of the outputs.
        device: Where the parameters are.
        dtype: Their dtype.

    Examples:
        >>> import torch
        >>> from scale_moe import Experts
        >>> experts = Experts(num_experts=2, dim=8, hidden_dim=16)
        >>> experts(torch.randn(5, 8), [3, 2]).shape  # rows sorted by expert: 3, then 2
        torch.Size([5, 8])

    See also: [the guide to experts](../guides/experts.md).
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
        process_group: ExpertMeshLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mesh = mesh = resolve_expert_mesh(process_group)
        self.group, self.gated, self.activation, self.num_experts = mesh.whole, gated, activation, num_experts
        check_hidden_dim("Experts: hidden_dim", hidden_dim, mesh)
        up, stacked = ("gate_up_proj", 2) if gated else ("up_proj", 1)
        self.shardings = {
            up: ExpertSharding.over(mesh, (num_experts, stacked * hidden_dim, dim), stacked=stacked),
            "down_proj": ExpertSharding.over(mesh, (num_experts, dim, hidden_dim), 2),
        }
        for name, sharding in self.shardings.items():
            shape = sharding.local_shape(self.group.rank)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the values of all experts, one expert at a time, and keeps the values of this rank's experts."""
        for name, sharding in self.shardings.items():
            param, shape, rank = local_tensor(self.get_parameter(name)), sharding.shape, self.group.rank
            if param.is_meta:
                continue
            first, bound = sharding.local_ranges(rank)[0][0][0], 1 / math.sqrt(shape[2])
            drawn = torch.empty(shape[1:], dtype=param.dtype, device=param.device)
            for expert in range(1 if compat.is_fake(param) else shape[0]):  # In a simulation there are no values.
                drawn.uniform_(-bound, bound)
                if first <= expert < first + len(param):
                    param[expert - first].copy_(sharding.local_features(drawn, rank, sharding.dim - 1))

    def forward(
        self, rows: Tensor, counts: Sequence[int], received_counts: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Returns [R, dim] for the rows [R, dim] of this rank's experts.

        Args:
            rows: By expert, as `dispatch` gives them; or by rank, as by `plan.by_rank()`.
            counts: How many of the rows each expert has.
            received_counts: Of rows that stand by rank, how many each rank has sent to each expert: `compute_experts`
                reports gradients by rank then.

        Raises:
            ValueError: The counts are not for this rank's experts, or do not add up to the rows.
        """
        return compute_experts(self, self._compute, rows, counts, self.mesh.expert.size, received_counts)

    def _compute(self, rows: Tensor, counts: Sequence[int], param: ParamByName) -> Tensor:
        hidden = grouped_linear(rows, param("gate_up_proj" if self.gated else "up_proj"), counts)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(hidden)
        return grouped_linear(hidden, param("down_proj"), counts)

    def extra_repr(self) -> str:
        rank = f", rank={self.group.rank} of {self.group.size}" if self.group.size > 1 else ""
        shapes = ", ".join(f"{name}={list(sharding.shape)}" for name, sharding in self.shardings.items())
        return f"{shapes}{rank}"


def check_hidden_dim(what: str, hidden_dim: int, mesh: ExpertMesh) -> None:
    """Refuses experts that have fewer hidden features than there are ranks to divide them."""
    if hidden_dim < mesh.tensor.size:
        raise ValueError(
            f"{what}: {hidden_dim} hidden features of an expert can't be divided between {mesh.tensor.size} ranks: "
            "give a mesh of one dimension, which divides whole experts"
        )


def with_order_of_rows(plan: DispatchPlan) -> tuple[DispatchPlan, Sequence[Sequence[int]] | None]:
    """Returns the plan to dispatch with, and the `received_counts` for `compute_experts`.

    Where gradients are measured by rank, as AdaScale does it, rows stand by rank; otherwise by expert, with None.
    """
    if plan.group.size > 1 and has_source_grad_hooks() and torch.is_grad_enabled():
        return plan.by_rank(), plan.received_counts
    return plan, None


def compute_experts(
    experts: nn.Module,
    compute: Compute,
    rows: Tensor,
    counts: Sequence[int],
    num_ranks: int,
    received_counts: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Returns the outputs of experts for the rows [R, dim] of all ranks; gradients of their parameters are averages.

    With `received_counts` the rows of each rank go through by themselves, one rank after another, and the gradient of
    each is reported (`scale_core.hooks.source_grads`). These are the same products in pieces, whose sum differs in the
    last bits; one of them is in memory with the sum.
    """

    def param(name: str, rank: int | None = None) -> Tensor:
        local_param = getattr(experts, name)
        averaged = divide_gradient(local_param, num_ranks)
        return averaged if rank is None else with_source_grads(averaged, local_param, rank)

    if received_counts is None:
        return compute(rows, counts, param)
    parts = rows.split([sum(received) for received in received_counts])
    # Where no rank has sent rows, the parameters still have to be in the graph: rank 0 stands for all.
    sources = [source for source, part in enumerate(parts) if len(part)] or [0]
    return torch.cat(
        [compute(parts[source], received_counts[source], partial(param, rank=source)) for source in sources]
    )


def divide_gradient(param: Any, num_ranks: int) -> Tensor:
    """Returns the same values, whose gradient is divided by the ranks that send tokens to an expert.

    An expert gets tokens from all these ranks, so its gradient is the sum over them, while the gradient of any
    other parameter is averaged over the ranks. Divided, it is the average as well.

    Examples:
        >>> import torch
        >>> from scale_moe.experts import divide_gradient
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> divide_gradient(param, num_ranks=4).sum().backward()
        >>> param.grad
        tensor([0.2500, 0.2500])

    See also: [the guide to experts](../guides/experts.md).
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
