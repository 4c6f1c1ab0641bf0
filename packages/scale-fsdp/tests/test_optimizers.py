"""Every optimizer of torch.optim: elementwise ones train the plain model's weights, the others refuse by name."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fsdp_parity import assert_trains_as_plain, noise, sharded
from torch import Tensor, nn

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.shard import full_shape
from scale_fsdp import ShardOptions, fully_shard

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


def test_each_optimizer_is_elementwise_or_refused() -> None:
    def every_optimizer() -> list[str]:
        """The public optimizers of this torch."""
        return sorted(
            name
            for name, cls in vars(torch.optim).items()
            if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
        )

    assert set(every_optimizer()) <= {*ELEMENTWISE, *REFUSED}


@pytest.mark.composition("scale-fsdp", "torch.optim")
@pytest.mark.ranks(1, 2, 3)
def test_elementwise_optimizers_train_as_the_plain_model() -> None:
    def makers() -> list[Callable[[Params], torch.optim.Optimizer]]:
        """All of them in one process, each in one of two ways on two ranks, and in the other on three."""
        made = []
        for number, (name, settings) in enumerate(ELEMENTWISE.items()):
            for kwargs, foreach in itertools.product(settings, (False, True)):
                if group_of().size > 1 and foreach == bool((number + group_of().size) % 2):
                    continue

                def make(params: Params, name: str = name, kwargs: Any = kwargs, foreach: bool = foreach) -> Any:
                    return class_named(name)(params, foreach=foreach, **kwargs)

                make.__name__ = f"{name}({kwargs}, foreach={foreach})"
                made.append(make)
        return made

    assert_trains_as_plain(Model(), ["inward", ""], step, steps=STEPS, optimizers=makers())


@pytest.mark.ranks(2, 4)
def test_fused_optimizers_train_the_weights_of_the_plain_model() -> None:
    """The kernel takes a tensor in vectors and its rest one by one, which round differently; a shard ends elsewhere."""
    for name, kwargs in FUSED.items():
        plain = Model().double()
        model = sharded(plain, ["inward", ""])
        optimizers = [class_named(name)(each.parameters(), lr=0.01, fused=True, **kwargs) for each in (model, plain)]
        for number in range(STEPS):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                # The same batch on every rank: the mean is the plain gradient.
                each(noise(4, 5, seed=number).double()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-10)


def make_refused(name: str, params: Params) -> torch.optim.Optimizer:
    chosen = [param for param in params if param.numel() and (name != "Muon" or len(full_shape(param)) == 2)]
    return class_named(name)(chosen, lr=0.01)


@pytest.mark.ranks(2)
def test_optimizers_that_need_full_tensors_are_refused() -> None:
    def refuse(name: str, kwargs: dict[str, Any]) -> str:
        """The error of the first step; after it the model trains on with another optimizer, from what it was before."""
        plain = matrices()
        model = sharded(plain, ["0", ""], **kwargs)
        optimizer = make_refused(name, model.parameters())
        model(noise(3, 4)).square().mean().backward()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step(lambda: torch.zeros(()))
        assert_equal(model, plain)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        return str(caught.value)

    if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
        muon = refuse("Muon", {})
        assert re.match(r"Muon\.step\(\): \w+ of '\d.weight' \[.*OSS\(model.parameters\(\), optim=", muon)
    lbfgs, sparse = [refuse(name, {}) for name in ("LBFGS", "SparseAdam")]
    assert re.match(r"LBFGS\.step\(\): cat of '\d\.\w+'", lbfgs)
    assert "SparseAdam.step(): it takes sparse gradients, but the gradient of '" in sparse


@pytest.mark.ranks(2)
def test_adafactor_trains_as_on_the_plain_model() -> None:
    """It divides by means of rows and columns."""
    plain = matrices().double()
    model = sharded(plain, ["0", ""])
    optimizers = [make_refused("Adafactor", each.parameters()) for each in (model, plain)]
    x = noise(4, 4).double()
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0.0, atol=1e-10)


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


@pytest.mark.ranks(2)
def test_copied_optimizers_of_complex_parameters_train_as_plain() -> None:
    """The first step of a copy runs on sharded tensors, and torch's optimizers call `view_as_real` there."""

    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.matrix = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128, generator=generator))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.matrix).abs().square()

    batch = noise(4, 5, seed=1).double()
    for name in ("Adam", "SGD", "RMSprop"):
        for foreach, atom in itertools.product((False, True), ("row", "element")):
            plain = Rotation()
            sharded_model = fully_shard(Rotation(), options=ShardOptions(atom=atom))
            pairs = []
            for model in (sharded_model, plain):
                optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=foreach)
                for _ in range(2):
                    for _ in range(2):
                        model(batch).mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    model, optimizer = copy.deepcopy((model, optimizer))
                model(batch).mean().backward()
                optimizer.step()
                pairs.append(model)
            states = [dict(model.state_dict()) for model in pairs]
            torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12, msg=f"{name}, {foreach}, {atom}")


@pytest.mark.ranks(2)
def test_a_complex_shard_is_seen_as_pairs() -> None:
    plain = nn.Parameter(torch.arange(15.0).view(5, 3) + 1j)
    for atom in ("row", "element"):
        module = nn.Module()
        module.weight = nn.Parameter(plain.detach().clone())
        weight = fully_shard(module, options=ShardOptions(atom=atom)).weight
        with torch.no_grad():
            pairs = torch.view_as_real(weight)
            assert torch.equal(pairs.full_tensor(), torch.view_as_real(plain))
            pairs.mul_(2)
        assert torch.equal(weight.full_tensor(), 2 * plain)
