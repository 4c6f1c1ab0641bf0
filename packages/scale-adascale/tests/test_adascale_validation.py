"""What is refused, before anything is changed, and what the errors say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adascale_cases import backward, build, linear, noise, two_steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from scale_adascale import AdaScale, AdaScaleOptions, fit_speed, until_steps
from scale_core.hooks.autograd import register_post_backward
from scale_core.uneven_inputs import LossShare


def test_reentrant_checkpoints_of_several_passes_are_refused():
    model, optimizer = build(1)
    batch = noise(4, 5, seed=1).requires_grad_()
    hidden = checkpoint(model[:2], batch, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"but 2 came.*reentrant checkpoint: use_reentrant=False"):
        checkpoint(model[2], hidden, use_reentrant=True).sum().backward()
    assert optimizer.progress == 0.0


def test_a_reentrant_pass_that_ends_before_averaging_is_refused():
    model, optimizer = build(1)
    out = checkpoint(model, noise(4, 5, seed=1).requires_grad_(), use_reentrant=True)
    # As what averages gradients at the end of the pass around it.
    out.register_hook(lambda _: register_post_backward(lambda: None, lambda: None))
    with pytest.raises(RuntimeError, match=r"inside of a reentrant checkpoint.*use_reentrant=False"):
        out.sum().backward()
    assert optimizer.progress == 0.0


def test_a_step_before_the_last_pass_is_refused_with_the_count():
    model, optimizer = build(3, model=linear())
    with pytest.raises(RuntimeError, match=r"Don't step without finishing backward.*expected 3 .* got 0"):
        optimizer.step()
    backward(model, [1.0, 0.0], [0.0, 1.0])
    weight = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"expected 3 .* got 2.*num_gradients_to_accumulate=2"):
        optimizer.step()
    assert torch.equal(model.weight, weight)


def test_the_error_of_a_shorter_accumulation_says_what_mends_it():
    model, optimizer = build(3, model=linear())
    backward(model, [1.0, 0.0], [0.0, 1.0])
    words = (
        r"last accumulation of an epoch is shorter.*set_num_gradients_to_accumulate\(2\) and "
        r"optimizer\.set_scale\(optimizer\.scale \* 2 / 3, update_estimate=False\) before the first"
    )
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    model, optimizer = build(3, model=linear())
    optimizer.set_num_gradients_to_accumulate(2)
    optimizer.set_scale(optimizer.scale * 2 / 3, update_estimate=False)
    backward(model, [1.0, 0.0], [0.0, 1.0], divisor=2)
    optimizer.step()
    assert optimizer.progress == pytest.approx(2.0)  # They have no direction in common: as many as they are.


def test_a_step_to_which_ranks_contribute_unequally_is_refused(monkeypatch):
    model, optimizer = build(model=linear())
    backward(model, [1.0, 0.0], [0.0, 1.0])
    monkeypatch.setattr("scale_core.uneven_inputs.active_share", LossShare(weight=0.0, divisor=1))
    with pytest.raises(RuntimeError, match=r"under join\(\) .* run out of data.*optimizer\.unhook\(\)"):
        optimizer.step()
    optimizer.unhook()
    optimizer.step()


def test_a_pass_too_many_is_refused_and_says_how_many_came():
    model, optimizer = build(model=linear())
    with pytest.raises(RuntimeError, match=r"expected 2 backward passes between two steps, but 3 came"):
        backward(model, [1.0, 0.0], [0.0, 1.0], [1.0, 1.0])
    assert optimizer.progress == 0.0


@pytest.mark.parametrize(
    "method, args, words",
    [
        ("zero_grad", (), "Don't zero_grad in backward"),
        ("set_scale", (3.0,), "Don't change scale in backward phase"),
        ("set_num_gradients_to_accumulate", (3,), "Don't change num_grad_to_accum in backward"),
        ("add_param_group", ({"params": []},), "Can't add parameter group during backward"),
        ("state_dict", (), "Don't checkpoint in backward"),
        ("load_state_dict", ({},), "Don't load checkpoint in backward"),
    ],
)
def test_between_the_passes_of_a_step_nothing_may_change(method, args, words):
    model, optimizer = build(model=linear())
    backward(model, [1.0, 0.0])
    with pytest.raises(RuntimeError, match=rf"{words}: {method}\(\).*1 of its 2"):
        getattr(optimizer, method)(*args)


def test_gradients_that_were_not_divided_are_refused():
    model, optimizer = build(model=linear(), is_scaled_loss=False)
    with pytest.raises(RuntimeError, match=r"expected 2 gradients to divide by, but 0 came"):
        optimizer.scale_grad_by_num_grads_to_accum()
    backward(model, [1.0, 0.0], [0.0, 1.0])
    with pytest.raises(RuntimeError, match=r"scale_grad_by_num_grads_to_accum\(\) before the step"):
        optimizer.step()
    optimizer.scale_grad_by_num_grads_to_accum()
    with pytest.raises(RuntimeError, match="divided already"):
        optimizer.scale_grad_by_num_grads_to_accum()
    optimizer.step()


def test_gradients_of_divided_losses_are_not_divided_again():
    optimizer = two_steps()
    with pytest.raises(RuntimeError, match="Must use unscaled loss"):
        optimizer.scale_grad_by_num_grads_to_accum()


@pytest.mark.parametrize("scale", [0.5, -1.0, float("nan"), float("inf"), "4", 2j, torch.ones(2)])
def test_a_scale_below_one_is_refused(scale):
    with pytest.raises(ValueError, match="Scale must be at least 1"):
        two_steps(scale=scale)
    with pytest.raises(ValueError, match="Scale must be at least 1"):
        two_steps().set_scale(scale)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"smoothing": 1.0}, "smoothing from 0 to below 1"),
        ({"smoothing": -0.1}, "smoothing from 0 to below 1"),
        ({"smoothing": "0.9"}, "smoothing from 0 to below 1, got '0.9'"),
        ({"options": AdaScaleOptions(power="0.5")}, "power above 0 and at most 1, got '0.5'"),
        ({"world_size": 4}, r"number of ranks in process_group, 1, got 4"),
        ({"options": AdaScaleOptions(power=0.0)}, "power above 0"),
        (
            {"options": AdaScaleOptions(preconditioned=True)},
            "expected Adam or AdamW for preconditioned=True, got SGD",
        ),
    ],
)
def test_numbers_out_of_their_range_are_refused(kwargs, words):
    with pytest.raises(ValueError, match=words):
        two_steps(**kwargs)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_number_of_gradients_below_one_is_refused(number):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        AdaScale(SGD(linear().parameters(), lr=0.1), num_gradients_to_accumulate=number)
    with pytest.raises(ValueError, match="whole number of at least 1"):
        two_steps().set_num_gradients_to_accumulate(number)


def test_a_number_of_gradients_may_be_any_whole_number():
    assert AdaScale(SGD(linear().parameters(), lr=0.1), num_gradients_to_accumulate=torch.tensor(2)).scale == 2.0


@pytest.mark.ranks(1)
def test_a_parameter_that_torch_itself_divides_is_refused():
    model = linear()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()]))
    with pytest.raises(TypeError, match=r"parameter 0 of shape \(2, 2\) as a DTensor.*scale_fsdp\.fully_shard"):
        AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)


def test_an_optimizer_of_several_gradients_in_a_step_is_refused():
    with pytest.raises(TypeError, match="got LBFGS, which computes several in each step"):
        AdaScale(torch.optim.LBFGS(linear().parameters()), num_gradients_to_accumulate=2)


def test_what_is_no_optimizer_or_an_adascale_already_is_refused():
    with pytest.raises(TypeError, match="got Linear"):
        AdaScale(linear())
    with pytest.raises(TypeError, match="got AdaScale"):
        AdaScale(two_steps())
    with pytest.raises(IndexError, match="one of 1 parameter groups, from 0, got 3"):
        two_steps().gain(3)


def test_ranks_without_a_process_group_do_not_train_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"this is one of 2 ranks .* torch.distributed is not initialized"):
        AdaScale(SGD(nn.Linear(2, 1).parameters(), lr=0.1))


def test_a_wrong_argument_is_named_before_the_optimizer_changes() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = set(vars(optimizer))
    scaled = AdaScale(SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (AdaScale, (optimizer,), {"is_scaled_loss": "false"}, "; write is_scaled_loss=False"),
        (AdaScale, (optimizer,), {"debias_ewma": None}, "AdaScale: expected debias_ewma to be a bool, got None"),
        (AdaScaleOptions, (), {"grad_scaler": 1.0}, "AdaScaleOptions: expected grad_scaler to be a GradScaler or None"),
        (AdaScale, (optimizer,), {"power": 1.0}, r"write options=AdaScaleOptions\(power=...\)"),
        (until_steps, ("text", scaled, 1), {}, "until_steps: expected batches to be a collection"),
        (fit_speed, ([0.1],), {}, "fit_speed: expected seconds to be a mapping, got list of float"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises(TypeError, match=text):
            call(*args, **kwargs)
    assert vars(optimizer).keys() == before and not any(param._backward_hooks for param in model.parameters())
    assert AdaScale(AdamW(model.parameters()), options=AdaScaleOptions(preconditioned=0)).gain() >= 1  # type: ignore[arg-type]
