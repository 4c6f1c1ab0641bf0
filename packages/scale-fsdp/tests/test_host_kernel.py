"""host_kernel.py: scaled gradient, optimizer and cast out, in pieces that change no bit."""

from __future__ import annotations

from typing import Any

import offload_cases as cases
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scale_fsdp.offload import host_kernel as host_step
from scale_fsdp.offload.host_kernel import (
    FUSED_MULTIPLE,
    HostChunk,
    HostKernel,
    InnerOptimizer,
    host_options,
    scale_grads,
    with_strides_of,
)

SIZES = (64, 1, 3 * FUSED_MULTIPLE + 5, 7, 40, 1000)


def numbers(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", cases.ELEMENTWISE)
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_it_equals_the_plain_optimizer_after_clipping_to_the_bit(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_step, "_CACHED_ELEMENTS", 2 * FUSED_MULTIPLE)
    kind, settings = cases.ELEMENTWISE[name]
    plain = [nn.Parameter(numbers(size, size)) for size in SIZES]
    pieces = [
        HostChunk(param.detach().clone(), torch.empty(0), {}, torch.zeros(param.shape, dtype=torch.bfloat16))
        for param in plain
    ]
    optimizer, step = kind(plain, **settings), HostKernel(kind, settings)
    for number in range(3):
        for param in plain:
            param.grad = numbers(param.numel(), 100 + number)
        pieces = [
            piece._replace(grad=numbers(param.numel(), 100 + number))
            for piece, param in zip(pieces, plain, strict=True)
        ]
        torch._foreach_mul_([param.grad for param in plain], factor)
        optimizer.step()
        step.step(pieces, optimizer.param_groups[0], factor)
    for piece, param in zip(pieces, plain, strict=True):
        assert torch.equal(piece.param, param)
        assert piece.cast_target is not None and torch.equal(piece.cast_target, param.detach().bfloat16())
        theirs = optimizer.state.get(param, {})
        assert piece.state.keys() == theirs.keys()
        assert all(torch.equal(piece.state[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_narrow_gradients_are_widened_before_they_are_scaled(kind: type[torch.optim.Optimizer]) -> None:
    settings = {"lr": 0.1, "weight_decay": 0.01, "fused": True}
    wide, narrow = nn.Parameter(torch.ones(200)), torch.ones(200)
    optimizer, step, state = kind([wide], **settings), HostKernel(kind, settings), dict[str, Any]()
    for number in range(3):
        grad = numbers(200, number).bfloat16()
        wide.grad = grad.float() * 0.3
        optimizer.step()
        kept = grad.clone()
        step.step([HostChunk(narrow, grad, state)], optimizer.param_groups[0], 0.3)
        assert torch.equal(grad, kept)
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_factor_is_not_rounded_to_the_gradients_precision(dtype: torch.dtype) -> None:
    factor, grads = 0.01234567, [numbers(size, size).to(dtype) for size in SIZES]
    expected = [(grad.double() * factor).to(dtype) for grad in grads]
    scale_grads(grads, factor)
    for grad, exact in zip(grads, expected, strict=True):
        last_digit = torch.finfo(dtype).eps * exact.double().abs()
        assert ((grad.double() - exact.double()).abs() <= last_digit).all()
        if dtype.itemsize == 2:  # The product of a narrow number in single precision is rounded once more at most.
            assert (grad == exact).float().mean() > 0.99


def test_gradients_are_left_scaled_or_as_they_were() -> None:
    step = HostKernel(torch.optim.Adam, {"lr": 0.1})
    grad, state = torch.full((10,), 2.0), dict[str, Any]()
    piece = HostChunk(torch.ones(10), grad, state)
    for factor, left in ((1.0, 2.0), (0.5, 1.0), (0.0, 0.0)):
        step.step([piece], {"fused": None, **torch.optim.Adam([torch.ones(1)]).defaults}, factor)
        assert grad.tolist() == [left] * 10
    assert state["step"].item() == 3


def test_the_fused_kernel_is_the_default() -> None:
    for given, found in (
        ({"fused": None, "foreach": None}, True),
        ({"fused": None}, True),
        ({"fused": False}, False),
        ({"fused": None, "foreach": True}, None),
        ({"fused": None, "foreach": False}, None),
        ({"fused": True}, True),
        ({}, None),
    ):
        assert host_options({**given, "lr": 1.0, "params": [1]}, torch.float32).get("fused") is found
    assert host_options({"fused": None}, torch.complex64)["fused"] is False
    assert "params" not in host_options({"params": [], "param_names": []}, torch.float32)
    assert host_options({"lr": torch.tensor([0.5])}, torch.float32)["lr"].shape == ()


def test_a_tensor_gets_the_strides_of_its_parameter_if_needed() -> None:
    param = torch.zeros(3, 4)
    same, turned = torch.ones(3, 4), torch.arange(12.0).view(4, 3).t()
    assert with_strides_of(param, same) is same
    found = with_strides_of(param, turned)
    assert found.stride() == param.stride() and torch.equal(found, turned)
    channels_last = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert with_strides_of(channels_last, torch.ones(2, 3, 4, 4)).stride() == channels_last.stride()
    for numel, is_kept in ((1, True), (2, False), (3, False)):
        apart = torch.arange(8.0)[: 2 * numel : 2]
        found = with_strides_of(torch.zeros(numel), apart)
        assert (found is apart) is is_kept and torch.equal(found, apart)
        assert is_kept or found.is_contiguous()


# The torch optimizer inside, which steps on what it is given and keeps nothing.


def test_new_and_old_tensors_go_together_and_nothing_is_kept() -> None:
    bare = InnerOptimizer(torch.optim.Adam, {"lr": 0.1})
    states: list[dict[str, Any]] = [{}, {}]
    params = [torch.ones(3), torch.ones(2, 2)]
    grads = [torch.ones(3), torch.ones(2, 2)]
    bare.step(params[:1], grads[:1], states[:1], bare.defaults)
    kept = states[0]["exp_avg"]
    bare.step(params, grads, states, bare.defaults)
    assert [state["step"].item() for state in states] == [2, 1] and states[0]["exp_avg"] is kept
    assert not bare._optimizer.state and not bare._optimizer.param_groups


def test_a_constructor_with_state_runs_for_new_tensors_only() -> None:
    built: list[int] = []

    class Counting(torch.optim.Adagrad):
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, **settings)
            built.append(sum(len(group["params"]) for group in self.param_groups))

    bare = InnerOptimizer(Counting, {"lr": 0.1})
    params, states = [torch.ones(3), torch.ones(2)], list[dict[str, Any]]([{}, {}])
    built.clear()
    for count in (1, 1, 2, 2):
        bare.step(params[:count], [torch.ones_like(param) for param in params[:count]], states[:count], bare.defaults)
    assert built == [1, 1]
    assert [state["step"].item() for state in states] == [4, 2]


def test_a_group_may_have_its_own_and_unknown_options() -> None:
    bare = InnerOptimizer(torch.optim.SGD, {"lr": 0.1})
    param = torch.ones(2)
    bare.step([param], [torch.ones(2)], [{}], {**bare.defaults, "lr": 0.5, "initial_lr": 0.7, "name": "mine"})
    assert param.tolist() == [0.5, 0.5]


def test_nobody_is_told_of_its_steps() -> None:
    told: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: told.append(optimizer))
    try:
        bare = InnerOptimizer(torch.optim.SGD, {"lr": 0.1})
        bare.step([torch.ones(2)], [torch.ones(2)], [{}], bare.defaults)
    finally:
        handle.remove()
    assert not told


def test_groups_of_older_versions_are_completed() -> None:
    bare = InnerOptimizer(torch.optim.AdamW, {})
    old = {"params": [], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    bare.fill_options([old])
    assert old["amsgrad"] is False and old["decoupled_weight_decay"] is True
