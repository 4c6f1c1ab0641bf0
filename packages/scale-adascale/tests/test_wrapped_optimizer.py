"""What AdaScale is to schedulers, scalers, checkpoints and whoever takes it for the optimizer it wraps."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from adascale_cases import backward, linear, loss_of, net, noise, two_steps
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from scale_adascale import AdaScale


def test_a_copy_or_a_pickle_is_refused():
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="listens to the gradients of this very model"):
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
    for seed in (1, 2):
        scaler.scale(loss_of(models[0], seed) / 2).backward()
        (loss_of(models[1], seed) / 2).backward()
    scaler.step(optimizers[0])
    optimizers[1].step()
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
