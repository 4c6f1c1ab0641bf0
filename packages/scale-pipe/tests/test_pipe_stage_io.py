"""What is output over comes out as it went in; tensors once, objects that cannot travel not at all."""

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scale_pipe.module_split.placeholder_tensor import PlaceholderTensor
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
