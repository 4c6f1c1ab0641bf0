"""Modules by their names, by their class and by a function."""

from __future__ import annotations

import pytest
from torch import nn

from scale_checkpoint import checkpoint_modules
from scale_checkpoint.recompute.forward import treated


def model() -> nn.Module:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
    whole = nn.Module()
    whole.layers, whole.head = layers, nn.Linear(2, 1)
    whole.tied = layers[0]
    return whole


def treated_names(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if treated(part) is not None]


def test_whole_names_match_and_a_module_of_two_names_is_wrapped_once() -> None:
    net = model()
    assert checkpoint_modules(net, [r"layers\.[02]", "tied"]) == ["layers.0", "layers.2"] == treated_names(net)


def test_a_function_says_what_is_done_with_each() -> None:
    net = model()
    how = {"layers.1": "offload", "head": ["addmm"], "layers.2": "keep"}
    assert checkpoint_modules(net, lambda name, module: how.get(name)) == ["layers.1", "layers.2", "head"]
    assert treated_names(net) == ["layers.1", "head"]
    offloaded, kept = treated(net.layers[1]), treated(net.head)
    assert offloaded is not None and not offloaded.treatment.recompute
    assert kept is not None and kept.treatment.keep is not None


def test_a_class_chooses_all_its_modules() -> None:
    net = model()
    assert (
        checkpoint_modules(net, nn.Linear) == ["layers.0.0", "layers.1.0", "layers.2.0", "head"] == treated_names(net)
    )
    with pytest.raises(ValueError, match="has no Conv1d that is called; it has Linear, Sequential, Tanh"):
        checkpoint_modules(net, nn.Conv1d)
    with pytest.raises(ValueError, match="has no ModuleList that is called"):
        checkpoint_modules(net, nn.ModuleList)
    with pytest.raises(TypeError, match=r"a class derived from torch\.nn\.Module"):
        checkpoint_modules(net, dict)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"layer\.\d+", r"matches the name of no module; near names in the model: 'layers\.0'"),
        ("layers", r"matches only 'layers', a ModuleList, which is never called: match what it holds, r'layers\\\."),
        ("xyz", r"the model has: 'layers', 'layers\.0'"),
        ("(", "is no regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_says_what_is_there(pattern: str, said: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=said):
        checkpoint_modules(net, ["head", pattern])
    assert treated_names(net) == []
    with pytest.raises(TypeError, match="got one string"):
        checkpoint_modules(net, pattern)


def test_nothing_is_changed_where_one_of_several_is_told_something_wrong() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"expected \"keep\", .* got 'drop'"):
        checkpoint_modules(net, lambda name, module: "drop" if name == "head" else "recompute")
    with pytest.raises(ValueError, match="'admm' is the name of no operator"):
        checkpoint_modules(net, [r"layers\.0"], ["admm"])
    assert treated_names(net) == []


def test_operators_that_can_be_read_once_are_those_of_all_modules() -> None:
    net = model()
    checkpoint_modules(net, [r"layers\.[01]"], (name for name in ("addmm", "tanh")))
    kept = [treated(layer).treatment.keep for layer in net.layers[:2]]
    assert kept[0] == kept[1] and repr(kept[1]) == "['addmm', 'tanh']"
