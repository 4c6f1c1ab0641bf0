"""Layers stash and pop without a pipeline too, and a layer that does not do what it declares is told so."""

import copy
import gc
import pickle
import traceback
import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import checkpoint_wrapper
from scale_pipe import Namespace, pop, skippable, stash, verify_skippables
from scale_pipe.skip.layout import Skip, inspect_skip_layout
from scale_pipe.skip.namespace import popped_keys, stashed_keys
from scale_pipe.skip.portal import Portals
from scale_pipe.skip.tracker import SkipTracker, current_skip_tracker, run_with_skips, use_skip_tracker

Commands = Generator[Any, Any, Any]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super(Stash, self).__init__()  # noqa: UP008  # The old way has to work as well.
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, input: Tensor) -> Commands:
        yield stash("skip", input)
        return input * self.weight * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input: Tensor) -> Commands:
        skip = yield pop("skip")
        return input if skip is None else input + skip


@skippable(stash=["skip"])
class StashNone(nn.Module):
    def forward(self, input: Tensor) -> Commands:
        yield stash("skip", None)
        return input


def test_a_sequence_of_skippable_layers_works_by_itself() -> None:
    model = nn.Sequential(Stash(), nn.Tanh(), Pop())
    x = torch.randn(3, 2, requires_grad=True)
    output = model(x)
    assert torch.equal(output, torch.tanh(x * 2) + x)
    output.sum().backward()
    expected = 1 + 2 * (1 - torch.tanh(2 * x) ** 2)
    assert x.grad is not None and torch.allclose(x.grad, expected)


def test_a_tracker_holds_what_is_stashed_until_it_is_popped() -> None:
    outside, tracker, x = current_skip_tracker(), SkipTracker(), torch.ones(2)
    with use_skip_tracker(tracker):
        output = Stash()(x)
        assert current_skip_tracker() is tracker and tracker.tensors[None, "skip"] is x
        assert torch.equal(Pop()(output), torch.full((2,), 3.0))
    assert not tracker.tensors and current_skip_tracker() is outside


def test_a_skippable_class_stays_itself() -> None:
    model = Stash()
    assert type(model) is Stash and list(model.state_dict()) == ["weight"]
    assert type(pickle.loads(pickle.dumps(model))) is Stash


def test_none_may_be_stashed() -> None:
    assert nn.Sequential(StashNone(), Pop())(torch.ones(1)).item() == 1


def test_a_forward_that_yields_nothing_is_a_plain_one() -> None:
    @skippable()
    class Plain(nn.Module):
        def forward(self, input: Tensor, factor: int = 1) -> Tensor:
            return input * factor

    assert Plain()(torch.ones(1), factor=3).item() == 3


def test_namespaces_keep_equal_names_apart() -> None:
    outer, inner = Namespace(), Namespace()
    parts: Any = [Stash(), Stash(), Pop(), Pop()]
    layers = [part.isolate(space) for part, space in zip(parts, (outer, inner, inner, outer), strict=True)]
    x = torch.ones(2)
    assert torch.equal(nn.Sequential(*layers)(x), 4 * x + 2 * x + x)
    assert copy.deepcopy(outer) == outer == pickle.loads(pickle.dumps(outer)) != inner
    assert stashed_keys(nn.Sequential(*layers)) == [(outer, "skip"), (inner, "skip")]
    assert stashed_keys(copy.deepcopy(layers[0])) == [(outer, "skip")]


def test_some_names_can_be_isolated_alone() -> None:
    @skippable(stash=["a", "b"])
    class Two(nn.Module):
        pass

    space = Namespace()
    two: Any = Two()
    assert two.isolate(space, only=["b"]) is two
    assert stashed_keys(two) == [(None, "a"), (space, "b")]
    with pytest.raises(ValueError, match="'c' is not among the names of a Two"):
        two.isolate(space, only=["c"])
    with pytest.raises(TypeError, match="takes a list of names, got 'ab'"):
        two.isolate(space, only="ab")


def test_a_partition_gets_its_pops_and_hands_out_its_stashes() -> None:
    x, key = torch.ones(2), (None, "skip")
    output, stashed = run_with_skips(nn.Sequential(Stash(), nn.Identity()), {}, x)
    assert stashed.keys() == {key} and stashed[key] is x
    output, left = run_with_skips(nn.Sequential(nn.Identity(), Pop()), stashed, output)
    assert output.tolist() == [3, 3] and not left
    _, left = run_with_skips(nn.Sequential(Stash(), Pop()), {}, x)  # What is popped inside stays inside.
    assert not left
    assert popped_keys(nn.Sequential(nn.Sequential(Pop()))) == [key]


def test_what_runs_inside_of_another_partition_does_not_mix() -> None:
    class Inner(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            assert not run_with_skips(nn.Sequential(Stash(), Pop()), {}, input)[1]
            return input

    output, _ = run_with_skips(nn.Sequential(Stash(), Inner(), Pop()), {}, torch.ones(2))
    assert output.tolist() == [3, 3]


def layer(*commands: Any, stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> nn.Module:
    @skippable(stash=stashes, pop=pops)
    class Layer(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            yield from commands
            return input

    return Layer()


@pytest.mark.parametrize(
    "made, error, message",
    [
        (layer(stash("x", None)), RuntimeError, "'x' has not been declared as stashable by Layer"),
        (layer(pop("x")), RuntimeError, "'x' has not been declared as poppable by Layer"),
        (layer(pop("x"), pops=("x",)), RuntimeError, "'x' has not been stashed when Layer pops it: let a layer before"),
        (layer(stashes=("x", "y")), RuntimeError, "'x', 'y' must be stashed but have not"),
        (layer(stash("x", None), pop("x"), stashes=("x",), pops=("x", "z")), RuntimeError, "'z' must be popped but"),
        (layer("x"), TypeError, "'x' is not a command"),
    ],
)
def test_a_layer_that_does_not_do_what_it_declares_is_told(
    made: nn.Module, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_with_skips(made, {}, torch.ones(1))


def test_an_error_comes_out_of_the_line_that_yields() -> None:
    try:
        Pop()(torch.ones(1))
    except RuntimeError as error:
        lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)]
        assert 'skip = yield pop("skip")' in lines


def test_a_layer_recomputed_alone_cannot_pop_twice() -> None:
    model = nn.Sequential(Stash(), checkpoint_wrapper(Pop()))
    output = model(torch.ones(2, requires_grad=True)).square()  # Pop saves nothing, so nothing is computed again.
    output.sum().backward()

    @skippable(pop=["skip"])
    class Multiply(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            return input * (yield pop("skip"))

    model = nn.Sequential(checkpoint_wrapper(Stash()), checkpoint_wrapper(Multiply()))
    output = model(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"let Pipe\(checkpoint=...\) recompute whole partitions"):
        output.sum().backward()


def test_names_that_are_no_list_and_no_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"write stash=\[\"skip\"\]"):
        skippable(stash="skip")
    with pytest.raises(TypeError, match="takes names, got 3"):
        skippable(pop=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"expected a class derived from torch.nn.Module, got <class 'int'>"):
        skippable()(int)  # type: ignore[type-var]


def test_a_forward_that_yields_nothing_misses_its_declaration() -> None:
    plain = {"forward": lambda self, input: input}
    with pytest.raises(
        RuntimeError, match=r"'skip' must be stashed but have not: a Silent declares.*let it yield stash"
    ):
        skippable(stash=["skip"])(type("Silent", (nn.Module,), plain))()(torch.ones(2))
    with pytest.raises(RuntimeError, match="'skip' must be popped but have not: a Silent declares"):
        skippable(pop=["skip"])(type("Silent", (nn.Module,), plain))()(torch.ones(2))


def test_a_derived_class_may_leave_it_to_the_class_before() -> None:
    @skippable(stash=["skip"])
    class Derived(Stash):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input)

    _, stashed = run_with_skips(Derived(), {}, torch.ones(2))
    assert list(stashed) == [(None, "skip")]


def test_a_layer_is_put_into_a_namespace_and_nothing_else() -> None:
    layer: Any = Stash()
    for wrong in ("outer", Namespace):
        with pytest.raises(TypeError, match=r"isolate: expected a Namespace, got .*scale_pipe.Namespace\(\)"):
            layer.isolate(wrong)
    with pytest.raises(TypeError, match=r"isolate: only takes a list of names, got 'skip': write only=\[\"skip\"\]"):
        layer.isolate(Namespace(), only="skip")


FAR, NEAR = (None, "far"), (None, "near")


def test_a_tensor_goes_to_the_partition_that_pops_it() -> None:
    portals = Portals([Skip(FAR, 0, 2), Skip(NEAR, 0, 1)])
    portals.put(0, {FAR: "far 0", NEAR: "near 0"})
    portals.put(1, {FAR: "far 1", NEAR: None})
    assert portals.pop(0, 0) == {}
    assert portals.pop(1, 1) == {NEAR: None}
    assert portals.pop(0, 1) == {NEAR: "near 0"}
    assert portals.pop(0, 2) == {FAR: "far 0"} and portals.pop(1, 2) == {FAR: "far 1"}


def test_what_was_taken_is_held_no_longer() -> None:
    portals, tensor = Portals([Skip(FAR, 0, 1)]), torch.ones(1)
    seen = weakref.ref(tensor)
    portals.put(0, {FAR: tensor})
    del tensor
    assert seen() is not None
    gc.disable()
    try:
        portals.pop(0, 1)
        assert seen() is None and portals.pop(0, 1) == {}
    finally:
        gc.enable()


def test_what_waits_is_not_overwritten_in_place() -> None:
    portals, tensor = Portals([Skip(FAR, 0, 2)]), torch.ones(2, 2)
    portals.put(0, {FAR: [tensor]})
    portals.check_not_overwritten(0, (tensor.clone(), tensor.to_sparse()))
    portals.check_not_overwritten(1, tensor)  # Of another micro-batch.
    with pytest.raises(RuntimeError, match=r"'far' is stashed.*yield stash\('far', input.clone\(\)\).*inplace=False"):
        portals.check_not_overwritten(0, {"input": tensor[1:]})


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
