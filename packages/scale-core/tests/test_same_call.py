"""The error of calls that differ between ranks shows the first fact that differs, of however many there are."""

import pytest

from scale_core.comm.group import group_of
from scale_core.consistency.same_call import check_same_call

LAYERS = [f"layer {number}: (4, 6)" for number in range(50)]


def difference(name: str, signature: str) -> str:
    with pytest.raises(ValueError, match="about to do different things") as caught:
        check_same_call(name, signature, group_of())
    text = str(caught.value)
    start, end = "the ranks are about to do different things: ", ": make the same call on all"
    assert text.startswith(start) and text.endswith(end)
    return text.removeprefix(start).removesuffix(end)


@pytest.mark.ranks(2)
def test_the_first_fact_that_differs_is_shown() -> None:
    layers = list(LAYERS)
    if group_of().rank == 1:
        layers[30:32] = ["layer 30: (4, 7)", "layer 31: (4, 8)"]
    expected = "rank 0: divide: layer 30: (4, 6); rank 1: divide: layer 30: (4, 7)"
    assert difference("divide", "; ".join(layers)) == expected


@pytest.mark.ranks(2)
def test_a_rank_with_fewer_facts_has_nothing_further() -> None:
    layers = LAYERS[: 2 - group_of().rank]
    assert difference("divide", "; ".join(layers)) == "rank 0: divide: layer 1: (4, 6); rank 1: divide: nothing further"


@pytest.mark.ranks(2)
def test_names_of_calls_and_first_facts_are_shown_together() -> None:
    name = ("divide", "attend")[group_of().rank]
    assert difference(name, "; ".join(LAYERS)) == "rank 0: divide: layer 0: (4, 6); rank 1: attend: layer 0: (4, 6)"
