"""The promise: outputs, gradients and three steps of experts divided between ranks are the same as on one process.

The reference is a loop over experts in plain PyTorch, on one process, with the tokens of all ranks. In fp64, so that
what another order of sums does is far below what a wrong row would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core import clip_grad_norm_
from scale_core.comm.group import Group, group_of
from scale_core.hooks.source_grads import register_source_grad_hook
from scale_core.sharded_tensor.tensor import local_tensor
from scale_moe import Balance, ExpertChoice, MoE, TokenChoice
from scale_moe.experts import Experts
from scale_moe.token_dispatcher import combine, dispatch, plan_dispatch

DIM, HIDDEN, STEPS = 5, 7, 3
TOP_2, NO_BALANCE = TokenChoice(2), Balance()


@dataclass(frozen=True)
class Case:
    """One way to train: how many experts, and tokens of rank 0, 1, ..."""

    num_experts: int
    tokens: tuple[int, ...] = (6, 6, 6, 6)
    routing: TokenChoice | ExpertChoice = TOP_2
    balance: Balance = NO_BALANCE
    gated: bool = True
    shared: bool = False
    one_expert: bool = False  # All tokens go to expert 0.
    dtype: torch.dtype = torch.float64


CASES = [
    Case(4),
    Case(5, (7, 3, 0, 4), TokenChoice(3), gated=False),  # does not divide; a rank without tokens
    Case(4, routing=TokenChoice(1, normalize=False), one_expert=True),
    Case(1, (3, 1, 2, 5), TokenChoice(1), shared=True),  # ranks without experts
    Case(6, (0, 0, 3, 0), TokenChoice(2, "sigmoid", scaling_factor=2.5, num_groups=3, top_groups=2)),
    Case(4, (5, 6, 2, 4), TokenChoice(2, capacity_factor=0.6)),
    Case(3, (5, 6, 2, 4), TokenChoice(2, capacity_factor=0.75, drop_order="choice", normalize_kept=True)),
    Case(4, (5, 0, 2, 4), TokenChoice(2, capacity_factor=0.5, drop_order="weight")),
    Case(4, (5, 6, 2, 4), ExpertChoice(1.5)),
    Case(4, balance=Balance(0.1, 0.05), shared=True),
    Case(5, (5, 6, 2, 4), TokenChoice(2, "sigmoid"), Balance(bias_update_rate=0.05)),
]


class Plain(nn.Module):
    """The same layer on one process: its experts are a loop."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer, experts = self.layer, self.layer.experts
        logits = F.linear(x, layer.router.weight)
        scores = logits.softmax(-1) if layer.routing.score_function == "softmax" else logits.sigmoid()
        chosen = layer.route(scores)
        routing = layer._with_capacity(chosen)
        layer._record(logits, scores, chosen, routing)
        output = torch.zeros_like(x)
        for expert in range(experts.num_experts):
            token, choice = (routing.expert_index == expert).nonzero(as_tuple=True)
            if experts.gated:
                gate, up = F.linear(x[token], experts.gate_up_proj[expert]).chunk(2, -1)
                hidden = F.silu(gate) * up
            else:
                hidden = F.silu(F.linear(x[token], experts.up_proj[expert]))
            rows = F.linear(hidden, experts.down_proj[expert]) * routing.weight[token, choice, None]
            output = output.index_add(0, token, rows)
        return output if layer.shared_expert is None else output + layer.shared_expert(x)


def build(case: Case, group: Group) -> MoE:
    torch.manual_seed(1)
    options: Any = {"gated": case.gated, "process_group": group, "dtype": case.dtype}
    if group.size == 1:
        options["batch_process_group"] = group
    shared = nn.Linear(DIM, DIM, dtype=case.dtype) if case.shared else None
    balance = None if isinstance(case.routing, ExpertChoice) else case.balance
    layer = MoE(DIM, HIDDEN, case.num_experts, case.routing, balance=balance, shared_expert=shared, **options)
    if case.one_expert:
        with torch.no_grad():
            layer.router.weight.zero_()[0] = 3.0
    return layer


def tokens_of(case: Case, world: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    whole = torch.rand(sum(case.tokens[:world]), DIM, generator=generator, dtype=torch.float64) + 0.1
    if not case.one_expert:
        whole -= 0.6
    return list(whole.to(case.dtype).split(case.tokens[:world]))


def loss_of(output: Tensor, num_tokens: int) -> Tensor:
    """So that the sum over the ranks' tokens is that of one process."""
    weights = torch.linspace(-1, 2, DIM, dtype=output.dtype)
    return (output.square() @ weights).sum() / num_tokens


def train(case: Case, world: int, group: Group) -> dict[str, Any]:
    """Three steps of this rank, or of one process with all tokens where the group is a world of one."""
    layer = build(case, group)
    plain = Plain(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5)
    found: dict[str, list[Any]] = {"outputs": [], "inputs": [], "norms": [], "loads": [], "dropped": []}
    for step in range(STEPS):
        parts = tokens_of(case, world, step)
        num_tokens = max(1, sum(map(len, parts)))
        x = (parts[group.rank] if group.size > 1 else torch.cat(parts)).requires_grad_()
        optimizer.zero_grad()
        output = layer(x) if group.size > 1 else plain(x)
        loss = group.size * loss_of(output, num_tokens)
        if group.size == 1:  # The layer itself adds its losses in the backward pass.
            pairs = ((layer.aux_loss, case.balance.aux_loss_coef), (layer.z_loss, case.balance.z_loss_coef))
            loss = loss + sum(coef * value for value, coef in pairs if value is not None)
        loss.backward()
        if group.size > 1:
            for name, param in layer.named_parameters():
                if not name.startswith("experts"):
                    dist.all_reduce(param.grad)
                    param.grad /= group.size
        found["norms"].append(clip_grad_norm_(layer.parameters(), 0.2).item())
        optimizer.step()
        if case.balance.bias_update_rate:
            layer.update_expert_bias()
        assert x.grad is not None and layer.tokens_per_expert is not None and layer.dropped is not None
        found["outputs"].append(output.detach())
        found["inputs"].append(x.grad / group.size)
        found["loads"].append(layer.tokens_per_expert)
        found["dropped"].append(int(layer.dropped))
    return {**found, "state": layer.state_dict()}


def explain(case: Case, name: str, text: str) -> str:
    return f"{case}: {name}: {text}"


def compare(case: Case, group: Group) -> None:
    world = group.size
    ours, one = train(case, world, group), train(case, world, Group())
    options: Any = {"rtol": 1e-10, "atol": 1e-12} if case.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    for name in ("outputs", "inputs"):
        for mine, whole in zip(ours[name], one[name], strict=True):
            expected = whole.split(case.tokens[:world])[group.rank]
            torch.testing.assert_close(mine, expected, **options, msg=partial(explain, case, name))
    assert ours["norms"] == pytest.approx(one["norms"], rel=1e-5 if case.dtype == torch.float32 else 1e-7)
    loads = torch.stack(ours["loads"])
    dist.all_reduce(loads)
    assert torch.equal(loads, torch.stack(one["loads"])), case
    dropped = torch.tensor(ours["dropped"])
    dist.all_reduce(dropped)
    assert dropped.tolist() == one["dropped"], case
    assert ours["state"].keys() == one["state"].keys()
    for name, value in one["state"].items():
        torch.testing.assert_close(ours["state"][name], value, **options, msg=partial(explain, case, name))


@pytest.mark.ranks(2, 3, 4)
def test_gradients_are_reported_by_rank() -> None:
    """To who asks, of each rank alone, not averaged; outputs and averages are those without."""
    group = group_of()
    generator = torch.Generator().manual_seed(7)
    sizes = range(2, 2 + group.size)
    tokens = [torch.randn(size, DIM, generator=generator, dtype=torch.float64) for size in sizes]

    def layer_of(ranks: Group) -> MoE:
        torch.manual_seed(0)
        return MoE(DIM, HIDDEN, 5, TOP_2, process_group=ranks, dtype=torch.float64)

    plain, silent, layer = layer_of(Group()), layer_of(group), layer_of(group)
    expected = silent(tokens[group.rank])
    expected.square().sum().backward()
    found = dict[tuple[int, int], Tensor]()
    handle = register_source_grad_hook(lambda param, grad, source: found.update({(id(param), source): grad.clone()}))
    output = layer(tokens[group.rank])
    output.square().sum().backward()
    handle.remove()
    torch.testing.assert_close(output, expected)
    for name, sharding in layer.experts.shardings.items():
        param = layer.experts.get_parameter(name)
        torch.testing.assert_close(param.grad, silent.experts.get_parameter(name).grad)
        for rank, part in enumerate(tokens):
            (grad,) = torch.autograd.grad(plain(part).square().sum(), [plain.experts.get_parameter(name)])
            own = sharding.local_part(grad, group.rank)
            reported = found.get((id(param), rank))
            assert reported is not None or not own.any()
            torch.testing.assert_close(torch.zeros_like(own) if reported is None else reported, own)


@pytest.mark.ranks(2, 3, 4)
def test_experts_have_the_bits_of_one_process() -> None:
    """Given where tokens go, in fp32: the rows of an expert are the same, and so are all products with its weights.

    Their sizes are multiples of 16 bytes: products of others depend on where their memory begins.
    """
    dim, hidden, group = 8, 16, group_of()
    generator = torch.Generator().manual_seed(3)
    index = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(4 * 6)])
    index[torch.rand(index.shape, generator=generator) < 0.1] = -1
    tokens, weight, grad = (torch.randn(24, size, generator=generator) for size in (dim, 3, dim))

    def run(ranks: Group, part: slice) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        experts = Experts(5, dim, hidden, process_group=ranks)
        x, w = tokens[part].clone().requires_grad_(), weight[part].clone().requires_grad_()
        plan = plan_dispatch(x, index[part], w, 5, ranks)
        output = combine(experts(dispatch(x, plan), plan.counts), w, plan)
        output.backward(grad[part])
        grads = [local_tensor(param.grad) for param in experts.parameters()]
        sharding = experts.shardings["down_proj"]
        return output, x.grad, w.grad, *(g * len(sharding.sizes) for g in grads)

    size = 24 // group.size
    mine = slice(size * group.rank, size * (group.rank + 1))
    ours, one = run(group, mine), run(Group(), slice(0, 24))
    sizes = Experts(5, dim, hidden, process_group=group).shardings["down_proj"]
    for found, whole in zip(ours[:3], one[:3], strict=True):
        assert torch.equal(found, whole[mine])
    for found, whole in zip(ours[3:], one[3:], strict=True):
        expected = sizes.local_part(whole, group.rank)
        if group.size == 3:  # A third of a number times three is another one.
            torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
        else:
            assert torch.equal(found, expected)


@pytest.mark.ranks(2, 3, 4)
def test_three_steps_are_those_of_one_process() -> None:
    for case in CASES:
        compare(case, group_of())
    compare(replace(CASES[0], dtype=torch.float32), group_of())
    generator = torch.Generator().manual_seed(dist.get_world_size())

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for number in range(8):
        num_experts = draw(1, 9)
        tokens = tuple(draw(0, 9) * draw(0, 1) for _ in range(4))
        top_k = draw(1, min(4, num_experts))
        rule: Any = TokenChoice(top_k, normalize=top_k > 1)
        if number % 4 == 1:
            rule = replace(rule, capacity_factor=draw(2, 8) / 8, drop_order=("token", "choice", "weight")[draw(0, 2)])
        if number % 4 == 2:
            rule = ExpertChoice(draw(1, 12) / 4, "sigmoid")
        compare(Case(num_experts, tokens, rule), group_of())


def test_noise_is_added_as_the_formula_says() -> None:
    """H(x) = x W + N(0, 1) * softplus(x V), of jittered x (Shazeer et al., eq. 4); none in evaluation."""
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, 6, TokenChoice(2, jitter=0.2, noisy=True), process_group=Group())
    x = torch.randn(9, DIM)
    torch.manual_seed(5)
    y = layer(x)
    y.square().sum().backward()
    torch.manual_seed(5)
    assert layer.noise is not None
    router, noise = (weight.detach().clone().requires_grad_() for weight in (layer.router.weight, layer.noise.weight))
    seen = x * torch.empty_like(x).uniform_(0.8, 1.2)
    logits = seen @ router.t()
    logits = logits + torch.randn_like(logits) * F.softplus(seen @ noise.t())
    chosen = logits.softmax(-1).topk(2, dim=-1)
    weight = chosen.values / chosen.values.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for token, (experts, weights) in enumerate(zip(chosen.indices.tolist(), weight, strict=True)):
        for expert, factor in zip(experts, weights, strict=True):
            gate, up = (x[token] @ layer.experts.gate_up_proj[expert].detach().t()).chunk(2)
            row = (F.silu(gate) * up) @ layer.experts.down_proj[expert].detach().t()
            expected[token] = expected[token] + factor * row
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    expected.square().sum().backward()
    for found, weight in ((layer.router.weight, router), (layer.noise.weight, noise)):
        torch.testing.assert_close(found.grad, weight.grad, rtol=1e-4, atol=1e-6)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_is_a_loop_over_experts(case: Case) -> None:
    """Nothing is initialized."""
    layer, x = build(case, Group()), torch.cat(tokens_of(case, 4, 0))
    torch.testing.assert_close(layer(x), Plain(layer)(x), rtol=1e-12, atol=1e-12)
