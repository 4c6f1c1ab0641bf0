"""validation.py: the first entry that differs is named, with both values."""

import pytest
import torch

from scale_core.state.chunks import LocalShard
from scale_core.state.validation import SavedTensor, StateMismatch, check_alike, check_keys


def test_states_of_the_same_names_match_in_any_order() -> None:
    check_keys({"a": 1, "b": 2}, {"b": 3, "a": 4})


def test_a_missing_name_is_told_before_an_unexpected_one() -> None:
    with pytest.raises(StateMismatch, match=r"b is missing in it \(missing: b; unexpected: c\)"):
        check_keys({"a": 1, "b": 2}, {"a": 1, "c": 2})
    with pytest.raises(StateMismatch, match=r"c is unexpected in it \(missing: none; unexpected: c\)"):
        check_keys({"a": 1}, {"a": 1, "c": 2})


def test_of_many_names_ten_are_told() -> None:
    with pytest.raises(StateMismatch, match="missing: p0, p1, p2, p3, p4, p5, p6, p7, p8, p9 and 2 more;"):
        check_keys({f"p{i}": i for i in range(12)}, {})


def test_another_shape_or_dtype_is_refused_with_both() -> None:
    saved = SavedTensor((4, 2), torch.float32)
    check_alike("w", saved, torch.zeros(4, 2))
    check_alike("w", saved, LocalShard(torch.zeros(3), (4, 2), 0, 3))
    with pytest.raises(StateMismatch, match=r"w: the saved shape is \(4, 2\), expected \(2, 4\)"):
        check_alike("w", saved, torch.zeros(2, 4))
    with pytest.raises(StateMismatch, match=r"w: the saved dtype is torch\.float32, expected torch\.float16"):
        check_alike("w", saved, torch.zeros(4, 2, dtype=torch.float16))
