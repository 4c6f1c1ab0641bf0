"""What a sharded module can do beyond the plain one: accumulate without sending, and be seen whole."""

import contextlib
import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from fsdp_beside import noise, sharded
from fsdp_cases import differing_grads, differing_weights
from torch import nn

from scale_core.comm.group import group_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from scale_fsdp.runtime.unit import units_in


def assert_on_ranks(fn, world, *args):
    __tracebackhide__ = True
    assert not any(run_ranks(fn, world, *args))


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


def summon(way: str) -> list[str]:
    units, kwargs = WAYS[way]
    plain, model = perceptron(1), sharded(perceptron(1), units, **kwargs)
    other = dict(perceptron(2).named_parameters())
    members = [model] if "" in units else [model[0], model[2]]
    wrong = []
    for volatile in (True, False):
        for number, member in enumerate(members):
            inside = "" if member is model else f"{number * 2}."
            with member.summon_full_params(volatile=volatile):
                for name, param in member.named_parameters():
                    if "flat_param" in name:
                        continue
                    if not torch.equal(param, dict(plain.named_parameters())[inside + name]):
                        wrong.append(f"{name} differs")
                    with torch.no_grad():
                        param.copy_(other[inside + name])
                if member is model and differing_weights_of(model, other):
                    wrong.append("a change is not seen inside")
        wrong += differing_weights(model, plain if volatile else perceptron(2))
    return [f"{way}: {line}" for line in wrong]


def differing_weights_of(model: nn.Module, other: dict[str, torch.Tensor]) -> list[str]:
    named = dict(model.named_parameters())
    return [name for name, tensor in other.items() if name in named and not torch.equal(named[name], tensor)]


@pytest.mark.parametrize("way", WAYS)
def test_summoned_parameters_are_whole_and_changes_stay_unless_volatile(way):
    assert_on_ranks(summon, 2, way)


def summon_one_level() -> list[list[int]]:
    model = sharded(perceptron(), ["0", ""])
    with model.summon_full_params(recurse=False):
        return [list(local_tensor(p).shape) for p in (model[0].weight, model[2].weight)]


def test_without_recursion_units_inside_stay_sharded():
    for inner, outer in run_ranks(summon_one_level, 2):
        assert inner != [7, 5]
        assert outer == [3, 7]


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


def summon_inside_forward() -> list[str]:
    model = sharded(nn.Sequential(Summoner()), ["0", ""])
    model[0].outside = lambda: model
    with pytest.raises(RuntimeError, match="between steps"):
        model(noise(2, 3))
    model[0].outside = None
    model(noise(2, 3)).sum().backward()
    with model.summon_full_params(), pytest.raises(RuntimeError, match="another"), model.summon_full_params():
        pass
    return [] if all(p.grad is not None for p in model.parameters()) else ["no gradient"]


@pytest.mark.parametrize("world", [1, 2])
def test_summoning_in_a_forward_or_in_itself_is_an_error(world):
    assert_on_ranks(summon_inside_forward, world)


def summon_between_forward_and_backward() -> list[str]:
    plain = perceptron()
    model = sharded(plain, ["0", "2", ""])
    loss, expected = model(noise(2, 5)).sum(), plain(noise(2, 5)).sum()
    with model.summon_full_params(volatile=True):
        pass
    loss.backward()
    expected.backward()
    norm = model.clip_grad_norm_(1e9)
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    return [] if torch.allclose(norm, wanted) else [f"{norm} instead of {wanted}"]


def test_looking_at_parameters_between_forward_and_backward_changes_nothing():
    assert_on_ranks(summon_between_forward_and_backward, 2)


def accumulate_in_parts() -> list[str]:
    """Gradients kept inside `no_sync` are sent by the first backward outside; before that, there are none."""
    model, plain = sharded(perceptron(), ["0", "2", ""]), perceptron()
    with model.no_sync():
        model(noise(2, 5, seed=1)).sum().backward()
        model(noise(2, 5, seed=2)).sum().backward()
    wrong = [] if all(p.grad is None for p in model.parameters()) else ["gradients inside no_sync"]
    model(noise(2, 5, seed=3)).sum().backward()
    for seed in (1, 2, 3):
        plain(noise(2, 5, seed=seed)).sum().backward()
    norm = model.clip_grad_norm_(1e9)
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    return wrong if torch.allclose(norm, wanted) else [*wrong, f"{norm} instead of {wanted}"]


@pytest.mark.parametrize("world", [1, 2])
def test_no_sync_keeps_gradients_until_the_next_backward_outside(world):
    assert_on_ranks(accumulate_in_parts, world)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def drop_what_waits(how: str, reshard: bool) -> list[str]:
    """A micro-batch under `no_sync` is dropped, by `zero_grad`; then one step as if it had not been."""
    around = FullyShardedDataParallel if how == "of the wrapper" else nn.Identity
    units = ["0", "2"] if around is FullyShardedDataParallel else ["0", "2", ""]
    model, fresh = (sharded(perceptron(), units, reshard_after_forward=reshard) for _ in range(2))
    if around is FullyShardedDataParallel:
        model, fresh = around(model), around(fresh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.no_sync():
        model(noise(2, 5, seed=1)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"SGD.step\(\): gradients of '0.weight' .*no_sync.*model.zero_grad\(\)"):
        optimizer.step()
    wrong = [] if same(before, list(model.parameters())) else ["the refused step moved the weights"]
    if how == "of torch's class":  # As wrappers call it, which derive a class from the optimizer's.
        torch.optim.Optimizer.zero_grad(optimizer)
    else:
        (optimizer if how == "of the optimizer" else model).zero_grad()
    optimizer.step()  # There is nothing to step on, and nothing that waits.
    for each in (model, fresh):
        each(noise(2, 5, seed=3)).sum().backward()
    return wrong if same(gradients(model), gradients(fresh)) else [*wrong, "what was dropped came back"]


def drop_in_every_way() -> list[str]:
    ways = ("of the model", "of the wrapper", "of the optimizer", "of torch's class")
    return [f"{how}: {line}" for how in ways for reshard in (True, False) for line in drop_what_waits(how, reshard)]


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_wait_under_no_sync_are_not_stepped_over_and_can_be_dropped(world):
    assert_on_ranks(drop_in_every_way, world)


def clear_a_part(to_none: bool) -> list[str]:
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
    return differing_weights(model, plain)


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_clears_what_waits_of_its_own_parameters(world):
    for to_none in (True, False):
        assert_on_ranks(clear_a_part, world, to_none)


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


def freeze_what_waits(what: str, when: str, kwargs: dict[str, object]) -> list[str]:
    """What has a gradient from under `no_sync` is frozen; as in plain PyTorch, it keeps that for the step."""
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
    wrong = differing_grads(model, plain)
    for each in (model, plain):
        torch.optim.AdamW(each.parameters(), lr=0.1).step()
    wrong += differing_weights(model, plain)
    for each in (model, plain):
        each.zero_grad()
        each.requires_grad_(True)
        each(noise(2, 5, seed=3)).square().sum().backward()
    wrong += differing_grads(model, plain)
    return [f"{what}, {when}, {kwargs}: {line}" for line in wrong]


def freeze_in_every_way() -> list[str]:
    ways = itertools.product(FREEZE, ("between passes", "in a pass"), ({}, {"reshard_after_forward": False}))
    return [line for way in ways for line in freeze_what_waits(*way)]


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_frozen_keeps_the_gradient_that_waits(world):
    assert_on_ranks(freeze_in_every_way, world)


def freeze_a_flat_parameter() -> list[str]:
    plain = perceptron()
    model = sharded(plain, ["0", ""], flatten_parameters=True)
    for each in (model, plain):
        with getattr(each, "no_sync", contextlib.nullcontext)():
            each(noise(2, 5, seed=1)).sum().backward()
        for param in each[0].parameters():
            param.requires_grad_(False)
        each(noise(2, 5, seed=2)).sum().backward()
    return differing_grads(model, plain)


def test_a_flat_parameter_that_is_frozen_keeps_the_gradient_that_waits():
    assert_on_ranks(freeze_a_flat_parameter, 2)


def step_while_gathered(reshard: bool, fused: bool) -> list[str]:
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
        return [] if torch.allclose(model(noise(2, 5)), plain(noise(2, 5)), atol=1e-5) else ["old weights"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_while_units_are_kept_gathered_is_seen_by_the_next_forward(reshard, fused):
    assert_on_ranks(step_while_gathered, 2, reshard, fused)


def test_what_belongs_to_the_outermost_unit_is_refused_inside_and_says_where_to_call_it():
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
