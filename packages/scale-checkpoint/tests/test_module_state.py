"""Modes, parameters and buffers of a recomputation: those of the forward, or an error where they are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper, disable_checkpointing
from scale_checkpoint.recompute.module_state import ModuleState, RestoredState
from scale_checkpoint.wrapper import is_checkpointed
from scale_checkpoint_cases import differing


def built() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return nn.Sequential(inner, nn.Tanh())


@pytest.mark.parametrize("how", ["recompute", "offload", ["addmm"]])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, nn.Parameter])
def test_a_functional_call_is_recomputed_with_its_own_state(how: Any, training: bool, kind: Any) -> None:
    found = []
    for setting in ("keep", how):
        model = built().train(training)
        apply_checkpointing(model[0], setting, min_bytes=0)
        torch.manual_seed(1)
        params = {name: kind(torch.randn_like(p)) for name, p in model.named_parameters()}
        buffers = {name: torch.rand_like(b.float()).to(b.dtype) for name, b in model.named_buffers()}
        loss = functional_call(model, (params, buffers), (torch.randn(3, 4),)).square().sum()
        loss.backward()  # By now the module holds its own parameters again.
        found.append([loss.detach(), *(p.grad for p in params.values()), *buffers.values(), *model.buffers()])
        assert all(p.grad is None for p in model.parameters())
    assert differing(found[1], found[0]) == []


def test_a_parameter_changed_before_the_backward_is_an_error() -> None:
    """In the plain module too, for a weight; a bias is not saved there, but here it is computed with once more."""
    for name in ("weight", "bias"):
        model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        loss = model(torch.randn(2, 4)).sum()
        with torch.no_grad():
            getattr(model[0], name).mul_(2)
        with pytest.raises(RuntimeError, match=rf"the parameter '{name}' \[4.*\] of a Linear was changed in place"):
            loss.backward()
        model(torch.randn(2, 4)).sum().backward()


def test_a_parameter_that_its_own_forward_clips_is_none() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-2, 2, 5))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return (x * self.weight).tanh().exp()

    model = checkpoint_wrapper(Clipped())
    model(torch.ones(5)).sum().backward()
    assert model.weight.grad is not None


def test_a_parameter_assigned_before_the_backward_is_not_used() -> None:
    found = []
    for wrap in (nn.Module.train, checkpoint_wrapper):
        model = wrap(built()[0])
        before = model[3].weight
        loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum()
        model[3].weight = after = nn.Parameter(torch.zeros(4, 8))
        loss.backward()
        assert after.grad is None and model[3].weight is after
        found.append([before.grad, *(p.grad for p in model.parameters())])
    assert differing(found[1], found[0]) == []


def test_a_changed_functional_parameter_is_an_error() -> None:
    for kind in (torch.Tensor.requires_grad_, nn.Parameter):
        model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        params = {name: kind(torch.randn_like(p)) for name, p in model.named_parameters()}
        loss = functional_call(model, params, (torch.randn(2, 4),)).sum()
        with torch.no_grad():
            params["0.bias"].mul_(2)
        with pytest.raises(RuntimeError, match=r"the parameter 'bias' \[4\] of a Linear was changed in place"):
            loss.backward()


def test_a_changed_buffer_is_an_error_an_assigned_one_restored() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("centre", torch.linspace(-1, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) - self.centre).tanh().exp()

    found = []
    for wrap in (nn.Module.train, checkpoint_wrapper):
        torch.manual_seed(0)
        model = wrap(Centred())
        loss = model(torch.ones(2, 4)).sum()
        model.centre = model.centre * 3
        loss.backward()
        found.append([*(p.grad for p in model.parameters()), model.centre])
    assert differing(found[1], found[0]) == []
    loss = model(torch.ones(2, 4)).sum()
    model.centre.mul_(3)  # A subtraction saves nothing, so the plain module would go on; here its value is gone.
    with pytest.raises(
        RuntimeError, match=r"the buffer 'centre' \[4\] of a Centred was changed in place .*assign a new"
    ):
        loss.backward()


def test_what_an_engine_has_let_go_of_is_left_to_the_engine() -> None:
    """A shard in the place of a gathered parameter: of another shape or, on one rank, of the same."""
    layer = nn.Linear(2, 2)
    state = ModuleState(layer, WeakKeyDictionary())
    state.finish()
    assert state.replaced() == [] and not RestoredState(state).is_needed
    whole = layer.weight
    shard = layer.weight = nn.Parameter(torch.zeros(1))
    assert state.replaced() == []
    with RestoredState(state):
        assert layer.weight is shard
    alike = layer.weight = nn.Parameter(torch.zeros(2, 2))
    assert [used[3] for used in state.replaced()] == [whole]
    with RestoredState(state):
        assert layer.weight is whole
    assert layer.weight is alike
    whole.untyped_storage().resize_(0)
    assert state.replaced() == []


def test_parts_are_recomputed_in_their_old_modes() -> None:
    layer, drop = nn.Linear(2, 2), nn.Dropout().eval()
    state = ModuleState(nn.ModuleList([layer, drop]), WeakKeyDictionary())
    state.finish()
    assert not RestoredState(state).is_needed
    layer.eval()
    restored = RestoredState(state)
    assert restored.is_needed
    with pytest.raises(KeyError), restored:
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
def test_a_model_is_recomputed_in_the_mode_of_its_forward(how: Any, training: bool) -> None:
    found = []
    for setting in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Doubles().train(training), setting)
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
def test_norms_in_eval_mode_use_the_statistics_of_the_forward(how: Any) -> None:
    """A teacher or a frozen norm: kernels of later forwards move its statistics, and no version tells of it."""
    found = []
    for setting in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Normed(), setting, min_bytes=0)
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


def test_statistics_loaded_before_the_backward_are_not_used() -> None:
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
def test_later_frozen_parameters_train_as_in_the_forward(change: Any, how: str) -> None:
    found = []
    for setting in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), setting)
        x = torch.randn(3, 4, requires_grad=True)
        change(module, lambda module=module, x=x: module(x).sum())
        found.append([x.grad, *(p.grad for p in module.parameters())])
    assert differing(found[1], found[0]) == []


def test_a_backward_recomputes_inside_disable_checkpointing() -> None:
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


class Changing(nn.Module):
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


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_first_written_by_a_later_call_is_named(in_place: bool) -> None:
    module = checkpoint_wrapper(Changing(in_place))
    x = torch.ones(2, 3, requires_grad=True)
    module.changes = False
    module(x).sum().backward()
    module.changes = True
    if not in_place:  # What was replaced is still there as it was.
        module(x).sum().backward()
        return
    with pytest.raises(RuntimeError, match=r"a Changing has changed its buffer 'scale' \[3\] after calls in which"):
        module(x)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", ["recompute", "selective"])
def test_a_buffer_that_changes_in_one_of_the_two_alone_is_named(how: str, in_place: bool, late: bool) -> None:
    module = apply_checkpointing(Changing(in_place, late), how)
    x = torch.randn(2, 3)
    module(x).sum().backward()
    loss, module.changes = module(x).sum(), False
    held = module.scale
    with pytest.raises(
        RuntimeError, match=r"of a Changing has changed its buffer 'scale', which its .* has left alone"
    ):
        loss.backward()
    assert module.scale is held
    module = apply_checkpointing(Changing(in_place), how)
    module.changes = False
    loss, module.changes = module(x).sum(), True
    with pytest.raises(
        RuntimeError, match=r"of a Changing has left alone its buffer 'scale', which its .* has changed"
    ):
        loss.backward()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["recompute", "selective", ["addmm", "tanh"]])
def test_a_buffer_that_changes_in_both_is_as_in_the_plain_module(how: Any, late: bool) -> None:
    found = []
    for setting in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Changing(late=late), setting)
        x = torch.randn(2, 3, requires_grad=True)
        losses = [module(x).sum() for _ in range(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([*losses, x.grad, *(p.grad for p in module.parameters()), module.scale])
    assert differing(found[1], found[0]) == []


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", ["recompute", "selective"])
def test_a_buffer_replaced_in_inference_mode_is_the_plain_one(how: str, known: bool) -> None:
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
    for setting in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Mean(), setting)
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


def test_a_table_that_grows_reads_its_shape_or_has_grown() -> None:
    module = checkpoint_wrapper(Grows(by_shape=False))
    loss = module(torch.randn(2, 3, 3)).sum()
    with pytest.raises(RuntimeError) as raised:  # An empty table: what fails first is a product.
        loss.backward()
    assert any("has changed its buffer 'table'" in note for note in raised.value.__notes__)
    found = []
    for setting in ("keep", "recompute"):
        torch.manual_seed(0)
        one, other = Grows(by_shape=True), Grows(by_shape=False)
        with torch.no_grad():
            other(torch.ones(1, 5, 3))
        model = nn.Sequential(*(apply_checkpointing(each, setting) for each in (one, other)))
        for length in (2, 4, 3):
            model(torch.randn(2, length, 3)).sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert differing(found[1], found[0]) == []


def test_modules_hold_what_they_held_after_an_error_too() -> None:
    module = Changing()
    both = nn.ModuleList([module, nn.BatchNorm1d(2)])
    untouched, state = (ModuleState(both, WeakKeyDictionary()) for _ in range(2))
    untouched.finish()
    assert untouched.unchanged == [(module, "scale")], "those of a norm count as changed"
    before = module.scale
    module.change()
    state.finish()
    held = module.scale
    assert state.unchanged == [] and held is not before
    with pytest.raises(KeyError) as raised, RestoredState(state):
        assert torch.equal(module.scale, before) and module.scale is not before
        raise KeyError("on the way")
    assert module.scale is held and "'scale'" in raised.value.__notes__[0]
    with RestoredState(state):
        module.scale.add_(1)
    assert module.scale is held and torch.equal(before, torch.ones(3))
