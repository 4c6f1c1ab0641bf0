"""validation.py: all that differs is listed, with both values."""

import pickle

import pytest
import torch

from scale_core.state.local_shard import LocalShard
from scale_core.state.validation import (
    Misfit,
    SavedTensor,
    StateDifferences,
    StateMismatch,
    compare_states,
    some_keys,
)


def test_states_of_the_same_names_match_in_any_order() -> None:
    assert not compare_states({"a": 1, "b": 2}, {"b": 3, "a": 4})


def test_missing_and_unexpected_names_are_told_together() -> None:
    assert str(compare_states({"a": 1, "b": 2}, {"a": 1, "c": 2})) == "1 missing in it: b; 1 unexpected in it: c"


def test_of_many_names_ten_are_told() -> None:
    assert some_keys([f"p{i}" for i in range(12)]) == "p0, p1, p2, p3, p4, p5, p6, p7, p8, p9 and 2 more"


def test_another_shape_or_dtype_is_told_with_both() -> None:
    saved = {"w": SavedTensor((4, 2), torch.float32)}
    for own in (torch.zeros(4, 2), LocalShard(torch.zeros(3), (4, 2), 0, 3)):
        assert not compare_states({"w": own}, saved)
    assert "w: the saved shape is (4, 2), expected (2, 4)" in str(compare_states({"w": torch.zeros(2, 4)}, saved))
    half = compare_states({"w": torch.zeros(4, 2, dtype=torch.float16)}, saved)
    assert str(half) == "1 of another dtype: w: the saved dtype is torch.float32, expected torch.float16"
    assert half.refusal().endswith("build the model in that dtype, or convert with cast=True")


def test_what_does_not_fit_for_another_reason_says_it() -> None:
    own = {"a": 1, "optim.groups 0": Misfit("the groups are others: build them as they were")}
    found = compare_states(own, {"a": 1})
    assert found.keys == {"optim.groups 0"}
    assert found.refusal() == "the groups are others: build them as they were"
    assert str(compare_states(own, {})) == "1 missing in it: a; the groups are others: build them as they were"


def test_unexpected_is_what_no_rank_expects() -> None:
    ranks = [compare_states({"a": 1, "c": 3}, saved := {"a": 1, "b": 2, "z": 3}), compare_states({"b": 2}, saved)]
    together = StateDifferences.of_ranks(ranks)
    assert (together.missing, together.unexpected) == (["c"], ["z"])


def test_the_error_keeps_what_differs_when_it_travels() -> None:
    error = StateMismatch("no", compare_states({"a": 1}, {}))
    again = pickle.loads(pickle.dumps(error))
    with pytest.raises(StateMismatch, match="no"):
        raise again
    assert again.differences.missing == ["a"]
