"""Buffers that a recomputation changes otherwise than the forward: an error and no wrong gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper
from scale_checkpoint.recompute.buffer_replay import Replay, standing_in
from scale_checkpoint.recompute.buffers import Changed
from scale_checkpoint_cases import differing


class Told(nn.Module):
    """Changes a buffer when an attribute says so, by assignment or in place, before it computes or after it."""

    def __init__(self, in_place: bool = False, late: bool = False) -> None:
        super().__init__()
        self.layer, self.changes, self.in_place, self.late = nn.Linear(3, 3), True, in_place, late
        self.register_buffer("scale", torch.ones(3))

    def change(self) -> None:
        if self.changes and self.in_place:
            self.scale.mul_(2)
        elif self.changes:
            self.scale = self.scale * 2

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.change()
        y = (self.layer(x) * self.scale.clone()).tanh().exp()
        if self.late:
            self.change()
        return y


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", ["recompute", "selective"])
def test_a_buffer_that_changes_in_one_of_the_two_alone_is_named(how: str, in_place: bool, late: bool) -> None:
    module = apply_checkpointing(Told(in_place, late), how)
    x = torch.randn(2, 3)
    module(x).sum().backward()
    loss, module.changes = module(x).sum(), False
    held = module.scale
    with pytest.raises(RuntimeError, match=r"of a Told has changed its buffer 'scale', which its .* has left alone"):
        loss.backward()
    assert module.scale is held
    module = apply_checkpointing(Told(in_place), how)
    module.changes = False
    loss, module.changes = module(x).sum(), True
    with pytest.raises(RuntimeError, match=r"of a Told has left alone its buffer 'scale', which its .* has changed"):
        loss.backward()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["recompute", "selective", ["addmm", "tanh"]])
def test_a_buffer_that_changes_in_both_is_as_in_the_plain_module(how: Any, late: bool) -> None:
    found = []
    for treatment in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Told(late=late), treatment)
        x = torch.randn(2, 3, requires_grad=True)
        losses = [module(x).sum() for _ in range(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([*losses, x.grad, *(p.grad for p in module.parameters()), module.scale])
    assert differing(found[1], found[0]) == []


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", ["recompute", "selective"])
def test_a_buffer_that_was_replaced_in_inference_mode_is_as_in_the_plain_module(how: str, known: bool) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return (y - self.mean).tanh().exp()

    found = []
    for treatment in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Mean(), treatment)
        x = torch.randn(2, 3, requires_grad=True)
        if known:
            module(x).sum().backward()
        with torch.inference_mode():
            module(x)
        assert module.mean.is_inference()
        loss = module(x).sum()
        loss.backward()
        found.append([loss, x.grad, *(p.grad for p in module.parameters()), module.mean])
    assert differing(found[1], found[0]) == []


class Grows(nn.Module):
    """A table that grows to the longest input, as those of rotary embeddings do."""

    def __init__(self, by_shape: bool) -> None:
        super().__init__()
        self.layer, self.length, self.by_shape = nn.Linear(3, 3), 0, by_shape
        self.register_buffer("table", torch.empty(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > (len(self.table) if self.by_shape else self.length):
            self.length = x.shape[1]
            self.table = torch.arange(1.0, self.length + 1)[:, None].cos()
        return (self.layer(x) * self.table[: x.shape[1]]).tanh()


def test_a_table_that_grows_looks_at_its_own_shape_or_has_grown_before() -> None:
    module = checkpoint_wrapper(Grows(by_shape=False))
    loss = module(torch.randn(2, 3, 3)).sum()
    with pytest.raises(RuntimeError) as raised:  # An empty table: what fails first is a product.
        loss.backward()
    assert any("has changed its buffer 'table'" in note for note in raised.value.__notes__)
    found = []
    for treatment in ("keep", "recompute"):
        torch.manual_seed(0)
        one, other = Grows(by_shape=True), Grows(by_shape=False)
        with torch.no_grad():
            other(torch.ones(1, 5, 3))
        model = nn.Sequential(*(apply_checkpointing(each, treatment) for each in (one, other)))
        for length in (2, 4, 3):
            model(torch.randn(2, length, 3)).sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert differing(found[1], found[0]) == []


def test_modules_hold_what_they_held_after_an_error_too() -> None:
    module = Told()
    held, before = module.scale, torch.zeros(3)
    changed = [Changed(module, "scale", before)]
    assert standing_in([module, nn.BatchNorm1d(2)], changed) == [] and len(standing_in([module], [])) == 1
    with pytest.raises(KeyError) as raised, Replay(changed, []):
        assert torch.equal(module.scale, before) and module.scale is not before
        raise KeyError("on the way")
    assert module.scale is held and "'scale'" in raised.value.__notes__[0]
    with Replay(changed, []):
        module.scale.add_(1)
    assert module.scale is held and torch.equal(before, torch.zeros(3))
