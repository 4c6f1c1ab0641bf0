"""What is saved of divided experts, and what a layer keeps."""

from __future__ import annotations

import copy
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import scale_moe.gradients
from scale_core.comm import all_to_all, collectives
from scale_core.comm.group import Group
from scale_core.comm.work import LIMIT_VARIABLE
from scale_core.errors import ContractError, TransferError
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.state_dict import target_state_dict
from scale_core.testing import run_ranks
from scale_moe import (
    Balance,
    ExpertChoice,
    Experts,
    MoE,
    TokenChoice,
    average_replicated_gradients,
    parallelize_experts,
)
from scale_snapshot import load_snapshot, save_snapshot

DIM, EXPERTS = 4, 5


def build(**options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(DIM, 6, EXPERTS, TokenChoice(2, "sigmoid"), balance=Balance(bias_update_rate=0.1), **options)


def optimizer_of(model: MoE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)


def step(model: MoE, optimizer: torch.optim.Optimizer, number: int, parts: int) -> None:
    """A step with the same batch at any number of ranks; `parts` are its ranks, of which each has some tokens."""
    x = torch.randn(12, DIM, generator=torch.Generator().manual_seed(number))
    mine = x if model.group.size == 1 else x.split(12 // parts)[model.group.rank]
    optimizer.zero_grad()
    model(mine).square().mean().backward()
    optimizer.step()
    model.update_expert_bias()


def save_on_ranks(folder: str) -> dict[str, Tensor]:
    model = build()
    average_replicated_gradients(model)
    optimizer = optimizer_of(model)
    for number in range(2):
        step(model, optimizer, number, dist.get_world_size())
    save_snapshot(folder, 2, sharded_state_dict(model, optimizer))
    return dict(model.state_dict())


def load_on_ranks(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = build()
    average_replicated_gradients(model)
    optimizer = optimizer_of(model)
    read = load_snapshot(folder, partial(target_state_dict, model, optimizer))
    load_sharded_state_dict(read.state, model, optimizer, copy=False)
    loaded = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, optimizer, 2, dist.get_world_size())
    return loaded, dict(model.state_dict())


def test_a_snapshot_loads_at_another_number_of_expert_ranks(tmp_path: Path) -> None:
    """Five experts on two ranks, then on three; the steps are those of one process."""
    saved = run_ranks(save_on_ranks, 2, str(tmp_path))[0]
    loaded, stepped = run_ranks(load_on_ranks, 3, str(tmp_path))[0]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
    model = build(process_group=Group())
    optimizer = optimizer_of(model)
    for number in range(3):
        step(model, optimizer, number, 1)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(stepped[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.fault(84)
def test_a_layer_is_copied_and_pickled_after_a_forward() -> None:
    model = MoE(DIM, 6, EXPERTS, balance=Balance(0.1, 0.1, attached=False))
    x = torch.randn(3, DIM)
    y = model(x)
    assert model.aux_loss is not None
    assert model.aux_loss.requires_grad
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.aux_loss is None
        assert torch.equal(other(x), y)


def test_losses_added_by_hand_are_those_that_the_layer_adds() -> None:
    grads = []
    for attached in (True, False):
        torch.manual_seed(0)
        model = MoE(DIM, 6, EXPERTS, balance=Balance(0.3, 0.2, attached=attached))
        loss = model(torch.randn(5, DIM)).sum()
        if not attached:
            assert model.aux_loss is not None and model.z_loss is not None
            loss = loss + 0.3 * model.aux_loss + 0.2 * model.z_loss
        loss.backward()
        grads.append(model.router.weight.grad)
    torch.testing.assert_close(*grads)


def test_a_loss_that_is_scaled_scales_those_of_the_layer() -> None:
    def gradient(scale: float) -> Tensor:
        torch.manual_seed(0)
        model = MoE(DIM, 6, EXPERTS, balance=Balance(0.3, 0.2))
        model.aux_loss_scale = scale
        (scale * model(torch.randn(5, DIM)).sum()).backward()
        assert model.router.weight.grad is not None
        return model.router.weight.grad

    torch.testing.assert_close(gradient(1.0) * 8, gradient(8.0))


def test_one_expert_per_token_trains_its_router() -> None:
    torch.manual_seed(0)
    model = MoE(DIM, 6, EXPERTS, 1)
    assert model.routing == TokenChoice(1, normalize=False)
    model(torch.randn(5, DIM)).square().sum().backward()
    assert model.router.weight.grad is not None
    assert model.router.weight.grad.abs().max() > 1e-4
    MoE(DIM, 6, 1, TokenChoice(1))  # There is nothing to choose.
    MoE(DIM, 6, EXPERTS, TokenChoice(1), balance=Balance(0.1))


def test_a_bias_stays_in_fp32() -> None:
    model = build().to(torch.bfloat16)
    assert model.router.weight.dtype == torch.bfloat16
    assert model.expert_bias is not None
    assert model.expert_bias.dtype == torch.float32
    assert model(torch.randn(3, DIM, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_leaves_the_router_in_fp32() -> None:
    model, x = build(), torch.randn(64, DIM)
    chosen = model(x), model.tokens_per_expert
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert model.tokens_per_expert is not None and chosen[1] is not None
    assert torch.equal(model.tokens_per_expert, chosen[1])
    torch.testing.assert_close(y.float(), chosen[0], rtol=0.1, atol=0.02)


def test_a_layer_on_meta_draws_its_values_later() -> None:
    expected = build()
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    model.expert_bias.fill_(3.0)  # type: ignore[union-attr]  # What empty memory may hold
    torch.manual_seed(0)
    model.router.reset_parameters()
    model.experts.reset_parameters()
    model.reset_parameters()
    assert torch.equal(model.expert_bias, torch.zeros(EXPERTS))  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MoE(4, 6, 0), "expected num_experts of at least 1, got 0"),
        (lambda: MoE(4, 6, 2, 3), "expected top_k from 1 to 2, the number of experts, got 3"),
        (
            lambda: MoE(4, 6, 2, TokenChoice(capacity_factor=0.0)),
            "capacity_factor above 0, or None for no limit",
        ),
        (
            lambda: MoE(4, 6, 2, TokenChoice(1)),
            r"router gets no gradient: write TokenChoice\(1, normalize=False, \.\.\.\)",
        ),
        (
            lambda: MoE(4, 6, 2, TokenChoice(1, normalize=False, capacity_factor=1.0, normalize_kept=True)),
            r"with normalize_kept=True .* write TokenChoice\(1, normalize=False, normalize_kept=False, ...\)",
        ),
        (lambda: MoE(4, 6, 2, TokenChoice(jitter=1.0)), "jitter from 0 to below 1, got 1.0"),
        (
            lambda: MoE(4, 6, 2, TokenChoice(capacity_factor=1.0, drop_order="last")),
            "drop_order to be one of .*, got 'last'",
        ),  # type: ignore[arg-type]
        (lambda: MoE(4, 6, 2, ExpertChoice(2.0, "relu")), "score_function to be .*, got 'relu'"),  # type: ignore[arg-type]
        (lambda: MoE(4, 6, 2, TokenChoice(top_groups=2)), r"top_groups=2 .* got num_groups=1: give both"),
        (lambda: MoE(4, 6, 2, TokenChoice(num_groups=0)), r"got num_groups=0: give both"),
        (lambda: MoE(4, 6, 2, TokenChoice(drop_order="choice")), "drop_order='choice' .* without a capacity_factor"),
        (
            lambda: MoE(4, 6, 2, TokenChoice(normalize_kept=True)),
            "normalize_kept=True are .* without a capacity_factor",
        ),
        (lambda: MoE(4, 6, 2, balance=Balance(-0.1)), "expected aux_loss_coef of Balance to be 0 or above.*got -0.1"),
        (lambda: MoE(4, 6, 2, balance=Balance(0.1, float("nan"))), "expected z_loss_coef of Balance .*got nan"),
        (lambda: MoE(4, 6, 2, balance=Balance(bias_update_rate=float("inf"))), "expected bias_update_rate .*got inf"),
        (lambda: MoE(4, 6, 2, ExpertChoice(), balance=Balance(0.1)), "would have no effect: leave balance= out"),
        (lambda: MoE(4, 6, 2)(torch.zeros(3, 5)), r"expected tokens \[..., 4\], got \[3, 5\]"),
        (
            lambda: MoE(4, 6, 2)(torch.full((3, 4), torch.nan)),
            r"MoE \d+: weights .* are not finite \(6 of rank 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


WRONG: Any = None
"""An argument of no type that a type checker would let pass."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MoE("4", 6, 2), "MoE: expected dim to be an integer, got '4'"),
        (
            lambda: MoE(4, 6, 2, WRONG),
            "MoE: expected routing to be a TokenChoice, an ExpertChoice or an integer, got N",
        ),
        (lambda: MoE(4, 6, 2, gated="false"), "MoE: expected gated to be a bool, got 'false' .*; write gated=False"),
        (lambda: MoE(4, 6, 2, activation="silu"), "MoE: expected activation to be a function, got 'silu'"),
        (lambda: MoE(4, 6, 2, balance=0.01), "MoE: expected balance to be a Balance or None, got 0.01"),
        (lambda: Experts(2, 4, 6, activation="silu"), "Experts: expected activation to be a function, got 'silu'"),
        (lambda: TokenChoice("2"), "TokenChoice: expected top_k to be an integer, got '2'"),
        (lambda: ExpertChoice(WRONG), "ExpertChoice: expected capacity_factor to be a number, got None"),
        (lambda: Balance("0.1"), "Balance: expected aux_loss_coef to be a number, got '0.1'"),
        (lambda: parallelize_experts(MoE), "parallelize_experts: expected model to be a Module, got the class MoE"),
        (
            lambda: average_replicated_gradients([]),
            "average_replicated_gradients: expected model to be a Module, got an",
        ),
    ],
)
def test_arguments_of_other_types_are_refused(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_without_a_bias_there_is_none_to_update() -> None:
    with pytest.raises(RuntimeError, match=r"this MoE has no bias: write MoE\(..., balance=Balance"):
        MoE(4, 6, 2).update_expert_bias()


@pytest.mark.gloo("one message per rank, so that a limit names the rank")
@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    layer = MoE(4, 6, 2)
    layer(torch.zeros(3, 4))
    if dist.get_rank() == 1:
        return
    os.environ[LIMIT_VARIABLE] = "1"
    with pytest.raises(TransferError) as caught:
        layer(torch.zeros(3, 4))
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "rank 1" in told and "in counts of tokens of MoE 1 over the ranks [0, 1]" in told


@pytest.mark.ranks(2)
def test_gradients_not_averaged_are_found_in_the_next_forward() -> None:
    model, x = build(), torch.randn(4, DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model((1 + dist.get_rank()) * x).square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"the ranks \[0, 1\] have routers with different weights.*average_repl"):
        model(x)


@pytest.mark.gloo("tags keep parameters of one size apart; a ContractError elsewhere")
@pytest.mark.ranks(2)
def test_gradients_of_other_parameters_are_not_mixed() -> None:
    """Each rank uses one of two parameters of the same shape."""
    name = "ab"[dist.get_rank()]
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    average_replicated_gradients(model)
    os.environ[LIMIT_VARIABLE] = "1"
    with pytest.raises(TransferError) as caught:
        model[name](torch.ones(2, 3)).sum().backward()
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"in the average of the gradient of '{name}.weight' over the ranks [0, 1]" in told


@pytest.mark.ranks(2)
def test_other_gradient_orders_are_errors_of_unnamed_messages() -> None:
    """On a transport that matches messages by their order, as NCCL."""
    with (
        mock.patch.object(scale_moe.gradients, "peer_to_peer", return_value=False),
        mock.patch.object(collectives, "peer_to_peer", return_value=False),
        mock.patch.object(all_to_all, "peer_to_peer", return_value=False),
    ):
        found, rank = [], dist.get_rank()
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abc"})
        average_replicated_gradients(model)

        def backward(names: str) -> None:
            x = torch.ones(2, 3)
            for name in names:
                x = model[name](x)
            x.sum().backward()

        backward("ab")  # The same on both; then one after the other is another, as in the first place, and is missing.
        for names in ("ab", "ba"), ("ac", "bc"):
            with pytest.raises(ContractError) as caught:
                backward(names[rank])
            found.append(str(caught.value))
        backward("abc")
    first, second = found
    assert "the ranks [0, 1] computed gradients in other orders" in first
    assert "first at place 0, rank 0: b.weight, rank 1: a.weight. All of them" in first
    assert "first at place 1, rank 0: a.weight, rank 1: b.weight. All of them" in second


@pytest.mark.ranks(3)
def test_gradients_of_any_size_are_averaged() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.ParameterDict({str(n): torch.zeros(shape) for n, shape in enumerate([(), (1,), (5, 2), (0, 3)])})
    average_replicated_gradients(model)
    sum((param * (rank + 1)).sum() for param in model.values()).backward()  # type: ignore[union-attr]
    for param in model.values():
        assert torch.equal(param.grad, torch.full_like(param, (world + 1) / 2))


@pytest.mark.ranks(2)
def test_replicas_of_experts_have_to_say_what_the_batch_is() -> None:
    for options in (
        {"balance": Balance(0.1)},
        {"balance": Balance(z_loss_coef=0.1)},
        {"balance": Balance(bias_update_rate=0.1)},
        {"routing": TokenChoice(2, capacity_factor=1.0)},
        {"routing": ExpertChoice()},
    ):
        arguments: Any = {"process_group": Group(), **options}
        with pytest.raises(ValueError, match=r"process_group has 1 of 2 ranks: say .* by batch_process_group="):
            MoE(4, 6, 2, **arguments)
        MoE(4, 6, 2, **arguments, batch_process_group=dist.group.WORLD)
        MoE(4, 6, 2, **{**arguments, "process_group": None})
    MoE(4, 6, 2, process_group=Group())  # Nothing looks at the batch.


@pytest.mark.ranks(2)
def test_writes_to_the_state_of_experts_reach_their_ranks() -> None:
    model, other = build(), build()
    with torch.no_grad():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        for value, new in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
            value *= 2
            value[1:].sub_(new[1:])
        for name, value in expected.items():
            value *= 2
            value[1:] -= other.state_dict()[name][1:]
            assert torch.equal(model.state_dict()[name], value), name
