"""Outputs of micro-batches are put together, and what does not go together is said by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from scale_pipe.microbatch import gather


def rows(number: int, width: int = 2) -> Tensor:
    return torch.arange(float(number * width)).view(number, width)


@pytest.mark.parametrize(
    "outputs, message",
    [
        ([torch.tensor(1.0)] * 2, "the output is a tensor without dimensions for each of 2 micro-batches"),
        ([(rows(1), 1), (rows(1), 2)], r"output\[1\] is no tensor and differs between micro-batches: 1 for 0, 2 for 1"),
        ([(rows(1), None), (rows(1),)], r"micro-batches 0 and 1 differ at output\[1\]"),
        ([{"a": rows(1)}, {"b": rows(1)}], r"differ at output\['a'\]"),
        ([rows(1, 2), rows(1, 3)], r"of micro-batch 0 is \[1, 2\] float32, and of micro-batch 1 \[1, 3\] float32"),
        ([[rows(1)], [rows(1).double()]], r"output\[0\] .* \[1, 2\] float32, and .* \[1, 2\] float64"),
        ([[rows(1)], [1]], r"output\[0\] is a Tensor for micro-batch 0, and a int for 1"),
    ],
)
def test_outputs_that_do_not_go_together_are_named(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs)


def test_one_output_in_two_places_has_to_be_one_in_all_micro_batches() -> None:
    x, y = rows(1), rows(2)
    joined = gather([(x, x), (y, y)])
    assert joined[0] is joined[1] and torch.equal(joined[0], torch.cat([x, y]))
    with pytest.raises(ValueError, match="is one tensor with another output for micro-batch 0"):
        gather([(x, x), (y, y.clone())])


def test_what_is_no_number_in_all_outputs_is_the_same() -> None:
    assert str(gather([(torch.ones(1), float("nan"))] * 2 + [(torch.ones(1), float("nan"))])[1]) == "nan"
    with pytest.raises(ValueError, match=r"output\[1\] is no tensor and differs between micro-batches: nan for 0, 1.0"):
        gather([(torch.ones(1), float("nan")), (torch.ones(1), 1.0)])
