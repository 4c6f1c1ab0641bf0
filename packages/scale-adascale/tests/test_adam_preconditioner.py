"""What Adam's gradients are divided by before their noise is measured."""

from __future__ import annotations

import pytest
import torch
from adascale_cases import Plain, loss_of, net
from torch import nn
from torch.optim import SGD, Adam, AdamW

from scale_adascale import AdaScale
from scale_adascale.adam_preconditioner import base_of, divisors, is_adaptive, is_rescaling, second_moments


def test_squares_are_divided_by_the_mean_second_moment_of_their_tensor():
    """After one step the mean without its bias is that of the squares of the first gradient."""
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), betas=(0.9, 0.99), eps=0.5)
    gradients = [torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 1.0]]), torch.tensor([2.0, 4.0])]
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        param.grad = gradient
    optimizer.step()
    unknown = nn.Parameter(torch.ones(2))
    holders, groups = [*model.parameters(), unknown], [optimizer.param_groups[0]] * 3
    sums = second_moments(optimizer, holders, groups, [(0, 1)] * 3)
    assert sums.tolist() == pytest.approx([16.0, 20.0, 0.0], rel=1e-5)
    found = divisors(sums / torch.tensor([6.0, 2.0, 2.0]), torch.full((3,), 0.5, dtype=torch.float64))
    assert found.tolist() == pytest.approx([((16 / 6) ** 0.5 + 0.5) ** -2, (10**0.5 + 0.5) ** -2, 0.0], rel=1e-5)


def test_with_adam_the_gain_is_that_of_preconditioned_gradients():
    """The first step is measured without, and forgotten when the second one is measured with it."""
    model, plain = net(), Plain(net(), "adam", 3, lr=0.01, preconditioned=True)
    optimizer = AdaScale(Adam(plain.groups_of(model), lr=0.01), num_gradients_to_accumulate=3)
    for step in range(4):
        seeds = [3 * step + number for number in range(3)]
        for seed in seeds:
            (loss_of(model, seed) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [optimizer.gain(0), optimizer.gain(1)] == pytest.approx(plain.step(seeds), rel=1e-5)
    for mine, its in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_the_power_and_raw_gradients_can_be_asked_for():
    model = net()
    optimizer = AdaScale(
        AdamW(model.parameters(), lr=0.01), num_gradients_to_accumulate=2, power=1.0, preconditioned=False
    )
    raw = AdaScale(SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
    for step in range(3):
        for seed in (2 * step, 2 * step + 1):
            (loss_of(model, seed) / 2).backward()
        raw.step()
        seen = []
        handle = optimizer._optimizer.register_step_pre_hook(lambda o, a, k, s=seen: s.append(o.param_groups[0]["lr"]))
        optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        raw.zero_grad()
        assert optimizer.gain() == raw.gain()
        assert seen == [pytest.approx(0.01 * raw.gain())]


def test_adam_and_its_heirs_are_known_inside_of_wrappers():
    params = list(net().parameters())

    class Wrapper(SGD):
        optim = AdamW(params)

    assert base_of(Wrapper(params)) is Wrapper.optim
    assert is_adaptive(Adam(params)) and is_adaptive(Wrapper(params)) and not is_adaptive(SGD(params))


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "RMSprop", "Adamax", "Adagrad", "Adadelta", "Adafactor", "Rprop"])
def test_the_rule_of_other_optimizers_that_divide_gradients_must_be_said(name):
    kind = getattr(torch.optim, name)
    with pytest.raises(ValueError, match=rf"expected power for {name}.*power=0\.5.*power=1"):
        AdaScale(kind(net().parameters(), lr=0.1), num_gradients_to_accumulate=2)
    optimizer = AdaScale(kind(net().parameters(), lr=0.1), num_gradients_to_accumulate=2, power=0.5)
    assert optimizer._power == 0.5 and optimizer.gain() == 1.0


def test_sgd_and_its_heirs_need_not_say_theirs():
    class Momentum(SGD):
        pass

    params = list(net().parameters())
    assert not any(is_rescaling(each) for each in (SGD(params), Momentum(params), Adam(params), AdamW(params)))
