"""A model that is set to another mode between its forward and its backward, as to be evaluated on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import apply_checkpointing, disable_checkpointing, is_checkpointed
from scale_checkpoint.recompute.recompute import changed_since, modes_of, restored
from scale_checkpoint_cases import differing


def test_parts_are_in_the_modes_of_then_and_afterwards_in_those_of_now() -> None:
    layer, drop = nn.Linear(2, 2), nn.Dropout().eval()
    modes = modes_of([layer, drop])
    assert changed_since(modes) == []
    layer.eval()
    changed = changed_since(modes)
    assert changed == [(layer, True)]
    with pytest.raises(KeyError), restored(changed):
        assert layer.training and not drop.training
        raise KeyError
    assert not layer.training and not drop.training


class Doubles(nn.Module):
    """What it saves has one shape in both modes, so that nobody would notice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.layer(x)))
        return (y * 2 if self.training else y).tanh().exp()


@pytest.mark.parametrize("how", ["recompute", "selective", ["addmm", "tanh"]])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_is_set_to_the_other_mode_before_the_backward_is_computed_again_in_its_own(
    how: Any, training: bool
) -> None:
    found = []
    for treatment in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Doubles().train(training), treatment)
        x = torch.randn(5, 4, requires_grad=True)
        loss = module(x).sum()
        module.train(not training)
        loss.backward()
        assert all(part.training is not training for part in module.modules())
        found.append([x.grad, *(p.grad for p in module.parameters()), *module.buffers(), torch.rand(2)])
    assert differing(found[1], found[0]) == []


class Normed(nn.Module):
    """Norms over [n, 4, k] that keep statistics, between layers that autograd comes back to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.batch = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.instance(self.batch(self.first(x)).tanh()).sigmoid()).tanh()
        return y


@pytest.mark.parametrize("how", ["recompute", "offload", "selective", ["addmm", "native_batch_norm"]])
def test_norms_that_ran_in_eval_mode_compute_with_the_statistics_of_then(how: Any) -> None:
    """A teacher or a frozen norm: kernels of later forwards move its statistics, and no version tells of it."""
    found = []
    for treatment in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Normed(), treatment, min_bytes=0)
        x, grads = torch.randn(3, 4, 6, requires_grad=True), []
        for order in ("eval, train", "train, eval", "eval, train, eval"):
            losses = []
            for mode in order.split(", "):
                module.train(mode == "train")
                losses.append(module(x * (1 + len(losses))).square().sum())
            losses[0].backward(retain_graph=True)
            torch.stack(losses).sum().backward()
            grads += [param.grad.clone() for param in module.parameters()]
        found.append([x.grad, *grads, *module.buffers()])
    assert differing(found[1], found[0]) == []


def test_statistics_that_were_loaded_before_the_backward_make_no_difference_to_it() -> None:
    """The plain module's backward is an error then, where nothing is offloaded."""
    found = []
    for load in (False, True):
        torch.manual_seed(0)
        module = apply_checkpointing(Normed(), "recompute").eval()
        loss = module(torch.randn(3, 4, 6)).square().sum()
        if load:
            module.batch.running_mean.fill_(3.0)
            module.instance.running_var.fill_(3.0)
        loss.backward()
        assert load is bool((module.batch.running_mean == 3.0).all())
        found.append([param.grad for param in module.parameters()])
    assert differing(found[1], found[0]) == []


def frozen(module: nn.Module, step: Callable[[], Tensor]) -> None:
    loss = step()
    module.requires_grad_(False)  # As the discriminator of a GAN.
    loss.backward()
    assert not any(p.requires_grad for p in module.parameters())


def thawed(module: nn.Module, step: Callable[[], Tensor]) -> None:
    module.requires_grad_(False)
    loss = step()
    module.requires_grad_()
    loss.backward()
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("change", [frozen, thawed])
@pytest.mark.parametrize("how", ["recompute", "selective"])
def test_parameters_that_are_frozen_or_thawed_before_the_backward_are_as_in_the_forward(change: Any, how: str) -> None:
    found = []
    for treatment in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), treatment)
        x = torch.randn(3, 4, requires_grad=True)
        change(module, lambda module=module, x=x: module(x).sum())
        found.append([x.grad, *(p.grad for p in module.parameters())])
    assert differing(found[1], found[0]) == []


def test_a_backward_inside_of_disable_checkpointing_computes_again_what_the_forward_has_left_to_it() -> None:
    found = []
    for how in ("keep", "recompute"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), apply_checkpointing(nn.Tanh(), how), nn.Linear(4, 4), nn.Tanh())
        apply_checkpointing(module, how)
        x = torch.randn(3, 4, requires_grad=True)
        loss = module(x).sum()
        with disable_checkpointing():
            loss.backward()
        found.append([x.grad, *(p.grad for p in module.parameters())])
    assert differing(found[1], found[0]) == [] and is_checkpointed(module[1])
