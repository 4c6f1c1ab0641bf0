import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from scale_snapshot.format.state_codec import decode, encode, tensor_keys


def round_trip(state: Any) -> Any:
    encoded = encode(state, "it")
    text = json.dumps(encoded.value, allow_nan=False)
    assert sorted(tensor_keys(json.loads(text))) == sorted(encoded.tensors)
    copies = {key: tensor.detach().cpu().clone() for key, tensor in encoded.tensors.items()}
    return decode(json.loads(text), copies.__getitem__)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        assert torch.equal(one, other)
    elif isinstance(one, numpy.ndarray):
        assert one.dtype == other.dtype
        assert numpy.array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    else:
        assert one == other


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.binary() | st.tuples(st.integers(), st.text())
states = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.frozensets(keys),
    max_leaves=12,
)


@given(states)
def test_nested_python_values_come_back_as_they_were(state: Any) -> None:
    assert_same(round_trip(state), state)


@pytest.mark.parametrize(
    "state",
    [
        {"__type__": "dict", "items": 3},
        {1: "a", "1": "b"},
        Counter({80: 1, 160: 2}),
        OrderedDict([("b", 1), ("a", (2,))]),
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {(1, 2): math.inf}),
        {"of": {1, 2, 3}},
        bytearray(b"\x00\xff"),
        torch.Size([2, 3]),
        [torch.bfloat16, torch.device("cuda", 1)],
        [numpy.float32(0.1), numpy.int64(2**60), numpy.bool_(True)],
        numpy.arange(6, dtype=numpy.uint32).reshape(2, 3).T,
        numpy.array(2.5),
        [
            torch.arange(4),
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.ones(2, requires_grad=True),
            torch.empty(0, 3),
        ],
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {1: torch.zeros(1), "1": torch.ones(1)},
    ],
    ids=lambda state: type(state).__name__,
)
def test_what_json_does_not_know_comes_back_as_it_was(state: Any) -> None:
    assert_same(round_trip(state), state)


Point = namedtuple("Point", "x y")  # noqa: PYI024  # As programs have them.


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"it\['a'\]\[1\]\['b'\]: a builtins.object can't be saved"),
        ({"at": Point(1, 2)}, r"it\['at'\]: a test_state_codec.Point can't be saved"),
        ({"f": print}, r"it\['f'\]: a builtins.builtin_function_or_method"),
        ({"m": torch.empty(2, device="meta")}, r"it\['m'\]: a torch.Tensor"),
        ({"s": torch.eye(2).to_sparse()}, r"it\['s'\]: a torch.Tensor"),
        (
            {"c": torch.empty(2, dtype=torch.bits8)},
            r"it\['c'\]: torch.bits8 can't be saved: convert it to one of BOOL",
        ),
        ({"n": numpy.array(["text"])}, r"it\['n'\]: a numpy.ndarray"),
        ({Point(1, 2): 1}, r"it\['a key'\]: a test_state_codec.Point"),
        ({"d": defaultdict(lambda: 1)}, r"it\['d'\]: a collections.defaultdict"),
    ],
)
def test_what_would_not_come_back_is_refused_by_its_path(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(state, "it")


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(ValueError, match="leave out what contains itself"):
        encode(state, "it")


def test_sets_have_one_order_on_all_ranks() -> None:
    assert encode({"b", "a", "c"}, "it") == encode({"c", "b", "a"}, "it")


@pytest.mark.parametrize(
    "value",
    [
        {"__type__": "os.system", "value": "echo"},
        {"__type__": "dtype", "value": "load"},
        {"__type__": "tuple"},
        {"__type__": "numpy", "dtype": "object", "value": 1},
        {"__type__": "tensor", "key": "missing"},
        {"__type__": ["list"]},
    ],
)
def test_what_is_no_encoded_value_is_refused_when_it_is_read(value: Any) -> None:
    with pytest.raises(ValueError, match="is not an encoded value"):
        decode(value, dict[str, Tensor]().__getitem__)
