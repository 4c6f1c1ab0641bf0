"""`AdaScale` on one process: FairScale's golden gains with accumulation, what it measures, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from adascale_cases import gradients_of, loss_of, net, noise, plain_gain, plain_moments
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from scale_adascale import AdaScale, AdaScaleWrapper
from scale_adascale.averages import Average
from scale_adascale.gain import Moments, bounded, gain
from scale_core import ShardedGradScaler
from scale_core.joining import Share

GOLDEN = [
    ([[[1.0, 0.0], [0.0, 1.0]]] * 2, 4.0 / 3),
    ([[[1.0, 1.0], [1.0, 1.0]]] * 2, 1.0000001249999846),
    ([[[-1.0, 1.0], [1.0, -1.0]]] * 2, 2.0),
    ([[[1.0, 4.0], [5.0, 0.5]]] * 2, 1.4688796680497926),
    ([[[-0.2, 3.0], [5.0, 0.5]]] * 2, 1.8472893901708),
    ([[[-0.2, 3.3], [5.2, 0.7]], [[1.0, 4.0], [3.1, 0.1]]], 1.6720968158031417),
]


def backward(model: nn.Module, *samples: list[float], divisor: float = 1.0) -> None:
    """One backward pass for each sample, of the sum of the outputs."""
    for sample in samples:
        (model(torch.tensor(sample)).sum() / divisor).backward()


def linear(bias: bool = False) -> nn.Linear:
    return nn.Linear(2, 2, bias=bias)


def two_steps(**kwargs: Any) -> AdaScale:
    return AdaScale(SGD(linear().parameters(), lr=0.1), num_gradients_to_accumulate=2, **kwargs)


# The gain.


@pytest.mark.parametrize("is_scaled_loss", [True, False])
@pytest.mark.parametrize("steps, expected", GOLDEN)
def test_fairscales_golden_gains_hold_with_accumulation(steps, expected, is_scaled_loss):
    model = linear(bias=True)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, is_scaled_loss=is_scaled_loss)
    for inputs in steps:
        backward(model, *inputs, divisor=2 if is_scaled_loss else 1)
        if not is_scaled_loss:
            optimizer.scale_grad_by_num_grads_to_accum()
        mean = torch.tensor(inputs).mean(0)
        torch.testing.assert_close(model.weight.grad, mean.expand(2, 2))
        before = optimizer.gain()
        optimizer.step()
        assert optimizer.gain() == before
        optimizer.zero_grad()
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_scaled_loss", [True, False])
@pytest.mark.parametrize("number, expected", [(3, 2.141385737279438), (6, 2.9927880097754036), (9, 3.4461759591877312)])
def test_fairscales_golden_gains_hold_when_the_accumulation_grows(number, expected, is_scaled_loss):
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, is_scaled_loss=is_scaled_loss)

    def step(*samples: list[float], divisor: float) -> None:
        backward(model, *samples, divisor=divisor * (len(samples) if is_scaled_loss else 1))
        if not is_scaled_loss:
            optimizer.scale_grad_by_num_grads_to_accum()
        optimizer.step()
        optimizer.zero_grad()

    step([0.0, 1.0], [1.0, 0.0], divisor=1)
    assert optimizer.gain() == pytest.approx(2.0)
    optimizer.set_scale(float(number))
    optimizer.set_num_gradients_to_accumulate(number)
    step(*[[0.0, 1.0]] * number, divisor=number)
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("debias", [True, False])
def test_fairscales_golden_gains_hold_when_groups_are_added(debias):
    """As FairScale's test of it, with its weights."""

    def layer(width: int, height: int, bias: float) -> nn.Linear:
        made = nn.Linear(width, height)
        with torch.no_grad():
            made.weight.copy_((torch.arange(width * height) % 6 + 1.0).reshape(height, width))
            made.bias.fill_(bias)
        return made

    layers = [layer(2, 2, 0.1), layer(2, 3, 0.2), layer(3, 4, 0.2)]
    optimizer = AdaScale(SGD(layers[0].parameters(), lr=0.1), num_gradients_to_accumulate=2, debias_ewma=debias)
    optimizer.add_param_group({"params": layers[1].parameters()})
    backward(nn.Sequential(*layers[:2]), [1.0, 2.0], [3.0, 4.0], divisor=2)
    assert optimizer.gain() == pytest.approx(1.1440223454935758, rel=1e-6)
    assert [optimizer.gain(0), optimizer.gain(1)] == pytest.approx([1.1428571428571428, 1.1471258476157762], rel=1e-6)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": layers[2].parameters()})
    backward(nn.Sequential(*layers), [1.0, 2.0], [3.0, 4.0], divisor=2)
    expected = [1.142857206008338, 1.1116875516387468, 1.0749164095196344]
    if not debias:
        expected[:2] = [1.142857206006931, 1.1116906378271827]
    assert [optimizer.gain(number) for number in range(3)] == pytest.approx(expected, rel=1e-6)
    if debias:  # FairScale counts the steps of all groups together, so that a new one counts half in the sum.
        assert optimizer.gain() == pytest.approx(1.1382937715383077, rel=1e-6)


@pytest.mark.parametrize("scale", [None, 4.0 / 3, 2.0, 4.0])
def test_orthogonal_gradients_are_worth_the_scale(scale):
    model = nn.Linear(4, 2, bias=False)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=4, scale=scale)
    backward(model, *torch.eye(4).tolist())
    assert optimizer.gain() == pytest.approx(scale or 4.0)
    assert optimizer.scale == (scale or 4.0)


def test_the_gain_is_that_of_all_micro_batches_computed_one_by_one():
    """Over several steps, in two groups of which one has a parameter that is never used, and another that is frozen."""
    model = net()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    groups = [list(model[0].parameters()), [model[2].weight, model.unused]]
    optimizer = AdaScale(
        SGD([{"params": group} for group in groups], lr=0.05), num_gradients_to_accumulate=3, scale=5.0, smoothing=0.9
    )
    averages = [Average(), Average()]
    for step in range(4):
        model[0].bias.requires_grad_(step != 1)  # Frozen in one step.
        seeds = [10 * step + number for number in range(3)]
        here = [[param for param in group if param.requires_grad] for group in groups]
        rows = [plain_moments(gradients_of(model, group, seeds), 5.0) for group in here]
        averages = [a.after(bounded(row), 0.9, debias=True) for a, row in zip(averages, rows, strict=True)]
        for seed in seeds:
            (loss_of(model, seed) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = [gain(average.moments, 5.0) for average in averages]
        assert [optimizer.gain(0), optimizer.gain(1)] == pytest.approx(expected, rel=1e-6)
        total = Moments(*(sum(column) for column in zip(*(a.moments for a in averages), strict=True)))
        assert optimizer.gain() == pytest.approx(gain(total, 5.0), rel=1e-6)


def test_a_checkpointed_model_has_the_same_gain():
    gains = []
    for recompute in (False, True):
        model = net()
        optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        for seed in (1, 2):
            batch = noise(4, 5, seed=seed)
            out = checkpoint(model, batch, use_reentrant=False) if recompute else model(batch)
            out.square().mean().backward()
        gains.append(optimizer.gain())
    assert gains[0] == gains[1] > 1.01


def test_a_reentrant_checkpoint_is_refused_by_name():
    model = net()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    batch = noise(4, 5, seed=1).requires_grad_()
    with pytest.raises(RuntimeError, match=r"reentrant checkpoint.*use_reentrant=False"):
        checkpoint(model, batch, use_reentrant=True).sum().backward()
    assert optimizer.gain() == 1.0


def test_sparse_complex_and_double_gradients_are_measured():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(7, 3, sparse=True)
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.fine = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.table(x) * self.turn).abs().double() * self.fine).sum()

    model = Odd()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    rows = []
    for batch in (torch.tensor([1, 1, 2]), torch.tensor([2, 5, 5])):
        grads = torch.autograd.grad(model(batch), list(model.parameters()))
        optimizer.unhook()  # autograd.grad brings no step.
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        rows.append([torch.view_as_real(g).double() if g.is_complex() else g.double() for g in dense])
    optimizer.hook()
    for batch in (torch.tensor([1, 1, 2]), torch.tensor([2, 5, 5])):
        (model(batch) / 2).backward()
    assert optimizer.gain() == pytest.approx(plain_gain(rows, 2.0), rel=1e-6)


def test_gradients_that_are_clipped_after_backward_have_the_same_gain():
    model = net()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    expected = plain_gain(gradients_of(model, list(model.parameters()), [1, 2]), 2.0)
    optimizer.zero_grad()  # What autograd.grad has brought was a pass, too.
    for seed in (1, 2):
        (loss_of(model, seed) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)
    optimizer.step()
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


# The step.


def test_a_step_is_that_of_the_inner_optimizer_with_the_gain():
    model, plain = net(), net()
    groups = [{"params": list(m[0].parameters()), "lr": 0.2} for m in (model, plain)]
    rest = [{"params": list(m[2].parameters())} for m in (model, plain)]
    optimizer = AdaScale(SGD([groups[0], rest[0]], lr=0.1, momentum=0.9), num_gradients_to_accumulate=2)
    reference = SGD([groups[1], rest[1]], lr=0.1, momentum=0.9)
    for step in range(3):
        for each in (model, plain):
            for seed in (2 * step, 2 * step + 1):
                (loss_of(each, seed) / 2).backward()
        for number, group in enumerate(reference.param_groups):
            group["lr"] = (0.2, 0.1)[number] * optimizer.gain(number)
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor():
    model = linear()
    rate = torch.tensor(0.1)
    optimizer = AdaScale(AdamW(model.parameters(), lr=rate), num_gradients_to_accumulate=2)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.1)


def test_progress_is_the_sum_of_the_gains():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, smoothing=0.0)
    total = 0.0
    for samples in ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 4.0], [5.0, 0.5]]):
        backward(model, *samples)
        total += optimizer.gain()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.progress == total > 2


def test_a_closure_runs_the_passes_of_its_step():
    model, plain = linear(), linear()
    plain.load_state_dict(model.state_dict())
    first, second = (AdaScale(SGD(each.parameters(), lr=0.1), num_gradients_to_accumulate=2) for each in (model, plain))

    def closure() -> float:
        first.zero_grad()
        backward(model, [1.0, 0.5], [0.0, 1.0])
        return 7.5

    assert first.step(closure) == 7.5
    assert first.step(closure=closure) == 7.5
    for _ in range(2):
        backward(plain, [1.0, 0.5], [0.0, 1.0])
        second.step()
        second.zero_grad()
    assert torch.equal(model.weight, plain.weight) and first.gain() == second.gain()


def test_a_scheduler_sees_the_learning_rates_of_the_small_batch():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=3)
    scheduler = LambdaLR(optimizer, lr_lambda=lambda epoch: 1 / 10**epoch)
    for epoch in range(3):
        for _ in range(2):
            backward(model, *noise(3, 2, seed=epoch).tolist())
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 10**epoch)
        scheduler.step()


def test_the_loop_of_fairscales_readme_works_as_it_stands():
    dataset = [noise(2, seed=seed).tolist() for seed in range(8)]
    model = linear()
    optim = AdaScale(SGD(model.parameters(), lr=0.1), scale=2.0)
    scheduler = LambdaLR(optim, lr_lambda=lambda epoch: 0.5**epoch)
    last_epoch, step, done, taken = 0, 0.0, False, 0
    while not done:
        for batch in dataset:
            optim.zero_grad()
            backward(model, batch)
            step += optim.gain()
            optim.step()
            taken += 1
            epoch = step // len(dataset)
            if epoch > last_epoch:
                scheduler.step()
                last_epoch = epoch
            if epoch >= 2:
                done = True
                break
    assert step == pytest.approx(optim.progress) and step >= 16 and taken < 16


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler])
def test_scaled_losses_have_the_gain_of_unscaled_ones_and_skipped_steps_count_as_nothing(scaler_class, unscale):
    """A power of two changes no digit; in the third step a gradient is inf, and the scale halves."""
    scaler = scaler_class(init_scale=1024.0) if scaler_class is ShardedGradScaler else scaler_class("cpu", 1024.0)
    models = [net(), net()]
    with_scaler, without = (
        AdaScale(SGD(each.parameters(), lr=0.1), num_gradients_to_accumulate=2, smoothing=0.5) for each in models
    )
    for step in range(5):
        for seed in (2 * step, 2 * step + 1):
            factor = torch.inf if step == 2 and seed % 2 else 1.0
            scaler.scale(loss_of(models[0], seed) / 2 * factor).backward()
            if step != 2:
                (loss_of(models[1], seed) / 2).backward()
        if unscale:
            scaler.unscale_(with_scaler)
            norm = nn.utils.clip_grad_norm_(models[0].parameters(), 0.05)
            assert step == 2 or norm > 0.05
        scaler.step(with_scaler)
        scaler.update()
        with_scaler.zero_grad()
        if step != 2:
            if unscale:
                nn.utils.clip_grad_norm_(models[1].parameters(), 0.05)
            without.step()
            without.zero_grad()
        assert with_scaler.gain() == pytest.approx(without.gain(), rel=1e-9)
    assert scaler.get_scale() == 512.0
    assert with_scaler.progress == pytest.approx(without.progress) and with_scaler.progress > 4
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_a_gain_that_is_asked_for_before_the_scalers_step_is_right_too():
    scaler, models = torch.amp.GradScaler("cpu", 4096.0), [net(), net()]
    optimizers = [AdaScale(SGD(m.parameters(), lr=0.1), num_gradients_to_accumulate=2) for m in models]
    for step in range(3):
        for seed in (2 * step, 2 * step + 1):
            scaler.scale(loss_of(models[0], seed) / 2).backward()
            (loss_of(models[1], seed) / 2).backward()
        assert optimizers[0].gain() == pytest.approx(optimizers[1].gain(), rel=1e-9)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_a_fused_inner_optimizer_gets_unscaled_gradients():
    """torch's scaler leaves the unscaling to fused optimizers; AdaScale must not pass that on."""
    models = [net(), net()]
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    optimizers = [AdaScale(AdamW(m.parameters(), lr=0.01, fused=True), num_gradients_to_accumulate=2) for m in models]
    for seed in (1, 2):
        scaler.scale(loss_of(models[0], seed) / 2).backward()
        (loss_of(models[1], seed) / 2).backward()
    scaler.step(optimizers[0])
    optimizers[1].step()
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_gradients_that_are_no_numbers_leave_the_gain_and_warn_once():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    optimizer.zero_grad()
    backward(model, [torch.nan, 0.0], [0.0, 1.0])
    with pytest.warns(UserWarning, match=r"inf or NaN; the gain stays.*scaler.step"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, [torch.inf, 0.0], [0.0, 1.0])
    optimizer.step()
    assert optimizer.gain() == pytest.approx(2.0)


def test_gradients_of_zero_leave_the_gain():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    before = optimizer.gain()
    optimizer.zero_grad()
    backward(model, [0.0, 0.0], [0.0, 0.0])
    optimizer.step()
    assert optimizer.gain() == before > 1


def test_a_step_that_is_left_out_counts_as_nothing():
    """After clearing gradients by the optimizer or by the model."""
    model = linear()
    for by_model in (False, True):
        optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        backward(model, [1.0, 0.0], [0.0, 1.0])
        (model if by_model else optimizer).zero_grad()
        backward(model, [1.0, 1.0], [1.0, 1.0])
        assert optimizer.gain() == pytest.approx(1.0, abs=1e-5)
        optimizer.step()
        assert optimizer.progress == pytest.approx(1.0, abs=1e-5)
        optimizer.unhook()
        model.zero_grad()


def test_a_backward_pass_that_fails_counts_as_nothing():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise OSError("no luck")

    model = net()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    expected = plain_gain(gradients_of(model, list(model.parameters()), [1, 2]), 2.0)
    optimizer.zero_grad()
    (loss_of(model, 1) / 2).backward()
    with pytest.raises(OSError, match="no luck"):
        model[2](torch.tanh(Failing.apply(model[0](noise(4, 5, seed=9))))).sum().backward()
    optimizer.zero_grad()  # Allowed, although a pass is missing: that one has failed.
    for seed in (1, 2):
        (loss_of(model, seed) / 2).backward()
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


# What is refused.


def test_a_step_before_the_last_pass_is_refused_and_says_how_many_came():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=3)
    with pytest.raises(RuntimeError, match=r"Don't step without finishing backward.*expected 3 .* got 0"):
        optimizer.step()
    backward(model, [1.0, 0.0], [0.0, 1.0])
    weight = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"expected 3 .* got 2.*num_gradients_to_accumulate=2"):
        optimizer.step()
    assert torch.equal(model.weight, weight)


def test_a_step_to_which_ranks_contribute_unequally_is_refused(monkeypatch):
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    monkeypatch.setattr("scale_core.joining._share", Share(weight=0.0, divisor=1))
    with pytest.raises(RuntimeError, match=r"under join\(\) .* run out of data.*optimizer\.unhook\(\)"):
        optimizer.step()
    optimizer.unhook()
    optimizer.step()


def test_a_pass_too_many_is_refused_and_says_how_many_came():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
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
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    backward(model, [1.0, 0.0])
    with pytest.raises(RuntimeError, match=rf"{words}: {method}\(\).*1 of 2"):
        getattr(optimizer, method)(*args)


def test_gradients_that_were_not_divided_are_refused():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, is_scaled_loss=False)
    with pytest.raises(RuntimeError, match=r"expected 2 gradients to divide by, but 0 came"):
        optimizer.scale_grad_by_num_grads_to_accum()
    backward(model, [1.0, 0.0], [0.0, 1.0])
    with pytest.raises(RuntimeError, match=r"scale_grad_by_num_grads_to_accum\(\) before the step"):
        optimizer.step()
    optimizer.scale_grad_by_num_grads_to_accum()
    with pytest.raises(RuntimeError, match="divided already"):
        optimizer.scale_grad_by_num_grads_to_accum()
    optimizer.step()


def test_a_rank_without_any_gradient_has_nothing_to_divide():
    """As one that has no piece of a small model."""
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, is_scaled_loss=False)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    model.weight.grad = None
    optimizer.scale_grad_by_num_grads_to_accum()
    optimizer.step()


def test_gradients_whose_losses_were_divided_are_not_divided_again():
    optimizer = two_steps()
    with pytest.raises(RuntimeError, match="Must use unscaled loss"):
        optimizer.scale_grad_by_num_grads_to_accum()


@pytest.mark.parametrize("scale", [0.5, -1.0, float("nan"), float("inf")])
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
        ({"world_size": 4}, r"number of ranks in process_group, 1, got 4"),
        ({"power": 0.0}, "power above 0"),
        ({"preconditioned": True}, "expected an Adam or AdamW for preconditioned=True, got SGD"),
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


def test_a_parameter_that_torch_itself_divides_is_refused():
    model = linear()
    model.weight.placements = ()  # What a DTensor has.
    with pytest.raises(TypeError, match=r"parameter 0 of shape \(2, 2\) as a DTensor.*scale_fsdp\.fully_shard"):
        AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)


def test_an_optimizer_that_computes_several_gradients_in_a_step_is_refused():
    with pytest.raises(TypeError, match="got LBFGS, which computes several in each step"):
        AdaScale(torch.optim.LBFGS(linear().parameters()), num_gradients_to_accumulate=2)


def test_what_is_no_optimizer_or_an_adascale_already_is_refused():
    with pytest.raises(TypeError, match="got Linear"):
        AdaScale(linear())
    with pytest.raises(TypeError, match="got AdaScale"):
        AdaScale(two_steps())
    with pytest.raises(IndexError):
        two_steps().gain(3)


def test_a_copy_or_a_pickle_is_refused():
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="listens to the gradients of this very model"):
            take(two_steps())


# State.


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_training_that_is_saved_and_loaded_goes_on_to_the_bit(kind):
    def build() -> tuple[nn.Module, AdaScale]:
        model = net()
        return model, AdaScale(kind(model.parameters(), lr=0.05), num_gradients_to_accumulate=2, scale=6.0)

    def train(model: nn.Module, optimizer: AdaScale, steps: range) -> None:
        for step in steps:
            for seed in (2 * step, 2 * step + 1):
                (loss_of(model, seed) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, loaded = build()
    other.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    assert loaded.progress > 3
    train(other, loaded, range(3, 6))
    assert loaded.gain() == optimizer.gain() and loaded.progress == optimizer.progress
    assert loaded.noise_scale(4) == optimizer.noise_scale(4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_state_of_the_inner_optimizer_alone_loads_and_the_gain_begins_anew():
    model = linear()
    plain = SGD(model.parameters(), lr=0.3, momentum=0.9)
    backward(model, [1.0, 0.0])
    plain.step()
    model.zero_grad()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1, momentum=0.9), num_gradients_to_accumulate=2)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.gain() == 1.0 and optimizer.param_groups[0]["lr"] == 0.3


def test_a_checkpoint_of_fairscales_adascale_loads():
    """Its state stands among the parameters' own, under "adascale", as arrays; lists stand for them here."""
    optimizer = two_steps()
    saved = {**optimizer.state_dict(), "state": {"adascale": {
        "grad_sqr_avg": [1.5], "grad_var_avg": [4.0], "grad_sqr_avg_biased": [0.3], "grad_sqr_avg_unbias": [0.2],
        "grad_var_avg_biased": [0.8], "grad_var_avg_unbias": [0.2],
    }}}  # fmt: skip
    optimizer.load_state_dict(saved)
    assert optimizer.gain() == pytest.approx((4.0 + 1.5) / (4.0 / 2 + 1.5))
    assert optimizer.state == {}


def test_a_state_that_is_refused_leaves_everything_as_it_was():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.gain(), optimizer.progress, optimizer.noise_scale(1)
    other = SGD([nn.Parameter(torch.ones(1)) for _ in range(9)], lr=0.1)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())
    saved = {**optimizer.state_dict(), "state": {"adascale": {"grad_sqr_avg": [1.0] * 2, "grad_var_avg": [1.0] * 2}}}
    saved["param_groups"] = [{**saved["param_groups"][0], "lr": 7.0}]
    with pytest.raises(ValueError, match="averages of 1 parameter groups, got those of 2"):
        optimizer.load_state_dict(saved)
    assert (optimizer.gain(), optimizer.progress, optimizer.noise_scale(1)) == before and before[0] > 1
    assert optimizer.param_groups[0]["lr"] == 0.1


# What it is to others.


def test_hooks_of_the_state_are_those_of_the_inner_optimizer():
    optimizer, seen = two_steps(), []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append("after"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "before load", "after load"]


def test_it_is_an_optimizer_to_whoever_asks():
    model = linear()
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    seen = []
    optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    assert seen == ["before", "after"]
    assert "SGD" in optimizer.construction
    with pytest.raises(AttributeError, match="nothing_like_it"):
        optimizer.nothing_like_it  # noqa: B018


def test_a_parameter_that_is_unfrozen_is_measured_from_then_on():
    model = net()
    model[0].requires_grad_(False)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    reference = net()
    expected = plain_gain(gradients_of(reference, list(reference.parameters()), [1, 2]), 2.0)
    for seed in (1, 2):
        (loss_of(model, seed) / 2).backward()
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


def test_after_unhook_steps_go_on_with_the_last_gain():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    optimizer.unhook()
    last, weight = optimizer.gain(), model.weight.detach().clone()
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(model.weight, weight - 0.1 * last)


def test_after_unhook_a_usual_loop_goes_on_and_counts_the_last_gain_until_hook():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    last = optimizer.gain()
    optimizer.unhook()
    for steps in (2, 3, 4):
        optimizer.zero_grad()
        backward(model, [1.0, 2.0])
        optimizer.step()
        assert optimizer.progress == pytest.approx(steps * last) and optimizer.gain() == last
    optimizer.param_groups[0]["lr"] = 0.0  # As torch's checkpoint functions step.
    optimizer.step()
    assert optimizer.progress == pytest.approx(4 * last)
    optimizer.zero_grad()
    optimizer.hook()
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    assert optimizer.gain() > last


def test_an_optimizer_that_is_dropped_leaves_nothing_behind():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    backward(model, [1.0, 4.0], [5.0, 0.5])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model, [1.0, 4.0])  # Its hooks hear of nothing.


def test_the_wrapper_builds_what_adascale_wraps():
    """FairScale's passes `debias_ewma` on in the place of `is_scaled_loss`."""
    model = linear()
    optimizer = AdaScaleWrapper(
        model.parameters(), num_gradients_to_accumulate=2, debias_ewma=False, optim_cls=AdamW, lr=0.3
    )
    assert type(optimizer._optimizer) is AdamW and optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer._settings.is_scaled_loss is True and optimizer._settings.debias is False
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    assert optimizer.gain() == pytest.approx(2.0)


def test_ranks_without_a_process_group_do_not_train_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"this is one of 2 ranks .* torch.distributed is not initialised"):
        AdaScale(SGD(nn.Linear(2, 1).parameters(), lr=0.1))
