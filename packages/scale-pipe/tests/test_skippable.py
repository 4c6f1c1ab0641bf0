"""Layers stash and pop without a pipeline too, and a layer that does not do what it declares is told so."""

import copy
import pickle
import traceback
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import checkpoint_wrapper
from scale_pipe import Namespace, pop, skippable, stash
from scale_pipe.skip.namespace import popped_keys, stashed_keys
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
        (layer(pop("x"), pops=("x",)), RuntimeError, "'x' has not been stashed when Layer pops it"),
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
