"""`MoE`: a router, experts divided between ranks, and what keeps them in balance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import all_reduce, exchange
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.consistency.flight_recorder import next_unique_id
from scale_core.hooks.autograd import in_backward
from scale_moe.experts import Activation, Experts, with_order_of_rows
from scale_moe.mappings import copy_to_expert_tensor_parallel_region, reduce_from_expert_tensor_parallel_region
from scale_moe.mesh_info import ExpertMeshLike, resolve_expert_mesh
from scale_moe.routing import (
    DropOrder,
    Routing,
    ScoreFunction,
    batch_counts,
    count_assignments,
    expert_capacity,
    expert_choice_routing,
    jittered,
    load_balancing_loss,
    noisy_logits,
    router_scores,
    router_z_loss,
    top_k_routing,
    updated_bias,
    with_capacity,
)
from scale_moe.token_dispatcher import combine, dispatch, plan_dispatch


@checked_arguments
@dataclass(frozen=True)
class TokenChoice:
    """Each token chooses its experts.

    Attributes:
        top_k: How many.
        score_function: "softmax" over the experts, or "sigmoid" of each.
        normalize: Divide a token's weights by their sum.
        scaling_factor: What the weights are multiplied by at the end.
        num_groups: See `top_k_routing`.
        top_groups: See `top_k_routing`.
        capacity_factor: Each expert takes at most ceil(factor * T * k / E) choices, and further ones are dropped. None
            means no limit. T counts the tokens of all ranks of `batch_process_group`.
        drop_order: Which are dropped; see `with_capacity`.
        normalize_kept: Divide a token's weights by the sum of those that are not dropped, as GShard does.
        jitter: Multiply what the router sees by numbers from 1 - jitter to 1 + jitter, in training.
        noisy: Add noise of a learned size to the logits, in training.

    Example:
        >>> gshard = TokenChoice(2, capacity_factor=1.0, drop_order="choice", normalize_kept=True)  # at most 2 * T / E
        >>> deepseek = TokenChoice(8, "sigmoid", scaling_factor=2.5, num_groups=8, top_groups=4)

    See also: [the guide to experts](../guides/experts.md).
    """

    top_k: int = 2
    score_function: ScoreFunction = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    capacity_factor: float | None = None
    drop_order: DropOrder = "token"
    normalize_kept: bool = False
    jitter: float = 0.0
    noisy: bool = False


@checked_arguments
@dataclass(frozen=True)
class ExpertChoice:
    """Each expert chooses its tokens: ceil(factor * T / E) of the tokens of all ranks of `batch_process_group`.

    Attributes:
        capacity_factor: How many experts a token has on average.
        score_function: "softmax" over the experts, or "sigmoid" of each.

    Examples:
        >>> import torch
        >>> from scale_moe import ExpertChoice, MoE
        >>> layer = MoE(16, 32, num_experts=4, routing=ExpertChoice(2.0))
        >>> _ = layer(torch.randn(8, 16))
        >>> layer.tokens_per_expert  # ceil(2 * 8 / 4) each
        tensor([4, 4, 4, 4])

    See also: [the guide to experts](../guides/experts.md).
    """

    capacity_factor: float = 2.0
    score_function: ScoreFunction = "softmax"


@checked_arguments
@dataclass(frozen=True)
class Balance:
    """What keeps experts in balance; all of it is off at first.

    Attributes:
        aux_loss_coef: Factor of the load balancing loss, for example 0.01.
        z_loss_coef: Factor of the router's z-loss, for example 0.001.
        attached: The layer adds the gradients of its losses to the backward pass, times its attribute `aux_loss_scale`.
            If you multiply your loss, for example by 1 / the number of micro-batches or by a gradient scaler, set it to
            this factor. With False, add `coef * layer.aux_loss` to your loss.
        bias_update_rate: The step by which `update_expert_bias()` changes the bias of the expert choice, for example
            0.001.

    Examples:
        >>> import torch
        >>> from scale_moe import Balance, MoE
        >>> layer = MoE(16, 32, num_experts=4, routing=2, balance=Balance(bias_update_rate=0.001))
        >>> layer(torch.randn(8, 16)).sum().backward()
        >>> layer.update_expert_bias()  # after each optimizer step, on all ranks

    See also: [the guide to experts](../guides/experts.md).
    """

    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    attached: bool = True
    bias_update_rate: float = 0.0


@checked_arguments
class MoE(nn.Module):
    """A mixture of experts that the ranks of a group divide; each rank has its own tokens.

    Outputs and gradients are the same as on one process with all experts and the tokens of all ranks. Gradients follow
    the rule of data parallel training: the average over ranks is the gradient of one process whose loss is the average.
    Gradients of `experts` are averaged over `process_group` already. You still have to average them over ranks with the
    same experts, if there are any, and all other gradients over all ranks.

    On one process nothing has to be initialized. The router computes in fp32.

    Args:
        dim: Features of a token.
        hidden_dim: Features inside an expert.
        num_experts: E. They need not divide by the ranks; there may be fewer than ranks.
        routing: `TokenChoice` or `ExpertChoice`. A number k means `TokenChoice(k)`. For k = 1 it has `normalize=False`,
            because a weight divided by itself is 1 and trains no router.
        balance: Losses and bias, see `Balance`.
        gated: Experts are down(activation(gate(x)) * up(x)); else down(activation(up(x))).
        activation: A function of tensors.
        shared_expert: A module for [..., dim] that all tokens go through, whose output is added; each rank has it.
        process_group: The ranks that divide the experts, `ep` of a ParallelDims; None is the default group. With a mesh
            (expert, tensor), the ranks of its second dimension, `tp` of a ParallelDims, divide the hidden features of
            each expert, and have the same tokens.
        batch_process_group: The ranks whose tokens are one batch to capacities, expert choice and losses; None is the
            expert axis, if that has all tokens or nothing depends on the batch. With replicas of the experts, pass the
            ranks of both axes, without the tensor axis. With `scale_core.Group()` each rank has its own batch. If
            `process_group` is a ParallelDims, None is its `loss`.
        device: Where the parameters are.
        dtype: Their dtype.

    Raises:
        TypeError: An argument has a different type.
        ValueError: The sizes or options do not fit each other.

    Example:
        >>> import torch
        >>> layer = MoE(16, 32, num_experts=4, routing=TokenChoice(top_k=2, capacity_factor=1.25))
        >>> layer(torch.randn(3, 5, 16)).shape
        torch.Size([3, 5, 16])

    See also: [the guide to experts](../guides/experts.md).
    """

    tokens_per_expert: Tensor | None
    """[E] int64: how many of this rank's choices each expert got in the last forward, before any is dropped."""
    dropped: Tensor | None
    """[] int64: how many of them were dropped."""
    aux_loss: Tensor | None
    """[]: the load balancing loss of the last forward, without its coefficient; None where that is 0."""
    z_loss: Tensor | None
    """[]: the router's z-loss, in the same way."""

    expert_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        routing: TokenChoice | ExpertChoice | int = 2,
        *,
        balance: Balance | None = None,
        gated: bool = True,
        activation: Activation = F.silu,
        shared_expert: nn.Module | None = None,
        process_group: ExpertMeshLike = None,
        batch_process_group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(routing, TokenChoice | ExpertChoice):
            routing = TokenChoice(int(routing), normalize=routing > 1)
        self.routing = routing
        self.balance = balance or Balance()
        _check_options(dim, hidden_dim, num_experts, self.routing, self.balance)
        mesh = resolve_expert_mesh(process_group)
        self.group = mesh.expert
        if batch_process_group is None and isinstance(process_group, ParallelDims):
            batch_process_group = process_group
        if batch_process_group is None:
            _check_batch(mesh.whole, self.routing, self.balance)
        self.batch_group = self.group if batch_process_group is None else group_of(batch_process_group, "loss")
        self.dim, self.num_experts, self.aux_loss_scale = dim, num_experts, 1.0
        self.router = nn.Linear(dim, num_experts, bias=False, device=device, dtype=dtype)
        is_noisy = isinstance(self.routing, TokenChoice) and self.routing.noisy
        self.noise = nn.Linear(dim, num_experts, bias=False, device=device, dtype=dtype) if is_noisy else None
        options: Any = {"gated": gated, "activation": activation, "device": device, "dtype": dtype}
        self.experts = Experts(num_experts, dim, hidden_dim, process_group=process_group, **options)
        self.shared_expert = shared_expert
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if self.balance.bias_update_rate else None
        self.register_buffer("expert_bias", bias)
        # Choices since the bias was updated. No buffer: those DistributedDataParallel overwrites by rank 0's.
        self._load: Tensor | None = None
        self.tokens_per_expert = self.dropped = self.aux_loss = self.z_loss = None
        self._name = f"MoE {1 + next_unique_id('MoE', mesh.whole)}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the bias to zero, as after `to_empty`; the router and the experts have a `reset_parameters` each."""
        self._load = None
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., dim] for tokens [..., dim]; all ranks of the groups call it together, also without tokens.

        Raises:
            ValueError: The last dimension of `x` is not `dim`. For errors on all ranks see `plan_dispatch`.
            TransferError: A rank did not come.
        """
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"MoE: expected tokens [..., {self.dim}], got {list(x.shape)}")
        tokens = x.reshape(-1, self.dim)
        logits = self._router_logits(tokens)
        scores = router_scores(logits, self.routing.score_function)
        chosen = self.route(scores)
        routing = self._with_capacity(chosen)
        self._record(logits, scores, chosen, routing)
        output = _through_experts(self.experts, tokens, routing, self._name, self.router.weight)
        output = self._with_losses(output).view(x.shape)
        return output if self.shared_expert is None else output + self.shared_expert(x)

    def route(self, scores: Tensor) -> Routing:
        """Returns where tokens go by their scores [T, E], before any is dropped. Override it for a different rule."""
        if isinstance(self.routing, ExpertChoice):
            num_tokens = self._num_batch_tokens(scores)
            capacity = expert_capacity(num_tokens, self.num_experts, self.routing.capacity_factor)
            return expert_choice_routing(scores, capacity, batch_process_group=self.batch_group)
        rule = self.routing
        return top_k_routing(
            scores,
            rule.top_k,
            normalize=rule.normalize,
            scaling_factor=rule.scaling_factor,
            bias=self.expert_bias,
            num_groups=rule.num_groups,
            top_groups=rule.top_groups,
        )

    @torch.no_grad()
    def update_expert_bias(self) -> None:
        """Changes the bias by the load since the last call, of all ranks; all call it together, after each step.

        Raises:
            RuntimeError: The layer has no bias.
        """
        if self.expert_bias is None:
            raise RuntimeError("this MoE has no bias: write MoE(..., balance=Balance(bias_update_rate=0.001))")
        load = torch.zeros_like(self.expert_bias, dtype=torch.int64) if self._load is None else self._load
        all_reduce(load, self.batch_group).wait()
        self.expert_bias.copy_(updated_bias(self.expert_bias, load, self.balance.bias_update_rate))
        self._load = None

    def _router_logits(self, tokens: Tensor) -> Tensor:
        """[T, E], fp32 at least, also under autocast."""
        rule, noise = self.routing, self.noise
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            seen = tokens.to(wide)
            if self.training and isinstance(rule, TokenChoice) and rule.jitter:
                seen = jittered(seen, rule.jitter)
            logits = F.linear(seen, self.router.weight.to(wide))
            if self.training and noise is not None:
                logits = noisy_logits(logits, F.linear(seen, noise.weight.to(wide)))
        return logits

    def _with_capacity(self, chosen: Routing) -> Routing:
        rule = self.routing
        if isinstance(rule, ExpertChoice) or rule.capacity_factor is None:
            return chosen
        num_choices = self._num_batch_tokens(chosen.expert_index) * rule.top_k
        capacity = expert_capacity(num_choices, self.num_experts, rule.capacity_factor)
        return with_capacity(
            chosen,
            self.num_experts,
            capacity,
            order=rule.drop_order,
            normalize=rule.normalize_kept,
            batch_process_group=self.batch_group,
        )

    def _num_batch_tokens(self, rows: Tensor) -> int:
        return sum(row[0] for row in exchange([len(rows)], self.batch_group))  # On the host: no wait for the device.

    def _record(self, logits: Tensor, scores: Tensor, chosen: Routing, routing: Routing) -> None:
        """Keeps what can be read after a forward."""
        self.tokens_per_expert = count_assignments(chosen.expert_index, self.num_experts)
        self.dropped = routing.num_dropped
        if self.expert_bias is not None and self.training and not in_backward():  # What is recomputed counts once.
            self._load = self.tokens_per_expert + (0 if self._load is None else self._load)
        if self.balance.aux_loss_coef or self.balance.z_loss_coef:
            counts = batch_counts(chosen.expert_index, self.num_experts, self.batch_group)
            self.aux_loss = load_balancing_loss(scores, counts) if self.balance.aux_loss_coef else None
            self.z_loss = router_z_loss(logits, counts) if self.balance.z_loss_coef else None

    def _with_losses(self, output: Tensor) -> Tensor:
        """The same output, whose backward adds the gradients of the layer's losses."""
        weighted = ((self.aux_loss, self.balance.aux_loss_coef), (self.z_loss, self.balance.z_loss_coef))
        losses = [coef * loss for loss, coef in weighted if loss is not None]
        if not losses or not self.balance.attached:
            return output
        self.aux_loss, self.z_loss = (None if loss is None else loss.detach() for loss, _ in weighted)
        attached: Tensor = _WithLoss.apply(output, sum(losses), self.aux_loss_scale)  # type: ignore[no-untyped-call]
        return attached

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As any module's, but for the dtype of the bias: steps of 0.001 would be lost in half precision."""
        before = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype != before.dtype:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: not what the last forward has left, of which parts belong to its graph."""
        left = dict.fromkeys(("tokens_per_expert", "dropped", "aux_loss", "z_loss"))
        return {**self.__dict__, **left}

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.routing}"


@compat.untraced
def _through_experts(experts: Experts, tokens: Tensor, routing: Routing, name: str, router: Tensor) -> Tensor:
    expert, tensor, _ = experts.mesh
    where: Any = (experts.num_experts, expert, name)
    checks: Any = {"router": router, "tensor_parallel_group": tensor}
    plan = plan_dispatch(tokens, routing.expert_index, routing.weight, *where, **checks)
    tokens, weight = (copy_to_expert_tensor_parallel_region(each, tensor, name) for each in (tokens, routing.weight))
    plan, received_counts = with_order_of_rows(plan)
    rows: Tensor = experts(dispatch(tokens, plan), plan.counts, received_counts)
    return reduce_from_expert_tensor_parallel_region(combine(rows, weight, plan), tensor, name)


class _WithLoss(torch.autograd.Function):
    """The output; in the backward pass the loss gets the gradient `scale`, whatever comes for the output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grad, torch.full((), float(ctx.scale), dtype=dtype, device=device), None


def _check_options(
    dim: int, hidden_dim: int, num_experts: int, routing: TokenChoice | ExpertChoice, balance: Balance
) -> None:
    for name, value in (("dim", dim), ("hidden_dim", hidden_dim), ("num_experts", num_experts)):
        if value < 1:
            raise ValueError(f"MoE: expected {name} of at least 1, got {value}")
    for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
        value = getattr(balance, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"MoE: expected {name} of Balance to be 0 or above, and finite, got {value}")
    router_scores(torch.zeros(0, num_experts), routing.score_function)
    factor = routing.capacity_factor
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"MoE: expected capacity_factor above 0, or None for no limit, got {factor}")
    if isinstance(routing, ExpertChoice):
        if balance != Balance():
            raise ValueError(
                f"MoE: experts that choose their tokens are in balance, and {balance} would have no effect: leave "
                "balance= out"
            )
        return
    # Sizes that do not fit raise here, and not in the first forward.
    top_k_routing(
        torch.zeros(0, num_experts), routing.top_k, num_groups=routing.num_groups, top_groups=routing.top_groups
    )
    if routing.num_groups < 1 or (routing.num_groups == 1 and routing.top_groups != 1):
        raise ValueError(
            f"MoE: top_groups={routing.top_groups} chooses among num_groups, got num_groups={routing.num_groups}: give "
            "both, as TokenChoice(8, num_groups=8, top_groups=4), or neither"
        )
    if factor is None and (routing.drop_order != "token" or routing.normalize_kept):
        raise ValueError(
            f"MoE: drop_order={routing.drop_order!r} and normalize_kept={routing.normalize_kept} are for choices that "
            "are dropped, and without a capacity_factor none is: give one, as capacity_factor=1.25, or leave them out"
        )
    if routing.drop_order not in get_args(DropOrder):
        raise ValueError(f"MoE: expected drop_order to be one of {get_args(DropOrder)}, got {routing.drop_order!r}")
    if not 0 <= routing.jitter < 1:
        raise ValueError(f"MoE: expected jitter from 0 to below 1, got {routing.jitter}")
    is_one = routing.top_k == 1 and num_experts > 1 and not balance.aux_loss_coef
    if is_one and (routing.normalize or routing.normalize_kept):
        name = "normalize" if routing.normalize else "normalize_kept"
        raise ValueError(
            f"MoE: with {name}=True the weight of a token's one expert is always 1, and the router gets no gradient: "
            f"write TokenChoice(1, normalize=False{', normalize_kept=False' if routing.normalize_kept else ''}, ...), "
            "or Balance(aux_loss_coef=0.01) for one that learns to balance alone"
        )


def _check_batch(group: Group, routing: TokenChoice | ExpertChoice, balance: Balance) -> None:
    """Raises where other ranks may have replicas of the experts, and what looks at the batch would miss theirs."""
    uses = {
        "expert choice": isinstance(routing, ExpertChoice),
        "capacity_factor": isinstance(routing, TokenChoice) and routing.capacity_factor is not None,
        "aux_loss_coef": balance.aux_loss_coef,
        "z_loss_coef": balance.z_loss_coef,
        "bias_update_rate": balance.bias_update_rate,
    }
    used = [name for name, is_used in uses.items() if is_used]
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if used and group.size < world:
        raise ValueError(
            f"MoE: {' and '.join(used)} look at the tokens of a batch, and process_group has {group.size} of {world} "
            "ranks: say whose tokens it holds by batch_process_group=, as the ranks of the data and expert axes "
            "together (torch.distributed.group.WORLD where these are all), or scale_core.Group() for each rank alone"
        )
