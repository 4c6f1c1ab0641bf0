import copy
import inspect
import os
import pickle
from collections import OrderedDict, UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_type_hints
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Optimizer

import scale_core
import scale_snapshot
from scale_core.arguments import checked_arguments
from scale_core.testing import faults

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]

M = TypeVar("M", bound=nn.Module)
Quoted: TypeAlias = "int | None"


class HasStep(Protocol):
    def step(self) -> None: ...


@checked_arguments
def take(
    flag: bool = True,
    number: int = 1,
    real: float = 1.0,
    limit: float | None = None,
    word: str = "",
    choice: Literal["a", "b"] = "a",
    path: str | os.PathLike[str] = "",
    module: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    tensor: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    sizes: Sequence[int] | None = None,
    names: Collection[str] = (),
    params: Iterable[Any] = (),
    costs: tuple[float, ...] = (),
    state: Mapping[str, Any] | None = None,
    cls: type[Optimizer] = SGD,
    call: Callable[[int], int] | None = None,
    duck: HasStep | None = None,
    flag_or_number: bool | int | None = None,
    unknown: "Unknown | None" = None,
    quoted: "Quoted" = None,
    anything: Any = None,
) -> str:
    """Takes one of each sort."""
    return "taken"


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Indexed:  # As an integer of NumPy.
    def __index__(self) -> int:
        return 3


bool_ = type("bool_", (), {"__bool__": lambda self: True})  # As NumPy's.

WRONG = [
    ("flag", "false", TypeError, "take: expected flag to be a bool, got 'false' (str); write flag=False"),
    ("flag", None, TypeError, "expected flag to be a bool, got None; leave flag out for the default, True"),
    ("flag", 2, TypeError, "a bool, got 2 (int)"),
    ("number", "3", TypeError, "expected number to be an integer, got '3' (str)"),
    ("number", 2.5, TypeError, "an integer, got 2.5 (float)"),
    ("number", float("nan"), TypeError, "an integer, got nan (float)"),
    ("number", True, TypeError, "an integer, got True (bool)"),
    ("real", "1", TypeError, "a number, got '1' (str)"),
    ("limit", "1", TypeError, "a number or None, got '1' (str)"),
    ("word", 3, TypeError, "a str, got 3 (int)"),
    ("choice", 3, TypeError, "'a' or 'b', got 3 (int)"),
    ("path", 3, TypeError, "a str or a path, got 3 (int)"),
    ("module", nn.Linear, TypeError, "a Module or None, got the class Linear; write Linear(...)"),
    ("module", [], TypeError, "a Module or None, got an empty list"),
    ("optimizer", SGD, TypeError, "an Optimizer, a collection of Optimizer or None, got the class SGD"),
    ("optimizer", "adam", TypeError, "or None, got 'adam' (str)"),
    ("tensor", [1.0], TypeError, "a tensor or None, got list of float"),
    ("dtype", "bfloat16", TypeError, "a torch.dtype or None, got 'bfloat16' (str)"),
    ("device", "gpu", ValueError, "a torch.device or its name or None, got 'gpu' (str)"),
    ("sizes", 3, TypeError, "a sequence of integer or None, got 3 (int)"),
    ("sizes", [1, "2"], TypeError, "a sequence of integer or None, got list of int, str"),
    ("names", "layers", TypeError, "a collection of str, got 'layers' (str); write ['layers']"),
    ("params", None, TypeError, "expected params to be a collection, got None"),
    ("costs", ("1",), TypeError, "a sequence of number, got tuple of str"),
    ("state", [1], TypeError, "a mapping or None, got list of int"),
    ("cls", layers(), TypeError, "a class, got Sequential; write Sequential for the class itself"),
    ("call", 3, TypeError, "a function or None, got 3 (int)"),
    ("duck", 3, TypeError, "a HasStep or None, got 3 (int)"),
    ("flag_or_number", "yes", TypeError, "a bool, an integer or None, got 'yes' (str); write flag_or_number=True"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), WRONG)
def test_a_wrong_argument_is_told_by_name(name: str, value: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        take(**{name: value})  # type: ignore[arg-type]
    assert text in str(raised.value)


def each(name: str, *values: object) -> list[tuple[str, object]]:
    return [(name, value) for value in values]


RIGHT = [
    *each("flag", True, 0, 1, torch.tensor(True), bool_()),
    *each("number", -3, 5e9, float("inf"), Indexed(), torch.tensor(3)),
    *each("real", -3, 0.5, float("-inf"), Indexed(), Fraction(1, 2), torch.tensor(0.5)),
    *each("real", float("nan")),  # Its range is for the function to say, as are
    *each("choice", "c"),  # the words there are.
    *each("path", "", Path(), MagicMock(spec=Path)),
    *each("module", layers(), Mock(spec=nn.Module), torch.fx.symbolic_trace(nn.ReLU()), None),
    *each("optimizer", SGD(layers().parameters()), [SGD(layers().parameters())], (), None),
    *each("tensor", torch.ones(1), nn.Parameter(torch.ones(1)), torch.ones(1, device="meta"), torch.fx.Proxy(Mock())),
    *each("tensor", FakeTensorMode().from_tensor(torch.ones(2))),
    *each("device", "cpu", "cuda:1", torch.device("meta"), None),
    *each("sizes", [1], (1, 2), torch.Size([2]), range(3), torch.ones(2), iter([1]), {1, 2}),
    *each("names", ["a"], {"a"}, {"a": 1}.keys(), (name for name in "ab"), {"a": 1}),
    *each("params", layers().parameters(), nn.ParameterList(), [{"params": []}], layers()),
    *each("costs", [1, 2.0], (), (torch.tensor(1.0),)),
    *each("state", {}, OrderedDict(), UserDict(), MagicMock(spec=dict)),
    *each("cls", torch.optim.AdamW, Mock),
    *each("call", print, lambda number: number, nn.ReLU(), nn.ReLU, Mock()),
    *each("duck", SGD(layers().parameters()), Mock(), Mock(spec=SGD)),
    *each("flag_or_number", True, 2, None),
    *((name, object()) for name in ("unknown", "quoted", "anything")),
]


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_what_is_right_is_taken(name: str, value: object) -> None:
    assert take(**{name: value}) == "taken"  # type: ignore[arg-type]


def test_places_count_as_names_do_and_iterators_are_not_used_up() -> None:
    assert take(True, 2) == "taken"
    with pytest.raises(TypeError, match="expected number to be an integer, got None"):
        take(True, None)  # type: ignore[arg-type]
    given = iter([1, 2])
    take(sizes=given)  # type: ignore[arg-type]
    assert list(given) == [1, 2]


def test_what_python_refuses_is_left_to_python() -> None:
    with pytest.raises(TypeError, match=r"take\(\) got an unexpected keyword argument 'flags'"):
        take(flags=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="got multiple values for argument 'flag'"):
        take(True, flag=True)  # type: ignore[misc]


def test_signature_docstring_and_annotations_stay() -> None:
    assert list(inspect.signature(take).parameters)[:2] == ["flag", "number"]
    assert take.__doc__ == "Takes one of each sort." and take.__name__ == "take" and take.__module__ == __name__
    assert get_type_hints(Layer.__init__)["width"] is int
    assert pickle.loads(pickle.dumps(take)) is take


class Layer(nn.Module):
    @checked_arguments
    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Deeper(Layer):
    def __init__(self, text: str) -> None:
        super().__init__(len(text))


@checked_arguments
@dataclass(frozen=True)
class Costs:
    forward: tuple[float, ...]
    link: float = 0.0


def test_classes_are_checked_when_they_are_built_and_not_changed() -> None:
    with pytest.raises(TypeError, match=r"^Layer: expected width to be an integer, got 'ab'"):
        Layer("ab")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Costs: expected link to be a number, got None"):
        Costs((1.0,), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Costs: expected forward to be a sequence of number, got 1.0"):
        replace(Costs((1.0,)), forward=1.0)  # type: ignore[arg-type]
    deeper = Deeper("ab")
    assert list(inspect.signature(Layer).parameters) == ["width", "bias"]
    assert [*copy.deepcopy(deeper).state_dict()] == [*pickle.loads(pickle.dumps(deeper)).state_dict()]
    assert pickle.loads(pickle.dumps(Costs((1.0,)))) == copy.copy(Costs((1.0,)))


def test_a_context_and_a_generator_are_checked_at_the_call() -> None:
    @checked_arguments
    @contextmanager
    def around(model: nn.Module) -> Iterator[None]:
        yield

    @checked_arguments
    def count(until: int) -> Iterator[int]:
        yield from range(until)

    with pytest.raises(TypeError, match="expected model to be a Module, got None"):
        around(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected until to be an integer, got '3'"):
        count("3")  # type: ignore[arg-type]
    with around(layers()):
        assert list(count(2)) == [0, 1]


def test_a_bound_says_what_a_type_variable_is() -> None:
    @checked_arguments
    def wrap(module: M) -> M:
        return module

    with pytest.raises(TypeError, match="wrap: expected module to be a Module, got list of Linear"):
        wrap([*layers()])  # type: ignore[type-var]


def test_torch_compile_traces_through() -> None:
    @checked_arguments
    def scaled(x: Tensor, factor: float = 2.0, where: Literal["in", "out"] = "in") -> Tensor:
        return x * factor

    compiled = torch.compile(lambda x: scaled(x, where="out") + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


def test_functions_refuse_wrong_arguments_before_they_write(tmp_path: Path) -> None:
    model = layers()
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
        (
            scale_snapshot.save,
            (tmp_path, 1, {"model": model}),
            {"keep": True},
            "save: expected keep to be an integer or None",
        ),
        (scale_snapshot.save, (tmp_path, 1, model), {}, "save: expected objects to be a mapping, got Sequential"),
        (
            scale_snapshot.save_snapshot,
            (tmp_path, "1", {}),
            {},
            "save_snapshot: expected step to be an integer, got '1'",
        ),
        (scale_core.ShardedGradScaler, (), {"enabled": "false"}, "; write enabled=False"),
        (scale_core.clip_grad_norm_, (model.parameters(), None), {}, "expected max_norm to be a number, got None"),
        (scale_core.join, ("text",), {}, "join: expected batches to be a collection, got 'text'"),
        (faults.kill_at, ("all_gather", -1), {}, "ranks and seconds are not negative, got rank=-1"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises((TypeError, ValueError), match=text):
            call(*args, **kwargs)
    assert not list(tmp_path.iterdir())


def test_a_group_of_another_program_is_still_taken() -> None:
    class Ranks:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    assert scale_core.group_of(Ranks()).size == 1
    for group in (Ranks(), Mock(rank=lambda: 0, size=lambda: 1)):
        assert list(scale_core.join([1, 2], group)) == [1, 2]
