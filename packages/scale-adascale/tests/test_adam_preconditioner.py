"""What Adam's gradients are divided by before their noise is measured."""

from __future__ import annotations

import pytest
import torch
from adascale_cases import net, run_passes
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from scale_adascale import AdaScale, AdaScaleOptions
from scale_adascale.adam_preconditioner import (
    MomentShard,
    SecondMoments,
    base_optimizer,
    divisors,
    is_adaptive,
    is_rescaling,
    second_moments,
)
from scale_core.comm.group import Group
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard


def test_squares_are_divided_by_their_tensors_mean_second_moment():
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


def test_the_power_and_raw_gradients_can_be_asked_for():
    model = net()
    optimizer = AdaScale(
        AdamW(model.parameters(), lr=0.01),
        num_gradients_to_accumulate=2,
        options=AdaScaleOptions(power=1.0, preconditioned=False),
    )
    raw = AdaScale(SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
    for step in range(3):
        run_passes(model, (2 * step, 2 * step + 1))
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

    assert base_optimizer(Wrapper(params)) is Wrapper.optim
    assert is_adaptive(Adam(params)) and is_adaptive(Wrapper(params)) and not is_adaptive(SGD(params))


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "RMSprop", "Adamax", "Adagrad", "Adadelta", "Adafactor", "Rprop"])
def test_other_optimizers_that_divide_gradients_need_a_rule(name):
    kind = getattr(torch.optim, name)
    with pytest.raises(ValueError, match=rf"expected power for {name}.*power=0\.5.*power=1"):
        AdaScale(kind(net().parameters(), lr=0.1), num_gradients_to_accumulate=2)
    optimizer = AdaScale(
        kind(net().parameters(), lr=0.1), num_gradients_to_accumulate=2, options=AdaScaleOptions(power=0.5)
    )
    assert optimizer._power == 0.5 and optimizer.gain() == 1.0


def test_sgd_and_its_heirs_need_not_say_theirs():
    class Momentum(SGD):
        pass

    params = list(net().parameters())
    assert not any(is_rescaling(each) for each in (SGD(params), Momentum(params), Adam(params), AdamW(params)))


CPU = torch.device("cpu")


def stepped(*gradients: list[float], eps: float = 0.5) -> tuple[Adam, list[nn.Parameter]]:
    """One parameter in each group, after a step: the moment without its bias is the square of the gradient."""
    params = [nn.Parameter(torch.zeros(len(each))) for each in gradients]
    optimizer = Adam([{"params": [param], "eps": eps + number} for number, param in enumerate(params)])
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = torch.tensor(gradient)
    optimizer.step()
    return optimizer, params


def divided_by(*means: float, eps: float = 0.5) -> Tensor:
    numbers = enumerate(means)
    return torch.tensor([(mean**0.5 + eps + number) ** -2 for number, mean in numbers], dtype=torch.float64)


def test_one_rank_divides_by_its_means_with_each_groups_epsilon():
    optimizer, params = stepped([1.0, 2.0, 3.0], [2.0, 4.0])
    moments = SecondMoments(optimizer, [MomentShard(param, param, 1.0) for param in params], Group(), (), CPU)
    torch.testing.assert_close(moments.divisors(), divided_by(14 / 3, 10.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(moments.divisors_of(moments.local_means()), moments.divisors(), rtol=0, atol=0)


def test_ranks_read_replicated_moments_in_parts_of_the_mean():
    optimizer, (param,) = stepped([1.0, 2.0, 3.0, 4.0, 5.0])
    ranks = [Group(rank, size=2, ranks=(0, 1)) for rank in (0, 1)]
    parts = [
        SecondMoments(optimizer, [MomentShard(param, param, 0.5)], group, (), CPU).local_means() for group in ranks
    ]
    assert [part.tolist() for part in parts] == [[pytest.approx(5 / 5)], [pytest.approx(50 / 5)]]


def test_shards_of_one_rank_count_over_the_parameters_elements():
    optimizer, (piece,) = stepped([1.0, 2.0])
    whole = nn.Parameter(torch.zeros(5))
    for rank in (0, 1):
        moments = SecondMoments(optimizer, [MomentShard(whole, piece, 1.0)], Group(rank, size=2, ranks=(0, 1)), (), CPU)
        assert moments.local_means().tolist() == [pytest.approx(5 / 5)]


def test_a_copy_of_what_others_have_counts_nothing():
    optimizer, (param,) = stepped([1.0, 2.0])
    group = Group(size=2, ranks=(0, 1))
    set_shard(param, Shard("weight", (2,), 0, 2, (Axis(group, Placement.REPLICATE),), counted=False))
    moments = SecondMoments(optimizer, [MomentShard(param, param, 1.0)], Group(), (), CPU)
    assert moments.local_means().tolist() == [0.0]


def test_groups_that_were_loaded_are_those_that_count():
    optimizer, (param,) = stepped([3.0])
    moments = SecondMoments(optimizer, [MomentShard(param, param, 1.0)], Group(), (), CPU)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps"] = 2.0
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(moments.divisors(), divided_by(9.0, eps=2.0), rtol=1e-5, atol=0)
