"""Which stage holds what, as the docstring's table has it; and errors of cuts that cannot be."""

from typing import Any

import pytest
from torch import nn

from scale_pipe.module_split.cut_plan import plan_cuts


def language_model() -> nn.Module:
    """wte, four blocks in `h`, norm, head, and a part that holds nothing."""
    model = nn.Module()
    model.wte = nn.Embedding(4, 4)
    model.drop = nn.Dropout()
    model.h = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(4))
    model.norm = nn.LayerNorm(4)
    model.head = nn.Linear(4, 4)
    return model


def test_each_cut_begins_a_stage() -> None:
    plan = plan_cuts(language_model(), ["h.2", "norm"])
    assert plan.num_stages == 3
    assert plan.split_modules == {"", "h"}
    assert plan.stages_of == {
        "wte": (0,),
        "h.0": (0,),
        "h.1": (0,),
        "h.2": (1,),
        "h.3": (1,),
        "norm": (2,),
        "head": (2,),
    }
    assert "drop" not in plan.stages_of


def test_a_cut_inside_of_a_module_splits_it() -> None:
    plan = plan_cuts(language_model(), ["h.2", "h.2.linear1"])
    assert plan.split_modules == {"", "h", "h.2"}
    assert {name: stages for name, stages in plan.stages_of.items() if name.startswith("h.2")} == {
        "h.2.self_attn": (1,),
        "h.2.linear1": (2,),
        "h.2.linear2": (2,),
        "h.2.norm1": (2,),
        "h.2.norm2": (2,),
    }


def test_what_is_held_elsewhere_counts_by_itself() -> None:
    plan = plan_cuts(language_model(), ["h.2", "norm"], {"wte": [2, 0], "h.1.norm2": 1, "drop": 0})
    assert plan.stages_of["wte"] == (0, 2) and plan.describe_stages("wte") == "stages 0, 2"
    assert plan.stages_of["h.1.norm2"] == (1,) and plan.stages_of["h.1.norm1"] == (0,) and "h.1" in plan.split_modules
    assert plan.stages_of["drop"] == (0,) and plan.holds(0, "drop") and not plan.holds(1, "drop")


@pytest.mark.parametrize(
    ("cuts", "error", "message"),
    [
        (["h.12"], ValueError, r"has no module named 'h.12' to be cut at; did you mean 'h.2' or 'h.1' or 'h.3'"),
        (["decoder"], ValueError, r"no module named 'decoder'"),
        (["h"], TypeError, r"'h' is a ModuleList, which is never called.*cut at its first module: 'h.0'"),
        (["norm", "h.2"], ValueError, r"'h.2' is registered before 'norm'; write \['h.2', 'norm'\]"),
        (["h.2", "h.2"], ValueError, r"'h.2' is named twice"),
        ("h.2", TypeError, r"cuts are a list of names, as \[\"blocks.4\", \"blocks.8\"\], but got 'h.2'"),
    ],
)
def test_cuts_that_cannot_be_are_told_what_can(cuts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_cuts(language_model(), cuts)


@pytest.mark.parametrize(
    ("hold", "message"),
    [
        ({"wpe": 0}, r"hold names 'wpe', which the model does not have; did you mean 'wte'"),
        ({"wte": 3}, r"hold\['wte'\] is 3, but 2 cuts make the stages 0 to 2"),
        ({"wte": []}, r"hold\['wte'\] is \[\]"),
        ({"h": 0}, r"hold\['h'\] would move the cut at 'h.2'"),
    ],
)
def test_holding_what_cannot_be_held_is_refused(hold: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_cuts(language_model(), ["h.2", "norm"], hold)
