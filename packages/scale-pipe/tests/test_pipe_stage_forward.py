"""The modules of a split module are the model's own, but for their calls while the stage runs."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_pipe import SplitError, split
from scale_pipe.module_split.stage_forward import StageModules

SEEN: dict[str, Any] = {}


class Looks(nn.Module):
    """Looks at its modules in all ways that a forward may."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.tail = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.ReLU()})
        self.unit = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.unit.register_forward_hook(lambda *args: None)
        self.nothing = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        SEEN["kinds"] = isinstance(self.first, nn.Linear), isinstance(self.tail["a"], nn.Linear)
        SEEN["sizes"] = self.first.in_features, self.tail["a"].weight.shape, len(self.unit), bool(self.unit)
        SEEN["names"] = [name for name, _ in self.named_modules()]
        SEEN["dtype"] = next(self.parameters()).dtype
        SEEN["parts"] = [type(part).__name__ for part in self.unit], self.unit[1].__class__.__name__
        self.unit.note = "set"  # type: ignore[assignment]
        for layer in self.tail.values():
            x = layer(x)
        y: Tensor = self.unit(x)
        return y


def test_a_forward_finds_its_modules_on_every_stage() -> None:
    model, x = Looks(), torch.ones(1, 2)
    expected = model(x)
    plain = dict(SEEN)
    output: Any = x
    for stage in split(model, ["tail.a", "unit"]):
        SEEN.clear()
        output = stage(output)
        assert {key: SEEN[key] for key in SEEN if key != "dtype"} == {key: plain[key] for key in SEEN if key != "dtype"}
        assert stage.nothing is None
    assert torch.equal(output, expected) and model.unit.note == "set"


def test_outside_of_a_run_the_parts_are_the_modules_themselves() -> None:
    model = Looks()
    first, second = split(model, ["unit"])
    parts = first._modules
    assert isinstance(parts, StageModules) and parts["first"] is model.first and parts.get("none", 3) == 3
    assert dict(parts.items())["first"] is next(iter(parts.values())) is first.first
    with pytest.raises(SplitError, match="'unit' is on stage 1, and was called here by itself"):
        first.unit(torch.ones(1, 3))
    kept = copy.deepcopy(second)
    assert type(kept._modules) is StageModules and kept.unit[0] is not model.unit[0]


def test_a_stage_is_freed_with_its_last_reference() -> None:
    model = Looks()
    stages = split(model, ["unit"])
    gone = weakref.ref(stages[0])
    gc.disable()
    try:
        stages[0](torch.ones(1, 2))
        del stages
        assert gone() is None
    finally:
        gc.enable()
