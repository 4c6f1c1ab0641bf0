"""`fully_shard` of modules that can't become units, and of classes that look as if they could not."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from scale_fsdp import FSDPModule, fully_shard


class Registered(nn.Module):
    """A base class that asks its subclasses for an argument, and lists them."""

    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kinds.append(kind)


class Head(Registered, kind="head"):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_class_whose_subclasses_take_arguments_is_sharded() -> None:
    plain = Head()
    model = fully_shard(copy.deepcopy(plain))
    assert isinstance(model, FSDPModule) and isinstance(model, Head)
    assert torch.equal(model(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    assert Registered.kinds == ["head"]  # No class was registered on the way.


class WithChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unshard = nn.Linear(2, 2)


class WithParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reshard = nn.Parameter(torch.ones(2))


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def no_sync(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "name"), [(WithChild, "unshard"), (WithParameter, "reshard"), (WithMethod, "no_sync")]
)
def test_a_name_that_a_method_would_take_is_refused(kind: type[nn.Module], name: str) -> None:
    module = kind()
    with pytest.raises(ValueError, match=rf"a {kind.__name__} has a '{name}' of its own.*Rename the module's '{name}'"):
        fully_shard(module)
    assert type(module) is kind
    fully_shard(nn.Sequential(kind()))  # Inside of a unit nothing takes it.


def test_the_projection_of_an_attention_is_refused() -> None:
    attention = nn.MultiheadAttention(4, 2)
    with pytest.raises(ValueError, match=r"the out_proj of an nn.MultiheadAttention.*fully_shard\(layer.self_attn\)"):
        fully_shard(attention.out_proj)
    fully_shard(attention)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_script_modules_are_refused_unless_ignored() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"this module is a torch.jit.ScriptModule.*module.compile\(\)"):
        fully_shard(script)
    model = nn.Sequential(nn.Linear(2, 2), script)
    with pytest.raises(TypeError, match=r"'1.weight' is a parameter of a torch.jit.ScriptModule.*ignored_params"):
        fully_shard(model)
    fully_shard(model, ignored_params=set(script.parameters()))
    model(torch.ones(1, 2)).sum().backward()


def test_sharding_under_inference_mode_is_refused() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"fully_shard was called under.*Call it before"):
        fully_shard(model)
    fully_shard(model)
    with torch.inference_mode():
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
