"""What may be wrapped, how often, and how it is taken back."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import apply_checkpointing, checkpoint_modules, checkpoint_wrapper
from scale_checkpoint.recompute.recompute import CheckpointedForward, get_forward
from scale_checkpoint.wrapper import is_checkpointed


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
        assert isinstance(apply_checkpointing(layer, how).forward, CheckpointedForward)
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
    for setting in (how, "keep"):
        assert torch.equal(apply_checkpointing(twin, setting, min_bytes=0)(x), 3 * expected)
    assert torch.equal(plain(x), 3 * expected) and torch.equal(module(x), expected)
    with pytest.raises(RuntimeError, match="shallow copy"):
        copy.copy(copy.deepcopy(module))(x)
    apply_checkpointing(module, "keep")
    assert not module._forward_pre_hooks and torch.equal(copy.copy(module)(x), expected)


def test_the_forward_has_the_plain_signature_and_docstring() -> None:
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
    assert isinstance(layer.forward, CheckpointedForward), "nothing is changed before all is known to be right"


def model() -> nn.Module:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
    whole = nn.Module()
    whole.layers, whole.head = layers, nn.Linear(2, 1)
    whole.tied = layers[0]
    return whole


def treated_names(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if get_forward(part) is not None]


def test_full_names_match_and_shared_modules_are_wrapped_once() -> None:
    net = model()
    assert checkpoint_modules(net, [r"layers\.[02]", "tied"]) == ["layers.0", "layers.2"] == treated_names(net)


def test_one_pattern_needs_no_list() -> None:
    net = model()
    assert checkpoint_modules(net, r"layers\.[02]") == ["layers.0", "layers.2"] == treated_names(net)


def test_a_function_says_what_is_done_with_each() -> None:
    net = model()
    how = {"layers.1": "offload", "head": ["addmm"], "layers.2": "keep"}
    assert checkpoint_modules(net, lambda name, module: how.get(name)) == ["layers.1", "layers.2", "head"]
    assert treated_names(net) == ["layers.1", "head"]
    offloaded, kept = get_forward(net.layers[1]), get_forward(net.head)
    assert offloaded is not None and not offloaded.config.recompute
    assert kept is not None and kept.config.keep is not None


def test_a_class_chooses_all_its_modules() -> None:
    net = model()
    assert (
        checkpoint_modules(net, nn.Linear) == ["layers.0.0", "layers.1.0", "layers.2.0", "head"] == treated_names(net)
    )
    with pytest.raises(ValueError, match="has no Conv1d that is called; it has Linear, Sequential, Tanh"):
        checkpoint_modules(net, nn.Conv1d)
    with pytest.raises(ValueError, match="has no ModuleList that is called"):
        checkpoint_modules(net, nn.ModuleList)
    with pytest.raises(ValueError, match="has no dict that is called"):
        checkpoint_modules(net, dict)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"layer\.\d+", r"matches the name of no module; did you mean 'layers\.0'"),
        ("layers", r"matches only 'layers', a ModuleList, which is never called: match what it holds, r'layers\\\."),
        ("xyz", r"there are 'layers', 'layers\.0'"),
        ("(", "is not a regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_says_what_is_there(pattern: str, said: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=said):
        checkpoint_modules(net, ["head", pattern])
    with pytest.raises(ValueError, match=said):
        checkpoint_modules(net, pattern)
    assert treated_names(net) == []


def test_a_wrong_argument_for_one_module_changes_none() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"expected \"keep\", .* got 'drop'"):
        checkpoint_modules(net, lambda name, module: "drop" if name == "head" else "recompute")
    with pytest.raises(ValueError, match="'admm' is the name of no operator"):
        checkpoint_modules(net, [r"layers\.0"], ["admm"])
    assert treated_names(net) == []


def test_an_iterator_of_operators_serves_all_modules() -> None:
    net = model()
    checkpoint_modules(net, [r"layers\.[01]"], (name for name in ("addmm", "tanh")))
    kept = [get_forward(layer).config.keep for layer in net.layers[:2]]
    assert kept[0] == kept[1] and repr(kept[1]) == "['addmm', 'tanh']"
