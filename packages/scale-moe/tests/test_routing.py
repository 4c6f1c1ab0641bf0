"""Routing against loops over tokens and experts in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scale_moe.routing import (
    Routing,
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


def scores_of(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return router_scores(torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64))


@given(st.integers(0, 9), st.integers(1, 7), st.data())
@settings(max_examples=40, deadline=None)
def test_tokens_go_to_the_experts_of_their_highest_scores(num_tokens: int, num_experts: int, data: Any) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    scores = scores_of(num_tokens, num_experts)
    routing = top_k_routing(scores, top_k, scaling_factor=2.0)
    for row, index, weight in zip(scores.tolist(), routing.expert_index, routing.weight, strict=True):
        best = sorted(range(num_experts), key=lambda expert: -row[expert])[:top_k]
        assert index.tolist() == best
        total = sum(row[expert] for expert in best)
        assert weight.tolist() == pytest.approx([2 * row[expert] / total for expert in best])


def test_without_normalization_weights_are_scores() -> None:
    scores = scores_of(3, 4)
    routing = top_k_routing(scores, 2, normalize=False)
    assert torch.equal(routing.weight, scores.gather(1, routing.expert_index))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.2]])
    routing = top_k_routing(scores, 1, normalize=False, bias=torch.tensor([0.0, 0.0, 1.0]))
    assert routing.expert_index.tolist() == [[2]]
    assert routing.weight.tolist() == [[pytest.approx(0.2)]]


def test_groups_limit_which_experts_a_token_can_have() -> None:
    """The first group has the best expert, the second the best two together."""
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    assert top_k_routing(scores, 2, num_groups=2, top_groups=1).expert_index.tolist() == [[2, 3]]
    assert top_k_routing(scores, 2, num_groups=2, top_groups=2).expert_index.tolist() == [[0, 2]]


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_experts_choose_their_best_tokens(num_tokens: int, num_experts: int, capacity: int) -> None:
    scores = scores_of(num_tokens, num_experts)
    routing = expert_choice_routing(scores, capacity)
    found = {
        (token, int(expert)): float(weight)
        for token in range(num_tokens)
        for expert, weight in zip(routing.expert_index[token], routing.weight[token], strict=True)
        if expert >= 0
    }
    expected = {
        (token, expert): scores[token, expert].item()
        for expert in range(num_experts)
        for token in sorted(range(num_tokens), key=lambda token: -scores[token, expert].item())[:capacity]
    }
    assert found == expected
    assert not routing.weight[routing.expert_index < 0].any()


def drop_one_by_one(routing: Routing, capacity: int, order: str) -> Tensor:
    """Which choices stay, by a loop in the order of their precedence."""
    num_tokens, top_k = routing.expert_index.shape
    choices = [(token, choice) for token in range(num_tokens) for choice in range(top_k)]
    if order == "choice":
        choices.sort(key=lambda pair: pair[1])
    if order == "weight":
        choices.sort(key=lambda pair: -routing.weight[pair].item())
    taken: dict[int, int] = {}
    kept = torch.zeros(num_tokens, top_k, dtype=torch.bool)
    for pair in choices:
        expert = int(routing.expert_index[pair])
        if expert >= 0 and taken.get(expert, 0) < capacity:
            taken[expert] = taken.get(expert, 0) + 1
            kept[pair] = True
    return kept


@given(st.integers(0, 9), st.integers(2, 5), st.integers(1, 6), st.sampled_from(["token", "choice", "weight"]))
@settings(max_examples=60, deadline=None)
def test_choices_beyond_a_capacity_are_dropped(num_tokens: int, num_experts: int, capacity: int, order: Any) -> None:
    routing = top_k_routing(scores_of(num_tokens, num_experts, seed=1), 2)
    limited = with_capacity(routing, num_experts, capacity, order=order)
    kept = drop_one_by_one(routing, capacity, order)
    assert torch.equal(limited.expert_index, torch.where(kept, routing.expert_index, -1))
    assert torch.equal(limited.weight, routing.weight * kept)
    assert int(limited.num_dropped) == int((~kept).sum())


def test_weights_that_are_left_add_up_to_one_if_that_is_asked() -> None:
    """GShard's and FairScale's gate with two experts: at most 2 * S / E choices each."""
    scores = torch.tensor([[0.6, 0.3, 0.1]] * 3)
    routing = top_k_routing(scores, 2)
    capacity = expert_capacity(2 * 3, 3, 1.0)
    limited = with_capacity(routing, 3, capacity, order="choice", normalize=True)
    assert limited.expert_index.tolist() == [[0, 1], [0, 1], [-1, -1]]
    assert limited.weight.sum(-1).tolist() == pytest.approx([1, 1, 0])


def test_a_capacity_is_rounded_up() -> None:
    assert [expert_capacity(*sizes) for sizes in ((8, 4, 1.0), (9, 4, 1.0), (10, 4, 1.1), (1, 8, 0.5))] == [2, 3, 3, 1]
    assert expert_capacity(100, 1, 1.1) == 110


def test_the_balancing_loss_is_switchs() -> None:
    logits = torch.randn(12, 4, dtype=torch.float64)
    scores = router_scores(logits)
    index = top_k_routing(scores, 1).expert_index
    fraction = [(index == expert).double().mean().item() for expert in range(4)]
    expected = 4 * sum(f * scores[:, expert].mean().item() for expert, f in enumerate(fraction))
    counts = batch_counts(index, 4)
    assert load_balancing_loss(scores, counts).item() == pytest.approx(expected)
    assert router_z_loss(logits, counts).item() == pytest.approx(
        sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits.tolist()) / 12
    )


def test_equal_loads_have_a_loss_of_one_for_any_sum_of_scores() -> None:
    index = torch.arange(8).view(4, 2) % 4
    for scores in (torch.full((4, 4), 0.25), torch.full((4, 4), 0.9)):
        assert load_balancing_loss(scores, batch_counts(index, 4)).item() == pytest.approx(1)


def test_no_tokens_have_no_loss() -> None:
    counts = batch_counts(torch.zeros(0, 2, dtype=torch.int64), 4)
    assert load_balancing_loss(torch.zeros(0, 4), counts) == router_z_loss(torch.zeros(0, 4), counts) == 0


def test_a_bias_moves_towards_equal_loads() -> None:
    bias = updated_bias(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([9, 6, 3]), 0.5)
    assert bias.tolist() == [-0.5, 1.0, 2.5]


def test_a_bias_balances_experts_that_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    bias, preference = torch.zeros(4), torch.tensor([1.0, 0.0, 0.0, -1.0])
    loads = []
    for _ in range(60):
        scores = router_scores(torch.randn(256, 4, generator=generator) + preference, "sigmoid")
        loads.append(count_assignments(top_k_routing(scores, 1, bias=bias).expert_index, 4))
        bias = updated_bias(bias, loads[-1], 0.02)
    first, last = (torch.stack(part).double().mean(0) for part in (loads[:5], loads[-20:]))
    assert first.max() / first.mean() > 1.8
    assert last.max() / last.mean() < 1.15


def test_noise_has_its_size() -> None:
    torch.manual_seed(0)
    x = jittered(torch.ones(10_000), 0.1)
    assert 0.9 <= x.min() < 0.901 < 1.099 < x.max() <= 1.1
    size = noisy_logits(torch.zeros(20_000), torch.full((20_000,), 2.0)).std().item()
    assert size == pytest.approx(math.log(1 + math.exp(2.0)), rel=0.03)


def test_scores_are_computed_in_fp32() -> None:
    assert router_scores(torch.zeros(1, 2, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_k_routing(torch.zeros(2, 3), 4), "expected top_k from 1 to 3, the number of experts, got 4"),
        (lambda: top_k_routing(torch.zeros(3), 1), r"expected scores of shape \[tokens, experts\]"),
        (lambda: top_k_routing(torch.zeros(2, 4), 2, num_groups=3), "expected num_groups to divide 4 experts"),
        (lambda: top_k_routing(torch.zeros(2, 4), 3, num_groups=2, top_groups=1), "to hold top_k=3"),
        (lambda: router_scores(torch.zeros(2, 3), "relu"), "'softmax' or 'sigmoid', got 'relu'"),  # type: ignore[arg-type]
        (lambda: expert_choice_routing(torch.zeros(2, 3), 0), "capacity of at least 1, got 0"),
        (lambda: with_capacity(top_k_routing(torch.zeros(2, 3), 1), 3, 0), "capacity of at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
