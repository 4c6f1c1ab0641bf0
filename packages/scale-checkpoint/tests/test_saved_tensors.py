"""Saved tensors that are changed in place: an error, as it is where no hooks stand between autograd and them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper, offload_activations
from scale_checkpoint.offload.offload import _OffloadableTensor
from scale_checkpoint.offload.store import shares_version_counter, version_counter

LARGE = 1 << 40  # Nothing leaves.


def test_a_version_counter_is_shared_by_views_without_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    counter = version_counter(base[1:])
    assert counter.untyped_storage().nbytes() == 0
    assert shares_version_counter(base, counter) and shares_version_counter(base.t().detach(), counter)
    assert not shares_version_counter(base.data, counter) and not shares_version_counter(base.clone(), counter)
    first, second = base.unsafe_chunk(2, 1)  # As recurrent layers cut the gates of one storage.
    assert shares_version_counter(first[0], version_counter(first)) and not shares_version_counter(
        second, version_counter(first)
    )
    assert base._version == 0, "asking changes no version"


def test_what_has_stayed_is_given_back_until_it_is_changed() -> None:
    base = torch.ones(2, 3, requires_grad=True)
    stayed = _OffloadableTensor(base[0])
    assert stayed.unpack().data_ptr() == base.data_ptr() and not stayed.unpack().requires_grad
    with torch.no_grad():
        base[1] = 2.0
    with pytest.raises(
        RuntimeError, match=r"a tensor \[3\] that autograd has saved .* modified by an inplace operation"
    ):
        stayed.unpack()


class Overwrites(nn.Module):
    """Writes into a result that autograd has saved, and saves more after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).exp()
        y.mul_(2)
        return y.sin()


@pytest.mark.parametrize("min_bytes", [0, LARGE])
@pytest.mark.parametrize("how", ["keep", "recompute", "offload", "selective", ["exp"]])
def test_a_forward_that_overwrites_saved_tensors_is_an_error(how: Any, min_bytes: int) -> None:
    module = apply_checkpointing(Overwrites(), how, offload_inputs=True, min_bytes=min_bytes)
    loss = module(torch.randn(2, 4)).sum()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_the_error_names_the_module_and_nothing_of_it_stays() -> None:
    module = checkpoint_wrapper(Overwrites())
    loss = module(torch.randn(2, 4)).sum()
    with pytest.raises(RuntimeError, match=r"the forward of a Overwrites, .* modifies a tensor \[2, 4\] by an inplace"):
        loss.backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("how", ["recompute", "offload", "selective"])
def test_an_input_changed_before_the_backward_is_noticed(how: str) -> None:
    expected = None
    for setting, min_bytes in (("keep", 0), (how, 0), (how, LARGE)):
        torch.manual_seed(0)
        module = apply_checkpointing(nn.Linear(4, 4), setting, offload_inputs=True, min_bytes=min_bytes)
        x = torch.randn(2, 4)
        module(x).sum().backward()
        expected = module.weight.grad if expected is None else expected
        module.zero_grad()
        loss = module(x).sum()
        x.mul_(2)
        if setting != "keep" and min_bytes == 0:
            loss.backward()  # What has left is as it was.
            assert torch.equal(module.weight.grad, expected)
        else:
            with pytest.raises(RuntimeError, match="inplace operation"):
                loss.backward()


def test_what_nobody_comes_back_to_may_be_changed() -> None:
    layer = nn.Linear(4, 4)
    x, y = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)
    with offload_activations(layer):
        one, other = layer(x).sum(), y.exp().sum()
    x.mul_(2)
    other.backward()
    assert torch.equal(y.grad, y.exp()) and one.requires_grad


@pytest.mark.parametrize("how", ["recompute", "offload", "selective"])
def test_of_two_saved_versions_the_later_one_is_right(how: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, scale = self.layer(x), torch.ones(4)
            early = y * scale
            scale.mul_(3)
            return early, y * scale

    found = []
    for setting in ("keep", how):
        torch.manual_seed(0)
        module = apply_checkpointing(Twice(), setting)
        _, late = module(torch.randn(2, 4))
        late.sum().backward()
        found.append(module.layer.weight.grad)
        early, late = module(torch.randn(2, 4))
        with pytest.raises(RuntimeError, match="inplace operation"):
            (early + late).sum().backward()
    assert torch.equal(*found)


class Reuses(torch.autograd.Function):
    """Doubles; its backward takes what it has saved for its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            x.zero_()
        return gradient * 2


class Overlaps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        return y.square() + Reuses.apply(y)


def test_a_backward_that_writes_into_saved_tensors_is_noticed() -> None:
    for how in ("keep", "recompute", "selective"):
        x = torch.randn(3, 4, requires_grad=True)
        loss = apply_checkpointing(Overlaps(), how)(x).sum()
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
    x = torch.randn(3, 4, requires_grad=True)
    module = apply_checkpointing(Overlaps(), "offload", min_bytes=0)
    module(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() + 2), "what has left is fetched once more"


class ReadsAgain(torch.autograd.Function):
    """Reads what it has saved twice, and notes when it is gone."""

    gone: list[str]

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        for saved in ctx.saved_tensors:
            weakref.finalize(saved.untyped_storage(), ReadsAgain.gone.append, "saved")
        found = gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]
        ReadsAgain.gone.append("read")
        return found


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ReadsAgain.apply(Next.apply(x).sin(), x.exp())


class Next(torch.autograd.Function):
    """Notes when its backward begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ReadsAgain.gone.append("next")
        return gradient


def test_saved_tensors_can_be_read_twice_and_go_with_the_node() -> None:
    for how in ("recompute", "selective"):
        module, x, found = apply_checkpointing(Product(), how), torch.randn(3, requires_grad=True), []
        for runs in (Product(), module):
            ReadsAgain.gone = []
            loss = runs(x).sum()
            (gradient,) = torch.autograd.grad(loss, x)
            found.append((gradient, ReadsAgain.gone))
        assert torch.equal(found[0][0], found[1][0])
        assert found[1][1].count("saved") == 2 and found[1][1][-1] == "next", "nothing outlives the node"
        loss = module(x).sum()
        for _ in range(2):  # Over a graph that is retained it is computed anew.
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert torch.equal(gradient, found[0][0])
