"""The methods and attributes that the inner optimizer has of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from scale_core.comm.group import group_of
from scale_oss import OSS, OSSOptions, ShardedDataParallel, split_by


class ScheduleFree(Optimizer):
    """Averages beside the iterates (arXiv 2405.15682); `train` and `eval` exchange the two in place."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0, "trains": True})
        self.warmup = 3

    def eval(self) -> None:
        self._exchange(False, lambda group: 1 - 1 / group["beta"])

    def train(self) -> None:
        self._exchange(True, lambda group: 1 - group["beta"])

    @torch.no_grad()
    def _exchange(self, trains: bool, weight_of: Any) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for param in group["params"]:
                    if "iterate" in self.state[param]:
                        param.lerp_(self.state[param]["iterate"], weight_of(group))
                group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"]
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    iterate = self.state[param].setdefault("iterate", param.clone())
                    param.lerp_(iterate, 1 / group["count"])
                    param.add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["count"]) - 1))
                    iterate.sub_(param.grad, alpha=group["lr"])


class SAM(Optimizer):
    """Sharpness-aware minimization (arXiv 2010.01412), which climbs by the norm of all gradients."""

    def __init__(self, params: Any, base: type[Optimizer] = SGD, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.rho_scale, self.history = 1.0, [0]

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["old"] = param.clone()
                    param.add_(param.grad * (self.rho_scale * group["rho"] / norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "old" in self.state[param]:
                    param.copy_(self.state[param]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("two steps")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def loss_of(model: nn.Module, plain: bool, step: int) -> Tensor:
    """The loss of this rank, or the mean of all ranks'."""
    ranks = range(group_of().size) if plain else [group_of().rank]
    loss: Tensor = torch.stack([model(data(rank, step)).square().mean() for rank in ranks]).mean()
    return loss


def wrap(model: nn.Module, optimizer: Any, kind: str) -> nn.Module:
    return ShardedDataParallel(model, optimizer) if kind == "sharded" else DistributedDataParallel(model)


@pytest.mark.ranks(2)
def test_modes_of_the_inner_optimizer_are_those_of_one_process() -> None:
    """Weights in both modes are those of one process, under each wrapper, cut or whole."""
    for kind in ("sharded", "ddp"):
        for elementwise in (True, False):
            plain = net()
            model = copy.deepcopy(plain)
            optimizer = OSS(
                model.parameters(), ScheduleFree, options=OSSOptions(elementwise=elementwise, bucket_numel=20)
            )
            wrapped, reference = wrap(model, optimizer, kind), ScheduleFree(plain.parameters())
            assert optimizer.warmup == 3 and hasattr(optimizer, "train") and not hasattr(optimizer, "first_step")
            for step in range(3):
                for outer, each, is_plain in ((wrapped, optimizer, False), (plain, reference, True)):
                    each.train()
                    loss_of(outer, is_plain, step).backward()
                    each.step()
                    each.zero_grad()
                    each.eval()
                with torch.no_grad():
                    torch.testing.assert_close(wrapped(data(0, 9)), plain(data(0, 9)), rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-9, atol=1e-12)
                for outer, each, is_plain in ((wrapped, optimizer, False), (plain, reference, True)):
                    loss_of(outer, is_plain, step + 5).backward()
                    each.train()  # Between a pass and its step.
                    each.step()
                    each.zero_grad()
            assert optimizer.param_groups[0]["trains"] and optimizer.param_groups[0]["count"] == 6


@pytest.mark.ranks(2)
def test_a_method_that_needs_all_tensors_runs_on_one_rank() -> None:
    """One rank has all tensors, so that their norm is right; gradients are cleared on all ranks."""
    for kind in ("sharded", "ddp"):
        for clears in (True, False):
            plain = net()
            model = copy.deepcopy(plain)
            optimizer = OSS(model.parameters(), SAM, options=OSSOptions(together=True), lr=0.1, momentum=0.5)
            wrapped, reference = wrap(model, optimizer, kind), SAM(plain.parameters(), lr=0.1, momentum=0.5)
            optimizer.rho_scale = reference.rho_scale = 2.0
            assert optimizer.optim.rho_scale == 2.0
            for step in range(3):
                for outer, each, is_plain in ((wrapped, optimizer, False), (plain, reference, True)):
                    loss_of(outer, is_plain, step).backward()
                    each.first_step(zero_grad=clears)
                    if not clears:
                        each.zero_grad()
                    loss_of(outer, is_plain, step).backward()
                    each.second_step(zero_grad=clears)
                    if not clears:
                        each.zero_grad()
                torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
def test_calls_that_would_see_parts_are_errors() -> None:
    """What would compute with a part is an error before anything changes, and names what to write."""
    model = net()
    optimizer = OSS(model.parameters(), SAM, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    loss_of(wrapped, False, 0).backward()
    before = [param.detach().clone() for param in model.parameters()]
    messages = []
    assert hasattr(optimizer, "first_step") and not hasattr(optimizer, "train")
    with pytest.raises(RuntimeError) as caught:
        optimizer.first_step()
    messages.append(str(caught.value))
    for name in ("base_optimizer", "history", "missing"):
        with pytest.raises(AttributeError) as absent:
            getattr(optimizer, name)
        messages.append(str(absent.value))
    together = OSS(net().parameters(), SAM, options=OSSOptions(together=True), lr=0.1)
    with pytest.raises(RuntimeError) as caught:
        together.first_step(lambda: None)
    messages.append(str(caught.value))
    optimizer.wait()
    assert all(map(torch.equal, model.parameters(), before))
    call, base, history, missing, closure = messages
    assert "SAM.first_step() is not supported" in call and "together=True" in call
    assert "read optimizer.optim.base_optimizer" in base and "read optimizer.optim.history" in history
    assert missing == "'OSS' object has no attribute 'missing'"
    assert "with a closure" in closure


@pytest.mark.ranks(2)
def test_a_pair_of_optimizers_passes_calls_on() -> None:
    """Of two optimizers those have the call that have the method."""
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2)).double()
    optimizer: Any = split_by(model, (ScheduleFree, {"lr": 0.1}), (SGD, {"lr": 0.1}))
    wrapped = ShardedDataParallel(model, optimizer.optimizers)
    assert hasattr(optimizer, "eval") and optimizer.warmup == 3 and not hasattr(optimizer, "first_step")
    wrapped(data(group_of().rank, 0)).square().mean().backward()
    optimizer.step()
    optimizer.eval()
    assert not optimizer.matrix.param_groups[0]["trains"]
