"""What may be wrapped, how often, and how it is taken back."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper, is_checkpointed
from scale_checkpoint.recompute.forward import TreatedForward


def test_wrapped_twice_in_the_same_way_is_wrapped_once() -> None:
    layer = checkpoint_wrapper(nn.Linear(4, 4), keep=["addmm"])
    forward = layer.forward
    assert checkpoint_wrapper(layer, keep=["addmm"]).forward is forward
    with pytest.raises(ValueError, match=r'a Linear is checkpointed already.*apply_checkpointing\(module, "keep"\)'):
        checkpoint_wrapper(layer, offload_to_cpu=True)
    assert layer.forward is forward


def test_a_treatment_takes_the_place_of_another_and_goes_again() -> None:
    layer = nn.Linear(4, 4)
    for how in ("recompute", "offload", ["addmm"], lambda *_: True, "recompute"):
        assert isinstance(apply_checkpointing(layer, how).forward, TreatedForward)
    assert "forward" not in vars(apply_checkpointing(layer, "keep"))
    apply_checkpointing(layer, "keep")


@pytest.mark.parametrize("how", ["recompute", "offload", ["addmm"]])
def test_a_shallow_copy_runs_no_forward_of_another_module(how: Any) -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    x = torch.ones(1, 2)
    module = apply_checkpointing(Scaled(2, 2), how, min_bytes=0)
    expected = module(x).detach()
    twin = copy.copy(module)
    twin.scale = 3.0
    with pytest.raises(
        RuntimeError, match=r"this Scaled is a shallow copy .* copy\.deepcopy, .*DistributedDataParallel"
    ):
        twin(x)
    assert not is_checkpointed(twin)
    plain = apply_checkpointing(copy.copy(twin), "keep")
    for treatment in (how, "keep"):
        assert torch.equal(apply_checkpointing(twin, treatment, min_bytes=0)(x), 3 * expected)
    assert torch.equal(plain(x), 3 * expected) and torch.equal(module(x), expected)
    with pytest.raises(RuntimeError, match="shallow copy"):
        copy.copy(copy.deepcopy(module))(x)
    apply_checkpointing(module, "keep")
    assert not module._forward_pre_hooks and torch.equal(copy.copy(module)(x), expected)


def test_the_forward_has_the_signature_and_the_words_of_the_plain_one() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            """Attends."""
            return x

    module = checkpoint_wrapper(Attends())
    assert inspect.signature(module.forward) == inspect.signature(Attends().forward)
    assert "keep" not in vars(module) and not hasattr(module.forward, "anything")


def test_wrong_modules_and_words_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got a Tensor"):
        checkpoint_wrapper(torch.ones(2))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="a ModuleList is never called"):
        checkpoint_wrapper(nn.ModuleList())
    with pytest.raises(
        ValueError, match='expected "keep", "recompute", "offload", "selective" or operators, got \'drop\''
    ):
        apply_checkpointing(nn.Tanh(), "drop")
    layer = checkpoint_wrapper(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'admm' is the name of no operator"):
        apply_checkpointing(layer, ["admm"])
    assert isinstance(layer.forward, TreatedForward), "nothing is changed before all is known to be right"
