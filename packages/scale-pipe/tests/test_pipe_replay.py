"""A forward that does not fit its cuts is told so: which module, whose value, and what to write."""

import pytest
import torch
from split_models import Tower, run_in_turn
from torch import Tensor, nn

from scale_pipe import SplitError, split
from scale_pipe.module_split.placeholder_tensor import PlaceholderTensorError

INPUT = torch.linspace(-1, 1, 20).view(5, 4)
CUTS = ["blocks.1", "blocks.3"]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            "around",
            r"'head' on stage 2 is called with a tensor \[5, 6\] from module 'embed' of stage 0, which went around",
        ),
        ("parameter", r"'head' on stage 2 .* from parameter 'scale' of stage 0.*split\(\.\.\., hold="),
        ("tied", r"the model's output has a tensor \[5, 4\] from embed\.weight of stage 0, which is not on stage 2"),
        ("output", r"the model's output has a tensor \[5, 6\] from module 'embed' of stage 0"),
        ("values", r"depends on the values of a tensor from module 'embed' of stage 0.*cut the model elsewhere"),
        ("written", r"would write the values of a tensor from module 'embed' of stage 0.*out of place"),
    ],
)
def test_a_value_not_handed_over_is_named_with_its_maker(odd: str, message: str) -> None:
    with pytest.raises(PlaceholderTensorError, match=message):
        run_in_turn(split(Tower(odd), CUTS), INPUT)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("called again", r"calls 'embed' on stage 2, but .* it is on stage 0; write split\(.*\{\"embed\": \[0, 2\]\}"),
        ("random function", r"draws random numbers before 'blocks.1' outside of any module"),
        ("another way", r"calls 'blocks.2.0' of stage 1 before 'blocks.1', where that stage begins"),
    ],
)
def test_a_forward_that_goes_another_way_is_told_where(odd: str, message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(SplitError, match=message):
        run_in_turn(split(Tower(odd), CUTS), INPUT)
    if odd == "random function":  # The draws of the second stage are undone.
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        split(Tower(odd), CUTS)[0](INPUT)
        assert torch.equal(torch.get_rng_state(), after)


class Calls(nn.Module):
    """Calls its layers in the order that it is told."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        self.order = order
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.pair = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.unit = Pair()

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.get_submodule(name)(x)
        return x


class Pair(nn.Module):
    """Two layers; some call them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.b(self.a(x))
        return output


@pytest.mark.parametrize(
    ("order", "cuts", "message"),
    [
        ("one three two", ["two"], r"calls 'three' on stage 0, but by the order of registration it is on stage 1"),
        ("one", ["two"], r"'two', where stage 1 begins, was not called"),
        ("one two one", ["two"], r"calls 'one' on stage 1.*hold=\{\"one\": \[0, 1\]\}"),
        ("one unit.a unit.b", ["unit"], r"'unit.a' is on stage 1, and was called here by itself.*cut at 'unit.a'"),
    ],
)
def test_calls_out_of_registration_order_are_refused_with_a_fix(order: str, cuts: list[str], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        run_in_turn(split(Calls(*order.split()), cuts), INPUT)


def test_a_stage_that_calls_too_much_hears_what_came_next() -> None:
    first, second = split(Calls("one", "two"), ["two"])
    second.order = ("one", "one", "two")  # type: ignore[assignment]
    with pytest.raises(SplitError, match=r"calls 'one' on stage 1, where on the stage before it called 'two'"):
        second(first(INPUT))


def test_what_the_messages_say_mends_it() -> None:
    for order, cuts, hold in (
        ("one three two", ["two"], {"three": 0}),
        ("one two one", ["two"], {"one": [0, 1]}),
        ("one unit.a unit.b", ["unit.a"], {}),
        ("unit.a pair.a unit.b", ["pair.a"], {"unit.a": 0, "unit.b": 1}),
    ):
        model = Calls(*order.split())
        assert torch.equal(run_in_turn(split(model, cuts, hold=hold), INPUT), model(INPUT))


def test_a_stage_is_given_what_the_one_before_returns() -> None:
    first, second = split(Tower(), ["blocks.1"])
    with pytest.raises(TypeError, match=r"stage 1 takes what stage 0 returns, one StageOutput.*but got Tensor, mask"):
        second(INPUT, mask=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'"):
        second(first(INPUT), labels=None)


def test_an_error_of_the_model_leaves_no_trace() -> None:
    stages = split(Tower(), CUTS)
    with pytest.raises(RuntimeError, match="must match the size"):
        stages[0](INPUT[:, :3])
    assert run_in_turn(stages, INPUT).shape == (5, 3)
