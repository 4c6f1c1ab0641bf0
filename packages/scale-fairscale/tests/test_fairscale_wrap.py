"""FairScale's policies, which `auto_wrap` asks in FairScale's form."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from torch import nn

from fairscale.nn import auto_wrap, default_auto_wrap_policy, enable_wrap
from fairscale.nn.wrap import config_auto_wrap_policy


def linears(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size) for size in sizes))


class Wrapper(nn.Module):
    """A wrapper that shards nothing, so that lists of modules can have one."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module


def wrapped(model: nn.Module, policy: Any = None, **options: Any) -> list[str]:
    """The names of the modules that `auto_wrap` has wrapped."""
    with enable_wrap(policy, wrapper_cls=Wrapper):
        model = auto_wrap(model, **options)
    found = [name for name, part in model.named_modules() if isinstance(part, Wrapper)]
    return [re.sub(r"\bmodule\.?", "", name).rstrip(".") for name in found]


def test_the_default_policy_does_not_count_wrappers_inside() -> None:
    policy = functools.partial(default_auto_wrap_policy, min_num_params=40)
    assert wrapped(linears(7, 7), policy) == ["0", "1"]
    assert wrapped(linears(5, 5), auto_wrap_policy=policy) == [""]
    assert wrapped(linears(7, 5, 5), policy) == ["", "0"]
    assert wrapped(linears(3, 3), policy) == []
    assert wrapped(linears(3), functools.partial(policy, skip_params_check_for_root=True)) == [""]
    assert wrapped(linears(7)) == [], "10^8 elements make a wrapper by default"


def test_classes_not_entered_or_not_wrapped_can_be_named() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"list": nn.ModuleList(linears(7, 7)), "attention": nn.MultiheadAttention(10, 1)})

    policy = functools.partial(default_auto_wrap_policy, min_num_params=40)
    assert "attention.out_proj" not in wrapped(model(), policy)
    assert "attention.out_proj" in wrapped(model(), functools.partial(policy, force_leaf_modules=()))
    assert wrapped(model(), functools.partial(policy, exclude_wrap_modules={nn.Linear}))[:2] == ["", "list"]


def test_the_default_policys_sets_may_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    without_linear = default_auto_wrap_policy.EXCLUDE_WRAP_MODULES | {nn.Linear}
    monkeypatch.setattr(default_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", without_linear)
    assert wrapped(linears(7, 7), functools.partial(default_auto_wrap_policy, min_num_params=40)) == [""]


def test_a_policy_of_ones_own_is_called_with_fairscales_keywords() -> None:
    calls = []

    def policy(*, module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        calls.append((type(module).__name__, recurse, unwrapped_params, module_is_root))
        return recurse or isinstance(module, nn.Linear)

    assert wrapped(linears(2), policy) == ["0"]
    assert calls == [
        ("Sequential", True, 6, True),
        ("Linear", True, 6, False),
        ("Linear", False, 6, False),
        ("Sequential", False, 0, True),
    ]


def test_tagged_modules_are_wrapped() -> None:
    model = linears(2, 2)
    model[1].wrapper_config = {"mixed_precision": False}
    assert wrapped(model, config_auto_wrap_policy) == ["1"]
