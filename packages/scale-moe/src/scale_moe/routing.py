"""Routing: which experts each token goes to, and with which weight; functions of tensors, without parameters.

T tokens, E experts, k choices of a token. "The batch" of capacity, expert choice and losses spans all ranks of
`batch_process_group`, in rank order, so that the result is the same as on one process with all tokens. With `Group()`,
it is only the tokens of this rank, as in GShard's groups.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_core import compat
from scale_core.comm.collectives import all_gather, all_reduce, exchange
from scale_core.comm.group import Group
from scale_core.consistency.execution_order import Event, message_tag

ScoreFunction: TypeAlias = Literal["softmax", "sigmoid"]
DropOrder: TypeAlias = Literal["token", "choice", "weight"]

NO_EXPERT = -1
"""The index of a choice that goes to no expert."""


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        expert_index: [T, k] int64, the expert of each choice; -1 if the choice was dropped, or there is none.
        weight: [T, k] fp32, the factor of the expert's output; 0 if there is no expert.
        num_dropped: [] int64, how many choices of this rank's tokens were dropped.

    See also: [the guide to experts](../guides/experts.md).
    """

    expert_index: Tensor
    weight: Tensor
    num_dropped: Tensor


def router_scores(logits: Tensor, score_function: ScoreFunction = "softmax") -> Tensor:
    """Returns the affinity [T, E] of tokens and experts, in fp32 at least.

    "softmax" over the experts is from Shazeer et al. (arXiv 1701.06538) and Switch (arXiv 2101.03961, eq. 1),
    "sigmoid" of each is from DeepSeek-V3 (arXiv 2412.19437, eq. 15).

    Args:
        logits: [T, E], what the router computes.
        score_function: "softmax" or "sigmoid".

    Raises:
        ValueError: Another one.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import router_scores
        >>> router_scores(torch.tensor([[0.0, 0.0]]))
        tensor([[0.5000, 0.5000]])

    See also: [the guide to experts](../guides/experts.md).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if score_function == "softmax":
        return wide.softmax(-1)
    if score_function == "sigmoid":
        return wide.sigmoid()
    raise ValueError(f"expected score_function to be 'softmax' or 'sigmoid', got {score_function!r}")


def top_k_routing(
    scores: Tensor,
    top_k: int,
    *,
    normalize: bool = True,
    scaling_factor: float = 1.0,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """Token choice: each token goes to the k experts of its highest scores.

        g_i = s_i / (sum of the chosen s_j)     (Mixtral, arXiv 2401.04088; DeepSeek-V3, eq. 13)

    Args:
        scores: [T, E], as `router_scores` gives them.
        top_k: k, from 1 to E.
        normalize: Divide the weights of a token by their sum; for k = 1 Switch does not.
        scaling_factor: What the weights are multiplied by at the end, `routed_scaling_factor` of DeepSeek.
        bias: [E], added to the scores to choose experts and not to weigh them (DeepSeek-V3, eq. 16).
        num_groups: The number of expert groups, all of one size. A token goes to experts of `top_groups` groups: those
            with the highest sums of their two highest scores (DeepSeek-V3, section 2.1.2).
        top_groups: See `num_groups`.

    Raises:
        ValueError: There are fewer experts than choices, or the groups do not fit.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import router_scores, top_k_routing
        >>> routing = top_k_routing(router_scores(torch.tensor([[2.0, 0.0, 1.0]])), top_k=2)
        >>> routing.expert_index
        tensor([[0, 2]])

    See also: [the guide to experts](../guides/experts.md).
    """
    if scores.dim() != 2:
        raise ValueError(f"expected scores of shape [tokens, experts], got {list(scores.shape)}")
    num_experts = scores.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"expected top_k from 1 to {num_experts}, the number of experts, got {top_k}")
    selection = scores.detach()
    if bias is not None:
        selection = selection + bias
    if num_groups > 1:
        selection = _limited_to_groups(selection, top_k, num_groups, top_groups)
    index = selection.topk(top_k, dim=-1).indices
    weight = scores.gather(1, index)
    if normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return Routing(index, weight * scaling_factor, index.new_zeros(()))


def _limited_to_groups(selection: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """The scores [T, E] with -inf where an expert is in none of a token's best groups."""
    num_experts = selection.shape[1]
    size = num_experts // num_groups
    if num_experts % num_groups or not 1 <= top_groups <= num_groups or top_groups * size < top_k:
        raise ValueError(
            f"expected num_groups to divide {num_experts} experts, and top_groups of them to hold top_k={top_k}, got "
            f"num_groups={num_groups}, top_groups={top_groups}"
        )
    by_group = selection.unflatten(1, (num_groups, size))
    best = by_group.topk(min(2, size), dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    is_best = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
    limited: Tensor = by_group.masked_fill(~is_best[..., None], -math.inf).flatten(1)
    return limited


def expert_choice_routing(scores: Tensor, capacity: int, *, batch_process_group: Group | None = None) -> Routing:
    """Expert choice: each expert takes the `capacity` tokens of the batch that have its highest scores.

    (Zhou et al., arXiv 2202.09368, eq. 2.) Experts are always in balance; a token has from 0 to E of them. Since an
    expert looks at the whole batch, a token depends on later ones: not for models that generate.

    Args:
        scores: [T, E], softmax over the experts in the paper.
        capacity: How many tokens each expert takes; all of them, where there are fewer.
        batch_process_group: The ranks whose tokens are the batch; None is this rank. All of them call it together.

    Raises:
        ValueError: `capacity` is below 1.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import expert_choice_routing, router_scores
        >>> scores = router_scores(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
        >>> expert_choice_routing(scores, capacity=1).expert_index[:, 0]
        tensor([0, 1])

    See also: [the guide to experts](../guides/experts.md).
    """
    if capacity < 1:
        raise ValueError(f"expected a capacity of at least 1, got {capacity}")
    batch = _rows_of_all_ranks(scores.detach(), batch_process_group or Group())
    taken = batch.scores.topk(min(capacity, len(batch.scores)), dim=0).indices
    is_taken = torch.zeros_like(batch.scores, dtype=torch.bool).scatter_(0, taken, True)[batch.mine]
    num_choices = 1
    if len(scores):  # The host waits for the device: with all E choices each token would be added E times.
        most = is_taken.sum(-1).max(-1, keepdim=True).values
        simulated = [float(-(-taken.numel() // len(batch.scores)))]
        num_choices = max(1, int(compat.values_of(most, simulated=simulated)[0]))
    order = is_taken.to(torch.int8).sort(dim=-1, descending=True, stable=True)
    index, is_choice = order.indices[:, :num_choices], order.values[:, :num_choices].bool()
    weight = scores.gather(1, index).masked_fill(~is_choice, 0.0)
    return Routing(index.masked_fill(~is_choice, NO_EXPERT), weight, index.new_zeros(()))


def expert_capacity(num_assignments: int, num_experts: int, capacity_factor: float) -> int:
    """Returns how many assignments an expert takes: ceil(factor * assignments / experts) (Switch, eq. 3).

    With two choices and a factor of 1 it is GShard's 2 * S / E.

        >>> expert_capacity(2 * 10, 4, 1.0)
        5

    See also: [the guide to experts](../guides/experts.md).
    """
    # Of a factor such as 1.1, a product that is whole but for its rounding must not become the next number.
    return max(1, math.ceil(capacity_factor * num_assignments / num_experts - 1e-9))


def with_capacity(
    routing: Routing,
    num_experts: int,
    capacity: int,
    *,
    order: DropOrder = "token",
    normalize: bool = False,
    batch_process_group: Group | None = None,
) -> Routing:
    """Drops choices beyond `capacity` of an expert; those that stay are first by `order`.

    Args:
        routing: Of this rank's tokens.
        num_experts: E.
        capacity: How many of the batch's choices an expert takes.
        order: "token": earlier tokens first (Switch). "choice": first choices of all tokens before second ones
            (GShard, arXiv 2006.16668, algorithm 1). "weight": higher weights (V-MoE's batch prioritised routing,
            arXiv 2106.05974).
        normalize: Divide what weights a token has left by their sum, as GShard does.
        batch_process_group: The ranks whose tokens are the batch; None is this rank. All of them call it together.

    Raises:
        ValueError: Another order, or a capacity below 1.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import router_scores, top_k_routing, with_capacity
        >>> routing = top_k_routing(router_scores(torch.tensor([[2.0, 0.0], [1.0, 0.0]])), top_k=1)
        >>> with_capacity(routing, num_experts=2, capacity=1).num_dropped
        tensor(1)

    See also: [the guide to experts](../guides/experts.md).
    """
    if capacity < 1:
        raise ValueError(f"expected a capacity of at least 1, got {capacity}")
    index = routing.expert_index
    facts = torch.cat([index.to(torch.float64), routing.weight.detach().to(torch.float64)], dim=1)
    batch = _rows_of_all_ranks(facts, batch_process_group or Group())
    all_index, all_weight = batch.scores.chunk(2, dim=1)
    key = all_index.to(torch.int64)
    key = torch.where(key < 0, num_experts, key)
    if order == "token":
        ranked = torch.arange(key.numel(), device=key.device)
    elif order == "choice":
        ranked = torch.arange(key.numel(), device=key.device).view_as(key).t().reshape(-1)
    elif order == "weight":
        ranked = all_weight.flatten().argsort(descending=True, stable=True)
    else:
        raise ValueError(f"expected order to be 'token', 'choice' or 'weight', got {order!r}")
    expert = key.flatten()[ranked]
    by_expert = expert.argsort(stable=True)
    counts = count_assignments(key, num_experts + 1)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(expert), device=key.device) - first[expert[by_expert]]
    is_kept = torch.empty_like(expert, dtype=torch.bool)
    is_kept[ranked[by_expert]] = place < capacity
    is_kept = is_kept.view_as(key)[batch.mine] & (index >= 0)
    weight = routing.weight.masked_fill(~is_kept, 0.0)
    if normalize:
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    num_dropped = routing.num_dropped + ((index >= 0) & ~is_kept).sum()
    return Routing(index.masked_fill(~is_kept, NO_EXPERT), weight, num_dropped)


def count_assignments(expert_index: Tensor, num_experts: int) -> Tensor:
    """Returns how many choices go to each expert, [E] int64; -1 is none."""
    flat = expert_index.flatten()
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, key, torch.ones_like(key))[:num_experts]


class BatchCounts(NamedTuple):
    """What losses ask of the batch: its choices per expert [E] int64, and its tokens per rank, a number [] fp32."""

    per_expert: Tensor
    tokens_per_rank: Tensor


def batch_counts(expert_index: Tensor, num_experts: int, batch_process_group: Group | None = None) -> BatchCounts:
    """Returns the counts of the batch; all ranks of the group call it together.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import batch_counts
        >>> batch_counts(torch.tensor([[0, 1], [1, 2]]), num_experts=3).per_expert
        tensor([1, 2, 1])

    See also: [the guide to experts](../guides/experts.md).
    """
    group = batch_process_group or Group()
    own = count_assignments(expert_index, num_experts)
    counts = torch.cat([own, own.new_full((1,), len(expert_index))])
    all_reduce(counts, group).wait()
    return BatchCounts(counts[:-1], (counts[-1] / group.size).clamp_min(1 / group.size))


def load_balancing_loss(scores: Tensor, counts: BatchCounts) -> Tensor:
    """Returns Switch's auxiliary loss, 1 where all experts have the same load (arXiv 2101.03961, eq. 4 to 6).

        loss = E * sum over i of f_i * P_i

    f_i is the fraction of the batch's choices that go to expert i, P_i the mean of its scores, each token's divided by
    their sum. With more than one choice it is GShard's and DeepSeek's (arXiv 2412.19437, eq. 17 to 20). Its mean over
    ranks is the loss of one process, since f is the whole batch's (as in arXiv 2501.11873) and P is linear.

    Args:
        scores: [T, E], of this rank's tokens.
        counts: As `batch_counts` gives them, of choices before any is dropped.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import batch_counts, load_balancing_loss, router_scores
        >>> scores = router_scores(torch.zeros(2, 3))
        >>> load_balancing_loss(scores, batch_counts(torch.tensor([[0, 1], [1, 2]]), num_experts=3))
        tensor(1.)

    See also: [the guide to experts](../guides/experts.md).
    """
    probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    fraction = counts.per_expert / counts.per_expert.sum().clamp_min(1)
    mean = probabilities.sum(0) / counts.tokens_per_rank
    return scores.shape[1] * (fraction.to(mean.dtype) * mean).sum()


def router_z_loss(logits: Tensor, counts: BatchCounts) -> Tensor:
    """Returns the mean of (log sum exp of a token's logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).

    Its mean over ranks is the loss of one process, also where ranks have different numbers of tokens.

    Args:
        logits: [T, E], of this rank's tokens.
        counts: As `batch_counts` gives them.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import batch_counts, router_z_loss
        >>> router_z_loss(torch.zeros(2, 3), batch_counts(torch.tensor([[0], [1]]), num_experts=3))
        tensor(1.2069)

    See also: [the guide to experts](../guides/experts.md).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1).square().sum() / counts.tokens_per_rank


def jittered(tokens: Tensor, epsilon: float) -> Tensor:
    """Multiplies tokens by numbers drawn between 1 - epsilon and 1 + epsilon (Switch, section 2.4).

    Examples:
        >>> import torch
        >>> from scale_moe.routing import jittered
        >>> bool((jittered(torch.ones(4), 0.01) - 1).abs().max() <= 0.01)
        True

    See also: [the guide to experts](../guides/experts.md).
    """
    return tokens * torch.empty_like(tokens).uniform_(1.0 - epsilon, 1.0 + epsilon)


def noisy_logits(logits: Tensor, noise_logits: Tensor) -> Tensor:
    """Adds normal noise of a learned size, N(0, 1) * softplus(noise) (arXiv 1701.06538, eq. 4).

    Examples:
        >>> import torch
        >>> from scale_moe.routing import noisy_logits
        >>> noisy_logits(torch.zeros(2, 3), torch.full((2, 3), -30.0)).abs().max() < 1e-6  # hardly any noise
        tensor(True)

    See also: [the guide to experts](../guides/experts.md).
    """
    return logits + torch.randn_like(logits) * F.softplus(noise_logits)


def updated_bias(bias: Tensor, tokens_per_expert: Tensor, rate: float) -> Tensor:
    """Returns a bias that is higher by `rate` for experts below the mean load, and lower for those above it.

    (DeepSeek-V3, section 2.1.2; arXiv 2408.15664, algorithm 1.)

    Args:
        bias: [E], see `top_k_routing`.
        tokens_per_expert: [E], of the batch of the last step.
        rate: gamma of the paper, there 0.001.

    Examples:
        >>> import torch
        >>> from scale_moe.routing import updated_bias
        >>> updated_bias(torch.zeros(3), torch.tensor([5, 1, 3]), rate=0.001)
        tensor([-0.0010,  0.0010,  0.0000])

    See also: [the guide to experts](../guides/experts.md).
    """
    load = tokens_per_expert.to(bias.dtype)
    return bias + rate * (load.mean() - load).sign()


class _Batch(NamedTuple):
    scores: Tensor  # [tokens of all ranks, n]
    mine: slice  # which of the rows are this rank's


def _rows_of_all_ranks(rows: Tensor, group: Group) -> _Batch:
    """The rows [T, n] of all ranks, in rank order."""
    if group.size == 1:
        return _Batch(rows, slice(0, len(rows)))
    lengths = [row[0] for row in exchange([len(rows)], group)]
    width = rows.shape[1]
    whole = torch.empty(sum(lengths) * width, dtype=rows.dtype, device=rows.device)
    tag = message_tag(Event(f"gather of routing {rows.dtype} {width}", ""))
    sizes = [length * width for length in lengths]
    all_gather(whole, rows.contiguous().view(-1), group, sizes=sizes, tag=tag).wait()
    first = sum(lengths[: group.rank])
    return _Batch(whole.view(-1, width), slice(first, first + len(rows)))
