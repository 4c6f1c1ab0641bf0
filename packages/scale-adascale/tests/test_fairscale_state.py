"""What FairScale's AdaScale has saved, its golden gains and its loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adascale_cases import backward, build, linear, noise, two_steps
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from scale_adascale import AdaScale
from scale_adascale.estimates import Average, without_fairscale
from scale_adascale.gain import Moments, gain

GOLDEN = [
    ([[[1.0, 0.0], [0.0, 1.0]]] * 2, 4.0 / 3),
    ([[[1.0, 1.0], [1.0, 1.0]]] * 2, 1.0000001249999846),
    ([[[-1.0, 1.0], [1.0, -1.0]]] * 2, 2.0),
    ([[[1.0, 4.0], [5.0, 0.5]]] * 2, 1.4688796680497926),
    ([[[-0.2, 3.0], [5.0, 0.5]]] * 2, 1.8472893901708),
    ([[[-0.2, 3.3], [5.2, 0.7]], [[1.0, 4.0], [3.1, 0.1]]], 1.6720968158031417),
]


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
def test_fairscales_golden_gains_hold_when_accumulation_grows(number, expected, is_scaled_loss):
    model, optimizer = build(model=linear(), is_scaled_loss=is_scaled_loss)

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
    assert optimizer.gain() == pytest.approx(1.1382937715383077 if debias else 1.1382921057, rel=1e-6)
    if not debias:  # FairScale counts the steps of all groups together, so that the new one counts half in its total.
        averages = optimizer._estimates().groups
        halved = [(one.variance / part, one.square / part) for one, part in zip(averages, (1, 1, 2), strict=True)]
        variance, square = map(sum, zip(*halved, strict=True))
        assert gain(Moments(variance, square), scale=2.0) == pytest.approx(1.1391959826562015, rel=1e-6)


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
    model, optimizer = build(model=linear())
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.gain(), optimizer.progress, optimizer.noise_scale(1)
    other = SGD([nn.Parameter(torch.ones(1)) for _ in range(9)], lr=0.1)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())
    saved = {**optimizer.state_dict(), "state": {"adascale": {"grad_sqr_avg": [1.0] * 2, "grad_var_avg": [1.0] * 2}}}
    saved["param_groups"] = [{**saved["param_groups"][0], "lr": 7.0}]
    with pytest.raises(ValueError, match="averages of 1 parameter groups, got averages of 2"):
        optimizer.load_state_dict(saved)
    assert (optimizer.gain(), optimizer.progress, optimizer.noise_scale(1)) == before and before[0] > 1
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_fairscales_averages_leave_a_copy_and_the_others_stay():
    state = {"grad_sqr_avg": [1.0, 2.0], "grad_var_avg": [3.0, 4.0], "grad_var_avg_unbias": [0.1, 0.2]}
    saved: dict[str, Any] = {"state": {0: {"momentum": 5}, "adascale": state}, "param_groups": [{}, {}]}
    own, averages = without_fairscale(saved, 2)
    assert own == {"state": {0: {"momentum": 5}}, "param_groups": [{}, {}]} and "adascale" in saved["state"]
    assert averages == [Average(3.0, 1.0, 0.1, 1.0), Average(4.0, 2.0, 0.2, 1.0)]
    assert without_fairscale(own, 2) == (own, None)
