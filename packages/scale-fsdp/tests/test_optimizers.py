"""Every optimizer of torch.optim: elementwise ones train the plain model's weights, the others refuse by name."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fsdp_beside import Beside, mean_square, noise, sharded
from fsdp_cases import ulps
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.shard import full_shape
from scale_core.testing import run_ranks
from scale_fsdp import full_optim_state_dict, shard_optim_state_dict

STEPS = 3
Params = Iterable[nn.Parameter]

# Settings of each optimizer that go through different code; `foreach` and the plain loop are both run for all of them.
ELEMENTWISE: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"lr": 0.01, "t0": 1.0, "weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}],
    "AdamW": [{"weight_decay": 0.1}, {"amsgrad": True}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [{"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"lr": 0.02}],
}
FUSED: dict[str, dict[str, Any]] = {"Adagrad": {}, "Adam": {}, "AdamW": {}, "SGD": {"momentum": 0.9}}
MUON = "Muon" if hasattr(torch.optim, "Muon") else "Adafactor"  # torch has it from 2.9 on.
REFUSED = [*dict.fromkeys(["Adafactor", "LBFGS", MUON, "SparseAdam"])]


class Model(nn.Module):
    """Matrices, vectors, a scalar and a tensor of three dimensions; prime sizes, so that shards end inside of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inward, self.outward = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.mix = nn.Parameter(torch.randn(2, 3, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,kij->bkj", self.outward(torch.tanh(self.inward(x))), self.mix) * self.scale


def matrices() -> nn.Sequential:
    """A model of matrices that are cut between rows: their pieces are matrices, which Muon takes for full ones."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def class_named(name: str) -> type[torch.optim.Optimizer]:
    cls: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return cls


def step(model: nn.Module, rank: int, number: int) -> Iterable[Tensor]:
    yield model(noise(4, 5, seed=100 * number + rank)).square().mean()


def makers() -> list[Callable[[Params], torch.optim.Optimizer]]:
    made = []
    for name, settings in ELEMENTWISE.items():
        for kwargs, foreach in itertools.product(settings, (False, True)):

            def make(params: Params, name: str = name, kwargs: Any = kwargs, foreach: bool = foreach) -> Any:
                return class_named(name)(params, foreach=foreach, **kwargs)

            make.__name__ = f"{name}({kwargs}, foreach={foreach})"
            made.append(make)
    return made


def train_unfused() -> list[str]:
    return Beside(Model(), ["inward", ""], step, steps=STEPS, both=makers()).differences()


def most_ulps_fused(name: str) -> float:
    """The largest distance of a weight from the plain model's, after steps that begin at equal weights and states.

    It is counted in units of the terms' sum as it would be if nothing canceled: |w| + lr (|momentum| + |gradient|).
    """
    plain, largest = Model(), 0.0
    model = sharded(plain, ["inward", ""])
    optimizer, plain_optimizer = (
        class_named(name)(each.parameters(), lr=0.01, fused=True, **FUSED[name]) for each in (model, plain)
    )
    for number in range(STEPS):
        plain.load_state_dict(model.state_dict())
        if number > 0:  # an optimizer that has made no step has no state
            full = full_optim_state_dict(model, optimizer, recipient_rank=None)
            assert full is not None
            plain_optimizer.load_state_dict(shard_optim_state_dict(full, plain, plain_optimizer))
        for each in (model, plain):
            for loss in step(each, 0, number):  # the same batch on every rank: the mean is the plain gradient
                loss.backward()
        apart, apart_optimizer = without_cancelling(plain, plain_optimizer)
        for each in (optimizer, plain_optimizer, apart_optimizer):
            each.step()
            each.zero_grad()
        weights, summed = model.state_dict(), apart.state_dict()
        for key, theirs in plain.state_dict().items():
            largest = max(largest, ulps(weights[key], theirs, summand=summed[key]))
    return largest


def without_cancelling(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Returns copies whose next step adds up the magnitudes of the terms that the originals' step adds up."""
    gradients = [p.grad for p in model.parameters()]
    model, optimizer = copy.deepcopy((model, optimizer))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is not None
        parameter.data.abs_()
        parameter.grad = -gradient.abs()
        for moment in optimizer.state[parameter].keys() & {"momentum_buffer", "exp_avg"}:
            optimizer.state[parameter][moment].abs_().neg_()
    return model, optimizer


def train_fused() -> dict[str, float]:
    return {name: most_ulps_fused(name) for name in FUSED}


def every_optimizer() -> list[str]:
    """The public optimizers of this torch."""
    return sorted(
        name
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    )


def test_each_optimizer_of_torch_is_either_elementwise_or_refused() -> None:
    assert set(every_optimizer()) <= {*ELEMENTWISE, *REFUSED}


@pytest.mark.composition("scale-fsdp", "torch.optim")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_elementwise_optimizers_train_the_weights_of_the_plain_model(world: int) -> None:
    assert not any(run_ranks(train_unfused, world))


@pytest.mark.parametrize("world", [2, 4])
def test_fused_optimizers_step_to_the_weights_of_the_plain_model_within_2_ulp(world: int) -> None:
    """The kernel takes a tensor in vectors and its rest one by one, which round differently; a shard ends elsewhere."""
    for distances in run_ranks(train_fused, world):
        assert all(distance <= 2 for distance in distances.values()), distances


def make_refused(name: str, params: Params) -> torch.optim.Optimizer:
    chosen = [param for param in params if param.numel() and (name != "Muon" or len(full_shape(param)) == 2)]
    return class_named(name)(chosen, lr=0.01)


def refuse(name: str, kwargs: dict[str, Any]) -> str:
    """The error of the first step; after it the model trains on with another optimizer, from what it was before."""
    plain = matrices()
    model = sharded(plain, ["0", ""], **kwargs)
    optimizer = make_refused(name, model.parameters())
    model(noise(3, 4)).square().mean().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step(lambda: torch.zeros(()))
    weights = model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in plain.state_dict().items())
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return str(caught.value)


def refuse_all() -> list[str]:
    messages = [refuse(name, {}) for name in ("Adafactor", MUON, "LBFGS", "SparseAdam")]
    return [*messages, refuse("Adafactor", {"flatten_parameters": True})]


def test_optimizers_that_need_more_than_a_piece_are_refused_by_name() -> None:
    for adafactor, muon, lbfgs, sparse, flat in run_ranks(refuse_all, 2):
        for name, message in (("Adafactor", adafactor), (MUON, muon), ("Adafactor", flat)):
            assert message.startswith(f"{name}.step(): its update of a parameter needs ")
            assert (
                f"Let scale-oss hand each full tensor to one rank for the step, OSS(model.parameters(), optim={name}"
            ) in message
            assert 'fully_shard(module, atom="parameter")' in message
            assert "[p for p in model.parameters() if p.numel()]" in message
        assert "of '0.weight' this rank has elements" in muon
        assert "of 'flat_param_0' this rank has elements" in flat
        assert "LBFGS.step(): it measures all parameters together" in lbfgs
        assert "SparseAdam.step(): it takes sparse gradients, and those of shards are dense" in sparse


def adafactor(params: Params) -> torch.optim.Optimizer:
    return make_refused("Adafactor", params)


def muon(params: Params) -> torch.optim.Optimizer:
    return make_refused(MUON, params)


def train_whole() -> list[str]:
    """Every parameter whole on one rank: what the error names as a way out."""
    kwargs = {"atom": "parameter"}
    wrong = Beside(Model(), ["inward", ""], step, steps=STEPS, both=[adafactor], kwargs=kwargs).differences()
    beside = Beside(matrices(), [""], mean_square(3, 4), steps=STEPS, both=[adafactor, muon], kwargs=kwargs)
    return wrong + beside.differences()


def test_whole_parameters_on_one_rank_train_as_the_plain_model_where_each_stands_by_itself() -> None:
    assert not any(run_ranks(train_whole, 2))


@pytest.mark.parametrize("name", REFUSED)
def test_a_world_of_one_has_every_parameter_whole(name: str) -> None:
    model = sharded(Model(), ["inward", ""])
    optimizer = make_refused(name, model.parameters())
    loss = next(iter(step(model, 0, 0)))
    loss.backward()
    if name == "SparseAdam":  # torch's own word: it wants sparse gradients.
        with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
            optimizer.step()
    else:
        optimizer.step(lambda: loss.detach())
