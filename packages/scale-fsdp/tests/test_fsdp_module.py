"""What a sharded module can do beyond the plain one: accumulate without sending, and be seen whole."""

import contextlib
import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from fsdp_parity import assert_same_grads, noise, sharded
from torch import nn

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from scale_fsdp.runtime.unit import units_in


def perceptron(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))


WAYS = {
    "root": ([""], {}),
    "units": (["0", "2", ""], {}),
    "units only": (["0", "2"], {}),
    "flat": (["0", ""], {"flatten_parameters": True}),
    "half": (["0", ""], {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2, in_turn=True)
def test_summoned_parameters_are_full_and_changes_stay(way):
    units, kwargs = WAYS[way]
    plain, model = perceptron(1), sharded(perceptron(1), units, **kwargs)
    other = dict(perceptron(2).named_parameters())
    members = [model] if "" in units else [model[0], model[2]]
    for volatile in (True, False):
        for number, member in enumerate(members):
            inside = "" if member is model else f"{number * 2}."
            with member.summon_full_params(volatile=volatile):
                for name, param in member.named_parameters():
                    if "flat_param" in name:
                        continue
                    assert torch.equal(param, dict(plain.named_parameters())[inside + name]), f"{name} differs"
                    with torch.no_grad():
                        param.copy_(other[inside + name])
                if member is model:  # The change is seen inside.
                    assert all(torch.equal(p, other[name]) for name, p in model.named_parameters() if name in other)
        assert_equal(model, plain if volatile else perceptron(2))


@pytest.mark.ranks(2, in_turn=True)
def test_without_recursion_units_inside_stay_sharded():
    model = sharded(perceptron(), ["0", ""])
    with model.summon_full_params(recurse=False):
        inner, outer = (local_tensor(layer.weight).shape for layer in (model[0], model[2]))
    assert inner != (7, 5) and outer == (3, 7)


@pytest.mark.ranks(1, 2, in_turn=True)
def test_summoning_in_a_forward_or_in_itself_is_an_error():
    class Summoner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.outside = nn.Linear(3, 3), None

        def forward(self, x):
            x = self.linear(x)
            if self.outside is not None:
                with self.outside().summon_full_params():
                    pass
            return x

    model = sharded(nn.Sequential(Summoner()), ["0", ""])
    model[0].outside = lambda: model
    with pytest.raises(RuntimeError, match="between steps"):
        model(noise(2, 3))
    model[0].outside = None
    model(noise(2, 3)).sum().backward()
    with model.summon_full_params(), pytest.raises(RuntimeError, match="another"), model.summon_full_params():
        pass
    assert all(p.grad is not None for p in model.parameters()), "no gradient"


@pytest.mark.ranks(2, in_turn=True)
def test_summoning_between_forward_and_backward_changes_nothing():
    plain = perceptron()
    model = sharded(plain, ["0", "2", ""])
    loss, expected = model(noise(2, 5)).sum(), plain(noise(2, 5)).sum()
    with model.summon_full_params(volatile=True):
        pass
    loss.backward()
    expected.backward()
    norm = model.clip_grad_norm_(1e9)
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(norm, wanted), f"{norm} instead of {wanted}"


@pytest.mark.ranks(1, 2, in_turn=True)
def test_no_sync_keeps_gradients_until_the_next_backward_outside():
    """Gradients kept inside `no_sync` are sent by the first backward outside; before that, there are none."""
    model, plain = sharded(perceptron(), ["0", "2", ""]), perceptron()
    with model.no_sync():
        model(noise(2, 5, seed=1)).sum().backward()
        model(noise(2, 5, seed=2)).sum().backward()
    assert all(p.grad is None for p in model.parameters()), "gradients inside no_sync"
    model(noise(2, 5, seed=3)).sum().backward()
    for seed in (1, 2, 3):
        plain(noise(2, 5, seed=seed)).sum().backward()
    norm = model.clip_grad_norm_(1e9)
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(norm, wanted), f"{norm} instead of {wanted}"


@pytest.mark.ranks(1, 2, in_turn=True)
def test_gradients_that_wait_under_no_sync_can_be_dropped():
    """A micro-batch under `no_sync` is dropped, by `zero_grad`; then one step as if it had not been."""
    ways = ("of the model", "of the wrapper", "of the optimizer", "of torch's class")
    for how, reshard in itertools.product(ways, (True, False)):
        units = ["0", "2"] if how == "of the wrapper" else ["0", "2", ""]
        model, fresh = (sharded(perceptron(), units, reshard_after_forward=reshard) for _ in range(2))
        if how == "of the wrapper":
            model, fresh = FullyShardedDataParallel(model), FullyShardedDataParallel(fresh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with model.no_sync():
            model(noise(2, 5, seed=1)).sum().backward()
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(RuntimeError, match=r"SGD.step\(\): gradients of '0.weight' .*no_sync.*model.zero_grad\(\)"):
            optimizer.step()
        assert_equal([param.detach() for param in model.parameters()], before, "the refused step moved the weights")
        if how == "of torch's class":  # As wrappers call it, which derive a class from the optimizer's.
            torch.optim.Optimizer.zero_grad(optimizer)
        else:
            (optimizer if how == "of the optimizer" else model).zero_grad()
        optimizer.step()  # There is nothing to step on, and nothing that waits.
        for each in (model, fresh):
            each(noise(2, 5, seed=3)).sum().backward()
        ours, theirs = ([param.grad for param in each.parameters()] for each in (model, fresh))
        assert_equal(ours, theirs, "what was dropped came back")


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.ranks(1, 2, in_turn=True)
def test_an_optimizer_clears_what_waits_of_its_own_parameters(to_none: bool) -> None:
    """An optimizer of one layer clears what waits of that, and leaves the others'; zeros move weights by momentum."""
    model, plain = sharded(perceptron(), [""]), perceptron()
    optimizers = {}
    for each in (model, plain):
        optimizers[each] = [torch.optim.AdamW(each[number].parameters(), lr=0.1) for number in (0, 2)]
        with getattr(each, "no_sync", contextlib.nullcontext)():
            each(noise(2, 5, seed=1)).sum().backward()
        optimizers[each][0].zero_grad(set_to_none=to_none)
        each[0].weight.requires_grad_(False)
        each(noise(2, 5, seed=2)).sum().backward()
        for optimizer in optimizers[each]:
            optimizer.step()
    assert_equal(model, plain)


FREEZE: dict[str, Callable[[nn.Module], object]] = {
    "a parameter": lambda model: model[0].weight.requires_grad_(False),
    "a unit": lambda model: model[0].requires_grad_(False),
    "a unit and a parameter": lambda model: (model[2].requires_grad_(False), model[0].bias.requires_grad_(False)),
    "on one rank only, what it alone has used": lambda model: model[4].requires_grad_(False),
}


class Chosen(nn.Sequential):
    """Rank 1 leaves the last layer out."""

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        for layer in self[:4]:
            x = layer(x)
        return self[4](x) if not rank else x


def chosen() -> Chosen:
    torch.manual_seed(1)
    return Chosen(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 3))


@pytest.mark.ranks(1, 2, in_turn=True)
def test_what_is_frozen_keeps_the_gradient_that_waits():
    """What has a gradient from under `no_sync` is frozen; as in plain PyTorch, it keeps that for the step."""
    times, options = ("between passes", "in a pass"), ({}, {"reshard_after_forward": False})
    for what, when, kwargs in itertools.product(FREEZE, times, options):
        rank, world = group_of().rank, group_of().size
        plain = chosen()
        replicas = [copy.deepcopy(plain) for _ in range(world)]
        units = [""] if kwargs else ["0", "2", ""]
        model = sharded(plain, units, **kwargs)
        for number, each in [*enumerate(replicas), (rank, model)]:
            used = number if "one rank" in what else 0
            with getattr(each, "no_sync", contextlib.nullcontext)():
                each(noise(2, 5, seed=number), used).square().sum().backward()
            if when == "between passes":
                FREEZE[what](each)
            loss = each(noise(2, 5, seed=10 + number), used).square().sum()
            if when == "in a pass":
                FREEZE[what](each)
            loss.backward()
        for param, *of_ranks in zip(*(each.parameters() for each in (plain, *replicas)), strict=True):
            grads = [other.grad for other in of_ranks]
            if any(grad is not None for grad in grads):
                param.grad = sum(torch.zeros_like(param) if grad is None else grad for grad in grads) / world
        assert_same_grads(model, plain)
        for each in (model, plain):
            torch.optim.AdamW(each.parameters(), lr=0.1).step()
        assert_equal(model, plain)
        for each in (model, plain):
            each.zero_grad()
            each.requires_grad_(True)
            each(noise(2, 5, seed=3)).square().sum().backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2, in_turn=True)
def test_a_frozen_flat_parameter_keeps_the_gradient_that_waits():
    plain = perceptron()
    model = sharded(plain, ["0", ""], flatten_parameters=True)
    for each in (model, plain):
        with getattr(each, "no_sync", contextlib.nullcontext)():
            each(noise(2, 5, seed=1)).sum().backward()
        for param in each[0].parameters():
            param.requires_grad_(False)
        each(noise(2, 5, seed=2)).sum().backward()
    assert_same_grads(model, plain)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ranks(2, in_turn=True)
def test_a_step_while_units_are_gathered_is_seen(reshard, fused):
    """An optimizer step while units are kept gathered: the next forward must see the new weights."""
    model = sharded(perceptron(), ["0", "2", ""], reshard_after_forward=reshard)
    plain = perceptron()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1, fused=fused) for each in (model, plain)]
    for each in (model, plain):
        each(noise(2, 5)).sum().backward()
    with model.no_sync():
        model(noise(2, 5))
        for optimizer in optimizers:
            optimizer.step()
        assert torch.allclose(model(noise(2, 5)), plain(noise(2, 5)), atol=1e-5), "old weights"


def test_methods_of_the_outermost_unit_are_refused_inside():
    model = sharded(perceptron(), ["0", ""])
    model(noise(2, 5))
    with pytest.raises(ValueError, match="outermost one, a Sequential"), model[0].no_sync():
        pass


def test_gradients_of_a_model_without_any_are_clipped_to_nothing():
    model = FullyShardedDataParallel(perceptron())
    assert model.clip_grad_norm_(1.0) == 0
    with pytest.raises(ValueError, match="norm_type"):
        model.clip_grad_norm_(1.0, norm_type=0)
    assert [unit.name for unit in units_in(model)] == [""]
