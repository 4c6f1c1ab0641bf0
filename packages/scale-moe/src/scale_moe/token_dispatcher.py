"""Dispatch and combine: each token's row to the ranks of its experts and back, by all-to-all of exact sizes.

    tokens [T, dim]                                        of this rank
      -> a copy for each choice, sorted by expert          [A, dim]   A = the choices that go to an expert
      -> all-to-all: each rank gets its experts' copies    [R, dim]
      -> by expert; of one expert by rank, then by token
    experts
      -> the same way back
      -> each token adds up its rows times their weights   [T, dim]

So the rows of an expert are in the order that one process with the tokens of all ranks would have them in, and products
with its weights are the same to the bit. Nothing is padded. The backward of each of the two is the way of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core import compat
from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import all_gather
from scale_core.comm.group import Group
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.consistency.same_call import check_same_call
from scale_core.device.streams import tensor_on
from scale_core.errors import TransferError
from scale_moe.routing import count_assignments


def experts_per_rank(num_experts: int, num_ranks: int) -> list[int]:
    """Returns how many experts each rank has, in their order; the first ranks have one more where they don't divide.

    >>> experts_per_rank(8, 3)
    [3, 3, 2]

    See also: [the guide to experts](../guides/experts.md).
    """
    least, more = divmod(num_experts, num_ranks)
    return [least + (rank < more) for rank in range(num_ranks)]


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Which rows go where, of one call.

    Attributes:
        group: The ranks that the experts are divided between.
        name: The layer's name in errors, and in the tags of its messages.
        num_tokens: T, of this rank.
        token: [A] int64, the token of each row, by expert; of one expert by token.
        choice: [T, k] int64, each token's choices in the order of their experts; those without one last.
        slot: [T, k] int64, where the rows of these choices stand, in 0..A-1; A where there is none.
        order: [A] int64, which of the T * k choices each row is.
        sent: How many rows go to each rank.
        received: How many rows come from each rank.
        regroup: [R] int64, which received row stands where by expert; None where they come in that order.
        counts: How many of the R rows each expert of this rank has.
        received_counts: The same, of the rows that come from each rank.

    See also: [the guide to experts](../guides/experts.md).
    """

    group: Group
    name: str
    num_tokens: int
    token: Tensor
    choice: Tensor
    slot: Tensor
    order: Tensor
    sent: list[int]
    received: list[int]
    regroup: Tensor | None
    counts: list[int]
    received_counts: list[list[int]]

    def by_rank(self) -> DispatchPlan:
        """The same rows in the order of the ranks that they come from; of one rank by expert, then by token."""
        return replace(self, regroup=None)


@torch.no_grad()
def plan_dispatch(
    tokens: Tensor,
    expert_index: Tensor,
    weight: Tensor,
    num_experts: int,
    group: Group,
    name: str = "the experts",
    *,
    router: Tensor | None = None,
    tensor_parallel_group: Group | None = None,
) -> DispatchPlan:
    """Plans the dispatch of a layer's tokens; all ranks of the group call it together.

    Ranks tell each other how many rows come, and whether something is wrong, in one small message.

    Args:
        tokens: [T, dim], what will be sent.
        expert_index: [T, k] int64; -1, and any number that is not an expert's, means no choice.
        weight: [T, k], the factors of the experts' outputs.
        num_experts: E, of all ranks; see `experts_per_rank`.
        group: The ranks that the experts are divided between.
        name: The layer's name in errors; the same on all ranks.
        router: Weights of the router, of which each rank has a copy: ranks compare a sum of their bits.
        tensor_parallel_group: Ranks that divide the hidden features of the same experts, and so have the same tokens:
            they compare sums of their bits.

    Raises:
        ValueError: The shapes do not fit each other. On all ranks: the layers or routers differ, a weight is not
            finite, only some ranks' tokens need gradients, or ranks of a `tensor_parallel_group` have different tokens.
        TransferError: A rank did not come.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_moe.token_dispatcher import plan_dispatch
        >>> tokens, weight = torch.ones(2, 4), torch.full((2, 2), 0.5)
        >>> plan = plan_dispatch(tokens, torch.tensor([[0, 1], [1, 2]]), weight, 3, Group())
        >>> plan.counts  # rows of each expert of this rank
        [1, 2, 1]

    See also: [the guide to experts](../guides/experts.md).
    """
    _check_shapes(tokens, expert_index, weight, name)
    sizes = experts_per_rank(num_experts, group.size)
    dtypes = f"{tokens.dtype} tokens of {tokens.shape[1]}"
    other = _first_with_other_tokens(tokens, expert_index, weight, router, tensor_parallel_group or Group(), name)
    check_same_call("mixture of experts", f"{name}: {num_experts} experts, {dtypes}", group)
    num_tokens, top_k = expert_index.shape
    flat = expert_index.reshape(-1)
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    own = count_assignments(key, num_experts)
    needs = own.new_full((), _needs_gradients(tokens, weight))
    bits = own.new_zeros(()) if router is None or group.size == 1 else _sum_of_bits(router)
    facts = torch.stack([(~weight.isfinite()).sum(), needs, bits, other])
    header = _exchange_header(own, facts, sizes, flat.numel(), group, name)
    _check_same_tokens(header.facts, group.rank, tensor_parallel_group, name)
    _check_facts(header.facts, group, name)
    num_rows = sum(header.own)
    order = key.argsort(stable=True)[:num_rows]
    slot = torch.full((num_tokens * top_k,), num_rows, dtype=torch.int64, device=flat.device)
    slot[order] = torch.arange(num_rows, device=flat.device)
    slots = slot.view(num_tokens, top_k).sort(dim=1, stable=True)
    bounds = [0, *itertools.accumulate(sizes)]
    return DispatchPlan(
        group,
        name,
        num_tokens,
        order // max(top_k, 1),
        slots.indices,
        slots.values,
        order,
        [sum(header.own[first:last]) for first, last in itertools.pairwise(bounds)],
        [sum(counts) for counts in header.received],
        _regrouping(header.received, flat.device),
        [sum(column) for column in zip(*header.received, strict=True)],
        header.received,
    )


def dispatch(tokens: Tensor, plan: DispatchPlan) -> Tensor:
    """Returns the rows [R, dim] of this rank's experts, by expert, for the tokens [T, dim]; all ranks call it.

    Megatron's `token_permutation`; `combine` is its `token_unpermutation`.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_moe.token_dispatcher import dispatch, plan_dispatch
        >>> tokens, weight = torch.tensor([[1.0], [2.0]]), torch.full((2, 2), 0.5)
        >>> plan = plan_dispatch(tokens, torch.tensor([[0, 1], [1, 2]]), weight, 3, Group())
        >>> dispatch(tokens, plan).flatten()  # experts 0, 1, 1, 2
        tensor([1., 1., 2., 2.])

    See also: [the guide to experts](../guides/experts.md).
    """
    return cast(Tensor, _Dispatch.apply(tokens, plan))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def combine(rows: Tensor, weight: Tensor, plan: DispatchPlan) -> Tensor:
    """Returns for each token the sum of its experts' rows times their weights, [T, dim]; all ranks call it together.

    A token's rows are added in the order of their experts, in fp32 at least, and rounded once.

    Args:
        rows: [R, dim], in the order of `dispatch`.
        weight: [T, k], of this rank's tokens.
        plan: Of the dispatch.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_moe.token_dispatcher import combine, dispatch, plan_dispatch
        >>> tokens, weight = torch.ones(2, 4), torch.full((2, 2), 0.5)
        >>> plan = plan_dispatch(tokens, torch.tensor([[0, 1], [1, 2]]), weight, 3, Group())
        >>> rows = dispatch(tokens, plan)  # what experts compute with
        >>> combine(rows, weight, plan)
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.]])

    See also: [the guide to experts](../guides/experts.md).
    """
    return cast(Tensor, _Combine.apply(rows, weight, plan))  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return _to_experts(tokens[plan.token], plan, "dispatch")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = _to_tokens(grad, ctx.plan, "backward of dispatch")
        return _sum_by_token(rows, None, ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, plan: DispatchPlan) -> Tensor:
        back = _to_tokens(rows, plan, "combine")
        ctx.plan = plan
        ctx.save_for_backward(back if ctx.needs_input_grad[1] else None, weight)
        return _sum_by_token(back, weight, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        plan: DispatchPlan = ctx.plan
        back, weight = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            weighted = grad[plan.token] * weight.reshape(-1)[plan.order, None]
            grad_rows = _to_experts(weighted.to(grad.dtype), plan, "backward of combine")
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(grad.dtype, torch.float32)
            columns = [_rows_at(back, plan, column) for column in range(plan.slot.shape[1])]
            dots = [(rows.to(wide) * grad.to(wide)).sum(-1) for rows in columns]
            by_slot = torch.stack(dots, dim=1) if dots else weight.new_empty(weight.shape, dtype=wide)
            grad_weight = torch.empty_like(by_slot).scatter_(1, plan.choice, by_slot).to(weight.dtype)
        return grad_rows, grad_weight, None


def _rows_at(rows: Tensor, plan: DispatchPlan, column: int) -> Tensor:
    """The row [T, dim] of each token's choice in a column of `slot`; zeros where there is none."""
    slot, num_rows = plan.slot[:, column], len(rows)
    if num_rows == plan.slot.numel():
        return rows[slot]
    if not num_rows:
        return rows.new_zeros(plan.num_tokens, rows.shape[1])
    # Of fixed size: to ask which tokens have one, the host would wait for the device.
    return rows[slot.clamp(max=num_rows - 1)].masked_fill_((slot >= num_rows)[:, None], 0)


def _sum_by_token(rows: Tensor, weight: Tensor | None, plan: DispatchPlan) -> Tensor:
    """Adds up the rows [A, dim] of each token, times weights [T, k], one column after another."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(plan.num_tokens, rows.shape[1], dtype=wide, device=rows.device)
    weights = None if weight is None else weight.gather(1, plan.choice).to(wide)
    for column in range(plan.slot.shape[1]):
        found = _rows_at(rows, plan, column).to(wide)
        total += found if weights is None else found * weights[:, column, None]
    return total.to(rows.dtype)


def _to_experts(rows: Tensor, plan: DispatchPlan, what: str) -> Tensor:
    """Sends rows [A, dim] to the ranks of their experts; returns those [R, dim] that came, by expert."""
    received = _exchange_rows(rows, plan.sent, plan.received, plan, what)
    return received if plan.regroup is None else received[plan.regroup]


def _to_tokens(rows: Tensor, plan: DispatchPlan, what: str) -> Tensor:
    """Sends rows [R, dim] back to where they came from; returns this rank's [A, dim]."""
    if plan.regroup is not None:
        rows = torch.empty_like(rows).index_copy_(0, plan.regroup, rows)
    return _exchange_rows(rows, plan.received, plan.sent, plan, what)


def _exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], plan: DispatchPlan, what: str) -> Tensor:
    if plan.group.size == 1:
        return rows
    dim = rows.shape[1]
    output = torch.empty(sum(received) * dim, dtype=rows.dtype, device=rows.device)
    try:
        return (
            all_to_all(
                output,
                rows.contiguous().view(-1),
                plan.group,
                output_sizes=[size * dim for size in received],
                input_sizes=[size * dim for size in sent],
                tag=message_tag(Event(f"{what} {rows.dtype} {dim}", plan.name)),
            )
            .wait()
            .view(-1, dim)
        )
    except TransferError as error:
        _explain(error, what, plan.group, plan.name)
        raise


class _Header(NamedTuple):
    own: list[int]  # rows of this rank's tokens, by expert of all
    received: list[list[int]]  # rows that come, by rank and expert of this rank
    facts: list[list[int]]  # by rank


def _exchange_header(
    own: Tensor, facts: Tensor, sizes: list[int], num_choices: int, group: Group, name: str
) -> _Header:
    """Tells each rank how many rows come for its experts, and all of them this rank's facts.

    In a simulation, whose tensors have no values, the choices are evenly spread over the experts.
    """
    here = sizes[group.rank]
    if group.size == 1 or group.backend == "fake":  # In a simulation all ranks are taken to have this rank's tokens.
        spread = [float(size) for size in experts_per_rank(num_choices, len(own))]
        known = compat.values_of(torch.cat([own, facts]), simulated=[*spread, *[0.0] * len(facts)])
        both = [int(value) for value in known]
        first = sum(sizes[: group.rank])
        counts, told = both[: len(own)], both[len(own) :]
        return _Header(counts, [counts[first : first + here]] * group.size, [told] * group.size)
    extra = len(facts)
    sent = torch.cat([part for counts in own.split(sizes) for part in (counts, facts)])
    received = torch.empty(group.size * (here + extra), dtype=sent.dtype, device=sent.device)
    try:
        all_to_all(
            received,
            sent,
            group,
            output_sizes=[here + extra] * group.size,
            input_sizes=[size + extra for size in sizes],
            tag=message_tag(Event(f"counts of {len(own)} experts", name)),
        ).wait()
    except TransferError as error:
        _explain(error, "counts of tokens", group, name)
        raise
    # The one wait for the device: sizes of messages and of memory are the host's.
    values = [int(value) for value in compat.values_of(torch.cat([own, received]), simulated=[])]
    starts = range(len(own), len(values), here + extra)
    rows = [values[start : start + here + extra] for start in starts]
    return _Header(values[: len(own)], [row[:here] for row in rows], [row[here:] for row in rows])


def _regrouping(received: list[list[int]], device: torch.device) -> Tensor | None:
    """Which received row stands where, from the order by rank to that by expert."""
    num_ranks, num_experts = len(received), len(received[0])
    if num_ranks == 1 or num_experts < 2:
        return None
    counts = tensor_on(device, received).flatten()
    expert = torch.arange(num_experts, device=device).repeat(num_ranks)
    total = sum(map(sum, received))
    return expert.repeat_interleave(counts, output_size=total).argsort(stable=True)


def _first_with_other_tokens(
    tokens: Tensor, expert_index: Tensor, weight: Tensor, router: Tensor | None, group: Group, name: str
) -> Tensor:
    """The place [] int64 of the first rank of a tensor axis with other tokens or routes than its rank 0; 0 is none."""
    if group.size == 1 or group.backend == "fake":
        return expert_index.new_zeros(())
    place = 2 * torch.arange(len(tokens), device=tokens.device) + 1  # Other orders of the same tokens differ, too.
    rows = (_bits(tokens).sum(-1) * place, _bits(expert_index).sum(-1) * place, _bits(weight).sum(-1) * place)
    sums = [row.sum() for row in rows] + ([] if router is None else [_sum_of_bits(router)])
    sizes = (*tokens.shape, expert_index.shape[1], _needs_gradients(tokens, weight))
    record = torch.stack([expert_index.new_full((), size) for size in sizes] + sums)
    records = record.new_empty(group.size * len(record))
    # On the device, as `exchange` would wait for it: the host learns the outcome with the sizes of messages.
    tag = message_tag(Event(f"compare tokens by {len(record)}", name))
    records = all_gather(records, record, group, tag=tag).wait().view(group.size, -1)
    return (records != records[0]).any(-1).to(torch.int64).argmax()


def _check_same_tokens(facts: list[list[int]], rank: int, group: Group | None, name: str) -> None:
    if any(row[3] for row in facts):
        other = facts[rank][3]
        which = (
            f"rank {group.ranks[other]} of {list(group.ranks)} has" if other and group else "some on another row have"
        )
        raise ValueError(
            f"{name}: ranks that divide the hidden features of the same experts must have the same tokens, routes and "
            f"router, and {which} different ones: give them the same batch (for example by a sampler over the other "
            "axes), the same weights, and for dropout or noise the same random state"
        )


def _needs_gradients(tokens: Tensor, weight: Tensor) -> int:
    return int(tokens.requires_grad) + 2 * int(weight.requires_grad)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """[] int64; equal for equal tensors."""
    return _bits(tensor).sum()


def _bits(tensor: Tensor) -> Tensor:
    """Elements as integers, int64."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integers).to(torch.int64)


def _check_shapes(tokens: Tensor, expert_index: Tensor, weight: Tensor, name: str) -> None:
    fits = tokens.dim() == expert_index.dim() == 2 and expert_index.shape == weight.shape
    if not fits or len(tokens) != len(expert_index) or expert_index.dtype != torch.int64:
        raise ValueError(
            f"{name}: expected tokens [T, dim] with the indices of their experts [T, k] int64 and "
            f"weights [T, k], got {list(tokens.shape)}, {list(expert_index.shape)} {expert_index.dtype} and "
            f"{list(weight.shape)}"
        )


def _check_facts(facts: list[list[int]], group: Group, name: str) -> None:
    wrong = {rank: row[0] for rank, row in enumerate(facts) if row[0]}
    if wrong:
        told = ", ".join(f"{count} of rank {rank}" for rank, count in wrong.items())
        raise ValueError(
            f"{name}: weights of choices are not finite ({told} of the ranks "
            f"{list(group.ranks)}), since the router's scores or the tokens are not. Nothing was sent. Look for where "
            "the first NaN comes from with torch.autograd.detect_anomaly(), lower the learning rate, or clip gradients"
        )
    if len({row[1] for row in facts}) > 1:
        told = ", ".join(
            f"rank {rank}: tokens {'do' if row[1] & 1 else 'do not'}, weights {'do' if row[1] & 2 else 'do not'}"
            for rank, row in enumerate(facts)
        )
        raise ValueError(
            f"{name}: ranks differ in which tensors need gradients ({told}), so a backward pass would wait for a rank "
            "that runs none: freeze the same parameters on all ranks, and give a rank without tokens empty ones of the "
            "same model, x[:0]"
        )
    if len({row[2] for row in facts}) > 1:
        raise ValueError(
            f"{name}: the ranks {list(group.ranks)} have routers with different weights, and would train different "
            "models. If the weights differed from the start, build the model from one seed, or load the same weights. "
            "If gradients outside of experts were not averaged over all ranks, write fully_shard(experts, "
            'mesh["replica"]) and fully_shard(model) over all ranks, or scale_moe.average_replicated_gradients(model, '
            'mesh["expert"]) before another wrapper over mesh["replica"]'
        )


def _explain(error: TransferError, what: str, group: Group, name: str) -> None:
    error.add_note(
        f"in {what} of {name} over the ranks {list(group.ranks)}: all of them have to call "
        "the same layers in the same order, forward and backward, also those without tokens"
    )
