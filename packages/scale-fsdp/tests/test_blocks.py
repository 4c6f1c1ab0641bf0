"""blocks.py: the stated errors, the stated bytes, and nothing that is not finite gets lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scale_fsdp.transports.blocks import BlockFormat, dequantize, quantize

NAMES: tuple[Any, ...] = ("int8", "float8_e4m3", "int4")
LARGEST = {"int8": 127, "float8_e4m3": 448, "int4": 7}


def round_trip(values: Tensor, block_format: BlockFormat) -> Tensor:
    return dequantize(quantize(values, block_format), values.shape[1], block_format)


def bound(values: Tensor, block_format: BlockFormat) -> Tensor:
    """The module docstring's, in fp64, for each value [R, n]."""
    exact, size = values.double(), block_format.block_size
    amax = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in exact.split(size, dim=1)], dim=1)
    if block_format.dtype == "float8_e4m3":
        most = torch.maximum(exact.abs() / 17, amax / 458752)
    else:
        most = amax / {"int8": 254, "int4": 14}[block_format.dtype]
    most = most * (1 + 2**-14)
    return torch.where(amax < LARGEST[block_format.dtype] * 2.0**-126, exact.abs(), most)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    block_size=st.sampled_from([2, 4, 128]),
    rows=st.lists(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=7, max_size=7), min_size=1, max_size=3),
    exponent=st.integers(-150, 0),
)
def test_no_value_is_off_by_more_than_the_bound(
    name: Any, block_size: int, rows: list[list[float]], exponent: int
) -> None:
    values, block_format = torch.tensor(rows) * 2.0**exponent, BlockFormat(name, block_size)
    found = round_trip(values, block_format)
    assert bool(((found.double() - values.double()).abs() <= bound(values, block_format)).all())
    assert torch.equal(found, round_trip(values, block_format))


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_is_nearly_reached(name: Any) -> None:
    values, block_format = torch.randn(4, 10_000, generator=torch.Generator().manual_seed(0)), BlockFormat(name)
    share = (round_trip(values, block_format) - values).abs() / bound(values, block_format)
    assert 0.98 < share.max() <= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [0, 1, 7, 128, 129, 1000])
def test_a_message_has_the_bytes_of_the_formula(name: Any, numel: int) -> None:
    bits = 4 if name == "int4" else 8
    expected = -(-numel * bits // 8) + 4 * -(-numel // 128)
    assert quantize(torch.randn(3, numel), BlockFormat(name)).shape == (3, expected)
    assert BlockFormat(name).num_bytes(numel) == expected


@pytest.mark.parametrize("name", NAMES)
def test_multiples_of_a_scale_come_back_to_the_bit(name: Any) -> None:
    largest = {"int8": 127, "float8_e4m3": 448, "int4": 7}[name]
    block = torch.tensor([largest, -largest, 1, -3, 0, 2, -1, 4]) * 0.25
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        values = block.repeat(2, 3).to(dtype)[:, :21]
        message = quantize(values, BlockFormat(name, 8))
        assert torch.equal(dequantize(message, 21, BlockFormat(name, 8)), values.float())
        assert torch.equal(dequantize(message, 21, BlockFormat(name, 8), out=torch.empty_like(values)), values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_with_a_value_that_is_not_finite_is_nan(name: Any, bad: float) -> None:
    values = torch.ones(2, 20)
    values[1, 17] = bad
    found = round_trip(values, BlockFormat(name, 8))
    assert (
        found[1, 16:].isnan().all() and torch.equal(found[0], values[0]) and torch.equal(found[1, :16], values[1, :16])
    )


def test_rows_are_messages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5, 300)
    for name in NAMES:
        together = quantize(values, BlockFormat(name))
        with monkeypatch.context() as patch:
            patch.setattr("scale_fsdp.transports.blocks._PIECE_ELEMENTS", 700)
            assert torch.equal(quantize(values, BlockFormat(name)), together)
            found = dequantize(together, 300, BlockFormat(name))
        assert torch.equal(found, torch.cat([round_trip(row[None], BlockFormat(name)) for row in values]))


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        BlockFormat("int-8")  # type: ignore[arg-type]
    for size in (0, 3, -2, 1.5):
        with pytest.raises(ValueError, match="even block_size above 0"):
            BlockFormat("int8", size)  # type: ignore[arg-type]
