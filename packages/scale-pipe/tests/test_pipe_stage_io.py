"""What is handed over comes out as it went in; tensors once, objects that cannot travel not at all."""

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scale_pipe.module_split.placeholder_tensor import Absent, absent, shape_of
from scale_pipe.module_split.stage_io import Local, Returned, hand_over, open_handed

CPU = torch.device("cpu")


@dataclass
class Pair:
    left: Tensor
    right: list[Any]


def test_nested_arguments_come_out_as_they_went_in_and_each_tensor_travels_once() -> None:
    x, y = torch.rand(2, 3), torch.arange(4)
    inputs = ((x, 1), {"pair": Pair(y, [x, "text", None])})
    call = ((x, (y, y * 2)), {"flag": True})
    handed = hand_over(inputs, call, (Returned("wte", {"out": shape_of(x)}),))
    assert [tensor is one for tensor, one in zip(handed.tensors, (x, y), strict=False)] == [True, True]
    assert len(handed.tensors) == 3
    opened = open_handed(handed, CPU)
    assert opened.inputs[0][0] is x and opened.inputs[0][1] == 1
    pair = opened.inputs[1]["pair"]
    assert type(pair) is Pair and pair.left is y and pair.right[0] is x and pair.right[1:] == ["text", None]
    assert opened.call[0][1][0] is y and torch.equal(opened.call[0][1][1], y * 2) and opened.call[1] == {"flag": True}
    assert opened.trail[0].name == "wte" and opened.trail[0].shapes["out"].shape == (2, 3)


def test_the_layout_is_small_holds_no_values_and_is_pickled() -> None:
    x = torch.rand(100, 100)
    handed = hand_over(((x,), {}), ((x, x + 1), {}), tuple(Returned(f"h.{i}", (shape_of(x), None)) for i in range(50)))
    content = pickle.dumps(handed.layout)
    assert len(content) < 2500
    layout = pickle.loads(content)
    opened = open_handed(type(handed)(handed.tensors, layout), CPU)
    assert opened.inputs[0][0] is x and [returned.name for returned in opened.trail] == [f"h.{i}" for i in range(50)]


def test_objects_that_cannot_travel_are_the_next_stages_own() -> None:
    handed = hand_over(((), {}), ((object(), torch.rand, [1]), {"cache": object()}), ())
    opened = open_handed(handed, CPU)
    assert opened.call == ((Local.VALUE, Local.VALUE, [1]), {"cache": Local.VALUE})
    assert pickle.loads(pickle.dumps(opened.call)) == opened.call


def test_inputs_that_are_not_passed_on_are_absent_on_all_later_stages() -> None:
    image = absent(torch.empty(2, 3, device="meta"), "the input 'image'", CPU)
    handed = hand_over(((image,), {}), ((torch.rand(2),), {}), ())
    assert len(handed.tensors) == 1
    opened = open_handed(handed, CPU)
    again = open_handed(hand_over(opened.inputs, opened.call, ()), CPU)
    for one in (opened, again):
        assert isinstance(one.inputs[0][0], Absent) and one.inputs[0][0].shape == (2, 3)
        assert one.call[0][0] is handed.tensors[0]
