"""Hooks that do for a part of a module what they do for all of it go along where it is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scale_core.hooks.module_parts import ForEachShardHook, is_for_each_part, take_hooks


class Seen(ForEachShardHook):
    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def before(self, module: nn.Module, args: Any) -> None:
        self.seen.append(("before", module))

    def before_all(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen.append(("before all", kwargs["input"]))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.append(("after", output))

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.seen.append(("itself", kwargs["input"]))


class Fails(nn.Module):
    def forward(self, input: Any) -> Any:
        raise RuntimeError("no")


def test_a_part_gets_the_hooks_for_each_part_with_options() -> None:
    seen, others = Seen(), []
    whole, part = nn.Identity(), nn.Identity()
    whole.register_forward_pre_hook(lambda *given: others.append(given))
    whole.register_forward_hook(lambda *given: others.append(given))
    assert not take_hooks(part, whole)
    whole.register_forward_pre_hook(seen.before)
    whole.register_forward_pre_hook(seen.before_all, with_kwargs=True)
    whole.register_forward_hook(seen, with_kwargs=True)
    whole.register_forward_hook(seen.after, always_call=True)
    assert is_for_each_part(seen) and is_for_each_part(seen.after) and not is_for_each_part(others.append)
    fails = Fails()
    assert take_hooks(part, whole) and take_hooks(fails, whole)
    x = torch.ones(2)
    part(input=x)
    assert [what for what, _ in seen.seen] == ["before", "before all", "itself", "after"]
    assert seen.seen[0][1] is part and seen.seen[1][1] is x and not others
    try:
        fails(input=x)
    except RuntimeError:
        assert seen.seen[-1] == ("after", None)
