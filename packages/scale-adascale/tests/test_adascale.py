"""`AdaScale` on one process: FairScale's golden gains with accumulation, what it measures, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from adascale_cases import (
    backward,
    build,
    gradients_of,
    linear,
    loss_of,
    net,
    noise,
    plain_gain,
    plain_moments,
    run_passes,
)
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from scale_adascale import AdaScale, AdaScaleOptions
from scale_adascale.estimates import Average
from scale_adascale.gain import Moments, bounded, gain
from scale_core import ShardedGradScaler

# The gain.


@pytest.mark.parametrize("scale", [None, 4.0 / 3, 2.0, 4.0])
def test_orthogonal_gradients_are_worth_the_scale(scale):
    model = nn.Linear(4, 2, bias=False)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=4, scale=scale)
    backward(model, *torch.eye(4).tolist())
    assert optimizer.gain() == pytest.approx(scale or 4.0)
    assert optimizer.scale == (scale or 4.0)


def test_the_gain_is_that_of_micro_batches_computed_one_by_one():
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
        averages = [a.updated(bounded(row), 0.9, debias=True) for a, row in zip(averages, rows, strict=True)]
        run_passes(model, seeds)
        optimizer.step()
        optimizer.zero_grad()
        expected = [gain(average.moments, 5.0) for average in averages]
        assert [optimizer.gain(0), optimizer.gain(1)] == pytest.approx(expected, rel=1e-6)
        total = Moments(*(sum(column) for column in zip(*(a.moments for a in averages), strict=True)))
        assert optimizer.gain() == pytest.approx(gain(total, 5.0), rel=1e-6)


def test_a_checkpointed_model_has_the_same_gain():
    gains = []
    for recompute in (False, True):
        model, optimizer = build()
        for seed in (1, 2):
            batch = noise(4, 5, seed=seed)
            out = checkpoint(model, batch, use_reentrant=False) if recompute else model(batch)
            out.square().mean().backward()
        gains.append(optimizer.gain())
    assert gains[0] == gains[1] > 1.01


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


def test_gradients_clipped_after_backward_have_the_same_gain():
    model, optimizer = build()
    expected = plain_gain(gradients_of(model, list(model.parameters()), [1, 2]), 2.0)
    optimizer.zero_grad()  # What autograd.grad has brought was a pass, too.
    run_passes(model, (1, 2))
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
            run_passes(each, (2 * step, 2 * step + 1))
        for number, group in enumerate(reference.param_groups):
            group["lr"] = (0.2, 0.1)[number] * optimizer.gain(number)
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_progress_is_the_sum_of_the_gains():
    model, optimizer = build(model=linear(), smoothing=0.0)
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


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler])
def test_scaled_losses_keep_the_gain_and_skipped_steps_are_none(scaler_class, unscale):
    """A power of two changes no digit; in the third step a gradient is inf, and the scale halves."""
    scaler = scaler_class(init_scale=1024.0) if scaler_class is ShardedGradScaler else scaler_class("cpu", 1024.0)
    models = [net(), net()]
    with_scaler, without = (
        AdaScale(SGD(each.parameters(), lr=0.1), num_gradients_to_accumulate=2, smoothing=0.5) for each in models
    )
    with_scaler.grad_scaler = scaler
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


def test_a_gain_read_before_the_scalers_step_is_right():
    scaler, models = torch.amp.GradScaler("cpu", 4096.0), [net(), net()]
    optimizers = [AdaScale(SGD(m.parameters(), lr=0.1), num_gradients_to_accumulate=2) for m in models]
    optimizers[0].grad_scaler = scaler
    for step in range(3):
        run_passes(models[0], (2 * step, 2 * step + 1), scaler)
        run_passes(models[1], (2 * step, 2 * step + 1))
        assert optimizers[0].gain() == pytest.approx(optimizers[1].gain(), rel=1e-9)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.fault(76)
def test_nonfinite_gradients_leave_the_gain_and_warn_once():
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


def test_a_shorter_accumulation_ending_an_epoch_is_measured():
    """Windows of four, four, two and four passes, at weights that do not move, with the lines that the guide says."""
    model = net()
    params = list(model.parameters())
    optimizer = AdaScale(SGD(params, lr=1e-30), num_gradients_to_accumulate=4)
    average, seeds = Average(), iter(range(100))
    for passes in (4, 4, 2, 4):
        if passes != optimizer.num_gradients_to_accumulate:
            optimizer.set_num_gradients_to_accumulate(passes)
            optimizer.set_scale(passes, update_estimate=False)
        mine = [next(seeds) for _ in range(passes)]
        run_passes(model, mine)
        plain = net()
        sample = plain_moments(gradients_of(plain, list(plain.parameters()), mine), passes)
        average = average.updated(bounded(sample), 1 - passes / 1000, debias=True)
        assert optimizer.gain() == pytest.approx(gain(average.moments, passes), rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    assert 4 < optimizer.progress < 14


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_scaler_it_was_not_built_with_is_refused_before_a_step(kind):
    """Also through functions that others have put in the place of `step`. One that is not enabled scales nothing."""
    options = {} if kind is ShardedGradScaler else {"device": "cpu"}
    scaler, off, model = kind(init_scale=64.0, **options), kind(enabled=False, **options), net()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1))
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)
    scaler.scale(loss_of(model, 1)).backward()
    weight = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"AdaScaleOptions\(grad_scaler=scaler\)\), or set optimizer\.grad_scaler"):
        scaler.step(optimizer)
    assert torch.equal(model[0].weight, weight)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    off.step(optimizer)
    assert not torch.equal(model[0].weight, weight) and optimizer.progress == 1.0


def test_after_loading_the_gain_before_the_first_step_is_right():
    model, scaler = net(), torch.amp.GradScaler("cpu", 2.0**10)

    def build() -> AdaScale:
        return AdaScale(
            SGD(model.parameters(), lr=1e-30),
            num_gradients_to_accumulate=2,
            options=AdaScaleOptions(grad_scaler=scaler),
        )

    optimizers = [build()]
    for number in range(6):
        if number == 4:
            optimizers.append(build())
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        saved = optimizers[-1].gain()
        run_passes(model, (2 * number, 2 * number + 1), scaler)
        if number == 4:
            assert optimizers[1].gain() == optimizers[0].gain() != saved
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert optimizers[-1].gain() == optimizers[0].gain() > 1


def test_a_step_others_wrapped_has_the_gain_of_unscaled_losses():
    """While the scale grows at each step."""
    models, scaler = [net(), net()], torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1)
    scaled, plain = (
        AdaScale(SGD(model.parameters(), lr=0.01), num_gradients_to_accumulate=2, smoothing=0.9) for model in models
    )
    scaled.grad_scaler = scaler
    step = scaled.step
    scaled.step = lambda *args, **kwargs: step(*args, **kwargs)
    for number in range(4):
        run_passes(models[0], (2 * number, 2 * number + 1), scaler)
        run_passes(models[1], (2 * number, 2 * number + 1))
        scaler.step(scaled)
        scaler.update()
        plain.step()
        scaled.zero_grad()
        plain.zero_grad()
        assert scaled.gain() == pytest.approx(plain.gain(), rel=1e-9)
    assert scaler.get_scale() == 2.0**14


def test_a_step_the_scaler_skips_warns_nobody_who_reads_the_gain():
    """Warnings are errors here. The first step of a training is skipped often."""
    model, scaler = net(), torch.amp.GradScaler("cpu", 2.0**10)
    optimizer = AdaScale(
        SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, options=AdaScaleOptions(grad_scaler=scaler)
    )
    gains = []
    for step in range(4):
        for seed in (2 * step, 2 * step + 1):
            scaler.scale(loss_of(model, seed) / 2 * (torch.inf if step in (0, 2) else 1.0)).backward()
        scaler.step(optimizer)
        gains.append(optimizer.gain())
        scaler.update()
        optimizer.zero_grad()
    assert gains[0] == 1.0 < gains[1] == gains[2] != gains[3]
