"""collected_outputs.py: what transformers' hooks have appended to the outer forward's lists, without transformers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from scale_pipe.module_split.collected_outputs import add_collected, collecting, install_collectors


class Pretrained(nn.Module):
    """Stands for a model of transformers."""


def test_hooks_are_on_models_of_transformers_the_outer_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: list[nn.Module] = []
    inner, outer = Pretrained(), Pretrained()
    outer.inner, outer.layer = inner, nn.Linear(2, 2)
    hooks = SimpleNamespace(maybe_install_capturing_hooks=installed.append)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", hooks)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", SimpleNamespace(PreTrainedModel=Pretrained))
    install_collectors(nn.Sequential(outer, nn.ReLU()))
    assert installed == [outer, inner]


def test_what_one_stage_collects_another_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"logits": ["before"], "hidden": []}
    collector = SimpleNamespace(get=lambda: lists)
    monkeypatch.setitem(
        sys.modules, "transformers.utils.output_capturing", SimpleNamespace(_active_collector=collector)
    )
    with collecting() as added:
        lists["logits"] += ["first", "second"]
    assert added == {"logits": ["first", "second"]}
    add_collected(added)
    assert lists == {"logits": ["before", "first", "second", "first", "second"], "hidden": []}


def test_without_transformers_nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", SimpleNamespace())
    with collecting() as added:
        add_collected({"logits": [1]})
    assert added == {}
