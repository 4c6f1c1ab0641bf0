"""wide.py and tags.py: the dtype that sums are made in, and the tags of messages."""

from __future__ import annotations

import pytest
import torch

from scale_core.comm.collectives import UNIT_TAGS
from scale_tp.comm import accumulation_dtype, call_tag, to_accumulation_dtype


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.int64),
        (torch.complex64, torch.complex64),
    ],
)
def test_half_precision_is_widened_and_nothing_else(dtype: torch.dtype, expected: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert accumulation_dtype(dtype) == to_accumulation_dtype(tensor).dtype == expected
    assert (to_accumulation_dtype(tensor) is tensor) == (dtype == expected)


def test_tags_are_those_of_units_and_differ_where_a_word_does() -> None:
    words = ("sum", torch.float32, (2, 3))
    assert call_tag(*words) == call_tag("sum", torch.float32, (2, 3))
    assert call_tag(*words) in UNIT_TAGS
    assert len({call_tag("sum", torch.float32, (2, size)) for size in range(20)}) > 18
