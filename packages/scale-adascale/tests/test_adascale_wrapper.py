"""AdaScale wraps an optimizer: the attributes that it passes on, and the calls that raise an error."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from adascale_cases import backward, build, linear, net, noise, run_passes, two_steps
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from scale_adascale import AdaScale


def test_a_copy_or_a_pickle_is_refused():
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="hooks on the parameters of this very model"):
            take(two_steps())


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
    assert optimizer.defaults is inner.defaults and optimizer.optimizer is inner
    seen = []
    optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    assert seen == ["before", "after"]
    assert "SGD" in optimizer.construction
    with pytest.raises(AttributeError, match="nothing_like_it"):
        optimizer.nothing_like_it  # noqa: B018


def test_a_scheduler_sees_the_learning_rates_of_the_small_batch():
    model, optimizer = build(3, model=linear())
    scheduler = LambdaLR(optimizer, lr_lambda=lambda epoch: 1 / 10**epoch)
    for epoch in range(3):
        for _ in range(2):
            backward(model, *noise(3, 2, seed=epoch).tolist())
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 10**epoch)
        scheduler.step()


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor():
    model = linear()
    rate = torch.tensor(0.1)
    optimizer = AdaScale(AdamW(model.parameters(), lr=rate), num_gradients_to_accumulate=2)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.1)


def test_a_fused_inner_optimizer_gets_unscaled_gradients():
    """torch's scaler leaves the unscaling to fused optimizers; AdaScale must not pass that on."""
    models = [net(), net()]
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    optimizers = [AdaScale(AdamW(m.parameters(), lr=0.01, fused=True), num_gradients_to_accumulate=2) for m in models]
    optimizers[0].grad_scaler = scaler
    run_passes(models[0], (1, 2), scaler)
    run_passes(models[1], (1, 2))
    scaler.step(optimizers[0])
    optimizers[1].step()
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


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


def test_a_rank_without_any_gradient_has_nothing_to_divide():
    """As one that has no piece of a small model."""
    model, optimizer = build(model=linear(), is_scaled_loss=False)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    model.weight.grad = None
    optimizer.scale_grad_by_num_grads_to_accum()
    optimizer.step()


def test_after_unhook_steps_go_on_with_the_last_gain():
    model, optimizer = build(model=linear())
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    optimizer.unhook()
    last, weight = optimizer.gain(), model.weight.detach().clone()
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(model.weight, weight - 0.1 * last)


def test_after_unhook_plain_loops_count_the_last_gain_until_hook():
    model, optimizer = build(model=linear())
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
    model, optimizer = build(model=linear())
    backward(model, [1.0, 4.0], [5.0, 0.5])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model, [1.0, 4.0])  # Its hooks hear of nothing.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_the_passes_of_a_step_do_not_wait_for_the_device(kind):
    """From the first pass to what is sent after the last one; `step` reads the gain."""
    device = torch.device("cuda", torch.cuda.current_device())
    model, batch = net().to(device), noise(4, 5, seed=1).to(device)
    optimizer = AdaScale(kind(model.parameters(), lr=0.01), num_gradients_to_accumulate=2)
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                (model(batch).square().mean() / 2).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.gain() >= 1.0
