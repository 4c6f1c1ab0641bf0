"""Each skip has one end that stashes and one that pops, and the layout says where they are."""

from collections.abc import Generator
from typing import Any

import pytest
from torch import Tensor, nn

from scale_pipe import Namespace, skippable, stash, verify_skippables
from scale_pipe.skip.layout import Skip, inspect_skip_layout


def stashing(*names: str) -> nn.Module:
    return skippable(stash=names)(type("Stashing", (nn.Module,), {}))()


def popping(*names: str) -> nn.Module:
    return skippable(pop=names)(type("Popping", (nn.Module,), {}))()


def test_the_layout_names_crossing_skips_in_order_of_stashes() -> None:
    layers = [stashing("b", "a"), nn.ReLU(), popping("a"), stashing("c"), popping("c"), popping("b")]
    partitions = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:5]), nn.Sequential(layers[5])]
    assert inspect_skip_layout(partitions) == [Skip((None, "b"), 0, 2), Skip((None, "a"), 0, 1)]
    assert inspect_skip_layout([nn.Sequential(*layers)]) == []


def test_pairs_that_match_are_accepted_in_any_nesting() -> None:
    outer, inner = Namespace(), Namespace()
    first, second, third, fourth = stashing("x"), stashing("x"), popping("x"), popping("x")
    for layer, space in ((first, outer), (second, inner), (third, inner), (fourth, outer)):
        layer.isolate(space)  # type: ignore[operator]
    verify_skippables(nn.Sequential(first, nn.Sequential(second, nn.ReLU()), third, fourth))
    verify_skippables([nn.Sequential(stashing("y"), popping("y"))])


@pytest.mark.parametrize(
    "layers, problem",
    [
        ([stashing("x")], "no module declared 'x' as poppable but stashed by '0'"),
        ([popping("x")], "'0' declared 'x' as poppable but it was not stashed by a layer before it"),
        ([popping("x"), stashing("x")], "'0' declared 'x' as poppable but it was not stashed by a layer before it"),
        (
            [stashing("x"), stashing("x"), popping("x")],
            "'1' redeclared 'x' as stashable, after '0': isolate one",
        ),
        ([stashing("x"), popping("x"), popping("x")], "'2' redeclared 'x' as poppable, which '1' has popped by then"),
        (
            [skippable(["x"], ["x"])(type("Both", (nn.Module,), {}))()],
            "'0' declared 'x' both as",
        ),
    ],
)
def test_pairs_that_do_not_match_are_named(layers: list[nn.Module], problem: str) -> None:
    with pytest.raises(TypeError, match="one or more pairs of stash and pop do not match") as caught:
        verify_skippables(nn.Sequential(*layers))
    assert problem in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(stashing("a"), popping("b")))
    assert str(caught.value).count("\n  * ") == 2


class Yields(nn.Module):
    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("a", input)
        return input


def test_a_forward_that_nobody_follows_is_found() -> None:
    derived = type("Derived", (skippable(stash=["a"])(type("Base", (nn.Module,), {})),), {"forward": Yields.forward})
    for kind in (Yields, derived):
        with pytest.raises(
            TypeError, match=f"layer '0' has a forward that yields: write @skippable above class {kind.__name__}"
        ):
            verify_skippables(nn.Sequential(kind(), popping("a")))
    holder = nn.ReLU()
    holder.inner = Yields()
    verify_skippables(nn.Sequential(holder))  # Who calls it may take what it yields.
