"""Placeholder tensors know what can be known without values, take nothing for it, and refuse the rest."""

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_pipe.module_split.placeholder_tensor import (
    PlaceholderTensor,
    PlaceholderTensorError,
    has_placeholder,
    resolve,
    to_meta,
    unresolved_placeholder,
)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def some(*shape: int, dtype: torch.dtype = torch.float32) -> PlaceholderTensor:
    return PlaceholderTensor(torch.empty(shape, dtype=dtype, device="meta"), "module 'wte' of stage 0", "cpu")


def test_operators_give_placeholders_of_shape_dtype_and_device() -> None:
    x = some(2, 3, 4)
    linear = nn.Linear(4, 5)
    for result, expected in (
        (x + torch.ones(4), torch.ones(2, 3, 4)),
        (torch.cat([x, torch.ones(1, 3, 4)]), torch.ones(3, 3, 4)),
        (x.view(-1, 4).t().to(torch.float64), torch.ones(4, 6, dtype=torch.float64)),
        (linear(F.layer_norm(x, (4,))), torch.ones(2, 3, 5)),
        (F.scaled_dot_product_attention(x, x, x), torch.ones(2, 3, 4)),
        (x[:, -1], torch.ones(2, 4)),
        (torch.empty_like(x), torch.ones(2, 3, 4)),
    ):
        assert isinstance(result, PlaceholderTensor) and result.origin == "module 'wte' of stage 0"
        assert result.shape == expected.shape and result.dtype == expected.dtype and result.device == expected.device
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    assert repr(x) == "PlaceholderTensor([2, 3, 4], torch.float32, from module 'wte' of stage 0)"


def test_no_random_numbers_are_drawn() -> None:
    before = torch.get_rng_state()
    dropped = F.dropout(some(2, 3), 0.5)
    assert isinstance(torch.rand_like(some(3)), PlaceholderTensor) and isinstance(dropped.normal_(), PlaceholderTensor)
    assert torch.equal(torch.get_rng_state(), before)


def test_writing_into_one_leaves_it_a_placeholder() -> None:
    x = some(2, 3)
    x += 1
    assert x.mul_(torch.ones(3)) is x and unresolved_placeholder([{"x": (x,)}]) is x


def test_what_is_filled_like_one_is_there() -> None:
    x = some(2, 3)
    assert torch.equal(torch.zeros_like(x), torch.zeros(2, 3))
    assert torch.equal(x.new_full((2,), 7), torch.full((2,), 7.0))
    assert torch.equal(torch.ones_like(x, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(2, 3).copy_(x),
        lambda x: torch.zeros(2, 3).add_(x),
        lambda x: x.unsqueeze_(0),
    ],
)
def test_what_needs_values_is_an_error_that_names_their_maker(reads: object) -> None:
    assert callable(reads)
    with pytest.raises(PlaceholderTensorError, match="from module 'wte' of stage 0"):
        reads(some(2, 3))


def test_a_resolved_placeholder_behaves_as_the_received_tensor() -> None:
    x, values = some(2, 3), torch.rand(2, 3, requires_grad=True)
    x.resolved = values
    result = torch.stack([x * 2, values]).sum()
    assert type(result) is Tensor and result.item() == pytest.approx(3 * values.sum().item())
    result.backward()
    assert values.grad is not None and torch.equal(values.grad, torch.full((2, 3), 3.0))
    assert x.requires_grad and unresolved_placeholder((x,)) is None and resolve({"x": [x]})["x"][0] is values
    other = x + some(2, 3)
    assert isinstance(other, PlaceholderTensor) and other.resolved is None


def test_trees_are_searched_for_them() -> None:
    x = some(2)
    for tree, found in (
        (x, True),
        (((1, "a"), {"key": [torch.ones(1), x]}), True),
        ({"output": SimpleNamespace(x=x)}, False),  # What nobody registered, and is no dataclass, is a leaf.
        (Output(torch.ones(1), x), True),
        ((torch.ones(1), nn.Parameter(torch.ones(1)), None), False),
    ):
        assert has_placeholder(tree) is found


def test_equal_shapes_are_one_object_and_keep_strides() -> None:
    x = torch.rand(3, 4).t()
    assert to_meta(x) is to_meta(torch.rand(3, 4).t()) and to_meta(x).stride() == (1, 4)
    assert to_meta(x) is not to_meta(torch.rand(4, 3)) and to_meta(x).is_meta
    assert len(pickle.dumps([to_meta(torch.rand(2, 2)) for _ in range(100)])) < 600


def test_it_is_copied_and_pickled() -> None:
    x = some(2, 3)
    for other in (copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x))):
        assert isinstance(other, PlaceholderTensor) and other.shape == (2, 3) and other.origin == x.origin
