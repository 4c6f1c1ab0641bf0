"""What is output over comes out as it went in; tensors once, objects that cannot travel not at all."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_pipe import SplitError, split
from scale_pipe.module_split.collected_outputs import add_collected, collecting, install_collectors
from scale_pipe.module_split.placeholder_tensor import PlaceholderTensor
from scale_pipe.module_split.stage_forward import StageModules
from scale_pipe.module_split.stage_io import (
    NotForwarded,
    pack_module_output,
    pack_stage_output,
    unpack_module_output,
    unpack_stage_input,
)

CPU = torch.device("cpu")


@dataclass
class Pair:
    left: Tensor
    right: list[Any]


def test_nested_arguments_come_out_as_they_went_in() -> None:
    x, y = torch.rand(2, 3), torch.arange(4)
    inputs = ((x, 1), {"pair": Pair(y, [x, "text", None])})
    call = ((x, (y, y * 2)), {"flag": True})
    output = pack_stage_output(inputs, call, (pack_module_output("wte", {"out": x}),))
    assert [tensor is one for tensor, one in zip(output.tensors, (x, y), strict=False)] == [True, True]
    assert len(output.tensors) == 3
    received = unpack_stage_input(output, CPU)
    assert received.inputs[0][0] is x and received.inputs[0][1] == 1
    pair = received.inputs[1]["pair"]
    assert type(pair) is Pair and pair.left is y and pair.right[0] is x and pair.right[1:] == ["text", None]
    assert (
        received.call[0][1][0] is y
        and torch.equal(received.call[0][1][1], y * 2)
        and received.call[1] == {"flag": True}
    )
    assert received.trail[0].name == "wte"
    assert unpack_module_output(received.trail[0], "stage 0", CPU)["out"].shape == (2, 3)


def test_the_layout_is_small_holds_no_values_and_is_pickled() -> None:
    x = torch.rand(100, 100)
    output = pack_stage_output(
        ((x,), {}), ((x, x + 1), {}), tuple(pack_module_output(f"h.{i}", (x + i, None)) for i in range(50))
    )
    content = pickle.dumps(output.layout)
    assert len(content) < 2500
    layout = pickle.loads(content)
    received = unpack_stage_input(type(output)(output.tensors, layout), CPU)
    assert received.inputs[0][0] is x and [returned.name for returned in received.trail] == [
        f"h.{i}" for i in range(50)
    ]


def test_an_output_comes_back_with_a_placeholder_for_each_tensor() -> None:
    x, y = torch.rand(2, 3), torch.rand(2, 3)
    packed = pickle.loads(pickle.dumps(pack_module_output("pair", (x, {"both": [y, x]}))))
    first, nested = unpack_module_output(packed, "stage 0", CPU)
    second, first_again = nested["both"]
    assert first is first_again and first is not second
    assert all(isinstance(tensor, PlaceholderTensor) and tensor.shape == (2, 3) for tensor in (first, second))


def test_objects_that_cannot_travel_are_the_next_stages_own() -> None:
    output = pack_stage_output(((), {}), ((object(), torch.rand, [1]), {"cache": object()}), ())
    received = unpack_stage_input(output, CPU)
    assert received.call == ((NotForwarded.VALUE, NotForwarded.VALUE, [1]), {"cache": NotForwarded.VALUE})
    assert pickle.loads(pickle.dumps(received.call)) == received.call


def test_inputs_not_passed_on_are_placeholders_later() -> None:
    image = PlaceholderTensor(torch.empty(2, 3, device="meta"), "the input 'image'", CPU)
    output = pack_stage_output(((image,), {}), ((torch.rand(2),), {}), ())
    assert len(output.tensors) == 1
    received = unpack_stage_input(output, CPU)
    again = unpack_stage_input(pack_stage_output(received.inputs, received.call, ()), CPU)
    for one in (received, again):
        assert isinstance(one.inputs[0][0], PlaceholderTensor) and one.inputs[0][0].shape == (2, 3)
        assert one.call[0][0] is output.tensors[0]


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


class Pretrained(nn.Module):
    """Stands for a model of transformers."""


def test_hooks_are_on_models_of_transformers_the_outer_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: list[nn.Module] = []
    inner, outer = Pretrained(), Pretrained()
    outer.inner, outer.layer = inner, nn.Linear(2, 2)
    hooks = SimpleNamespace(maybe_install_capturing_hooks=installed.append)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", hooks)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", SimpleNamespace(PreTrainedModel=Pretrained))
    install_collectors(nn.Sequential(outer, nn.ReLU()))
    assert installed == [outer, inner]


def test_what_one_stage_collects_another_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"logits": ["before"], "hidden": []}
    collector = SimpleNamespace(get=lambda: lists)
    monkeypatch.setitem(
        sys.modules, "transformers.utils.output_capturing", SimpleNamespace(_active_collector=collector)
    )
    with collecting() as added:
        lists["logits"] += ["first", "second"]
    assert added == {"logits": ["first", "second"]}
    add_collected(added)
    assert lists == {"logits": ["before", "first", "second", "first", "second"], "hidden": []}


def test_without_transformers_nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", SimpleNamespace())
    with collecting() as added:
        add_collected({"logits": [1]})
    assert added == {}
