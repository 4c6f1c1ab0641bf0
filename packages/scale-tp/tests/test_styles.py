"""styles.py: names and patterns find modules, and what is no style or finds nothing is refused with what is near."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from scale_tp import parallelize
from scale_tp.conversion.styles import (
    _OF_TORCH,
    STYLES,
    UNSUPPORTED_STYLES,
    Plan,
    Style,
    check_model_plan,
    resolve_styles,
)

NAMES = [
    "",
    "embed_tokens",
    "layers",
    *[f"layers.{n}{rest}" for n in range(2) for rest in ("", ".attn", ".attn.q_proj", ".attn.o_proj", ".up")],
    "norm",
]


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("norm", ["norm"]),
        ("layers.*.up", ["layers.0.up", "layers.1.up"]),
        ("layers.1.*.q_proj", ["layers.1.attn.q_proj"]),
        (r"layers\.\d\.attn\.[qo]_proj", [f"layers.{n}.attn.{p}_proj" for n in range(2) for p in "qo"]),
        (r".*\.q_proj", ["layers.0.attn.q_proj", "layers.1.attn.q_proj"]),
        ("", [""]),
        ("nor?", ["norm"]),
        ("*orm", ["norm"]),
        ("layers.?.att*", ["layers.0.attn", "layers.1.attn"]),
    ],
)
def test_a_key_is_a_name_or_a_name_with_stars_or_an_expression(key: str, found: list[str]) -> None:
    assert list(resolve_styles({key: "colwise"}, NAMES)) == found


def test_a_star_stands_for_one_part_between_dots_alone() -> None:
    with pytest.raises(ValueError, match=r"'layers.\*.q_proj' matches none of the 14 modules"):
        resolve_styles({"layers.*.q_proj": "colwise"}, NAMES)


@pytest.mark.fault(92)
def test_names_near_one_that_matches_nothing_are_listed() -> None:
    with pytest.raises(
        ValueError, match=r"'layers.\*.attn.q_prog' matches none .*; near it are 'layers.\*.attn.q_proj'"
    ):
        resolve_styles({"layers.*.attn.q_prog": "colwise"}, NAMES)
    with pytest.raises(ValueError, match=r"'model.layers.0.up' matches none .*near it are 'layers.\*.up'"):
        resolve_styles({"model.layers.0.up": "colwise"}, NAMES)
    with pytest.raises(ValueError, match=r"'zzz' matches none of the 14 modules; there are 'embed_tokens', 'layers'"):
        resolve_styles({"zzz": "colwise"}, NAMES)


def test_a_carried_plan_may_name_what_the_model_lacks() -> None:
    plan = {"experts": "moe_tp_experts", "norm": "replicate"}
    assert list(resolve_styles(plan, NAMES, needs_all=False)) == ["norm"]
    with pytest.raises(ValueError, match=r"the style 'moe_tp_experts' is not supported"):
        resolve_styles(plan, [*NAMES, "experts"], needs_all=False)


def test_styles_are_given_by_name_in_the_order_of_the_modules() -> None:
    own = Style("outputs", output="part", stacked=3)
    assert resolve_styles({"norm": own, "embed_tokens": "embedding_rowwise"}, NAMES) == {
        "embed_tokens": Style("words"),
        "norm": own,
    }


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"norm": "colwize"}, r"'norm': unknown style 'colwize'; did you mean 'colwise'"),
        ({"norm": "xyz"}, r"'norm': unknown style 'xyz'; there are 'all_reduce', 'colwise'"),
        ({"norm": "moe_tp_experts"}, r"'norm': the style 'moe_tp_experts' is not supported \(it divides experts"),
        (
            {"layers.*.up": "colwise", "layers.0.up": "rowwise"},
            r"two styles of 'layers.0.up': by 'layers.\*.up' and by",
        ),
        ({"layers.(": "colwise"}, r"'layers.\(' is neither a name nor a regular expression: "),
    ],
)
def test_what_can_not_be_meant_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_styles(plan, NAMES)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"divides": "columns"}, ValueError, r"expected divides of a style to be one of outputs, inputs, .*'columns'"),
        (
            {"divides": "outputs", "output": "parts"},
            ValueError,
            "output of a style .* whole, part, summand, got 'parts'",
        ),
        ({"divides": "outputs", "stacked": 0}, ValueError, "stacked to be at least 1, got 0"),
        ({"divides": "outputs", "stacked": 2.0}, TypeError, "stacked to be an integer, got 2.0"),
    ],
)
def test_a_style_that_can_not_be_is_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Style(**fields)


def test_a_style_is_a_style_or_a_name() -> None:
    with pytest.raises(TypeError, match=r"'norm': expected a style or the name of one, got int"):
        resolve_styles({"norm": 3}, NAMES)  # type: ignore[dict-item]


def test_the_error_of_torch_s_styles_says_what_to_write() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, style

    for value, instead in (
        (ColwiseParallel(output_layouts=Replicate()), "'colwise_gather_output' for output_layouts"),
        (PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()), "leave it out"),
    ):
        with pytest.raises(TypeError, match=rf"'norm': .* got {type(value).__name__}, because .* {instead}"):
            resolve_styles({"norm": value}, NAMES)  # type: ignore[dict-item]
        with pytest.raises(TypeError, match=rf"got {type(value).__name__}, because .* {instead}"):
            parallelize(torch.nn.Linear(2, 2), value)  # type: ignore[arg-type]
    assert set(_OF_TORCH) >= {name for name in style.__all__ if name != "ParallelStyle"}


def test_two_keys_may_agree() -> None:
    assert len(resolve_styles({"norm": "colwise", "no[r]m": "colwise"}, NAMES)) == 1


CARRIED: Plan = {
    "layers.*.q": "colwise",
    "layers.*.experts": "moe_tp_experts",
    "layers.*.experts.up": "packed_colwise",
    "layers.*.latent.down": "mla_kv_a_proj",
    "layers.*.latent.up": "colwise",
    "layers.*.experts_too": "rowwise",
    "absent": "moe_tp_experts",
}


def test_an_unsupported_carried_plan_shows_what_is_left() -> None:
    names = ["", *(f"layers.0.{name}" for name in ("q", "experts", "experts.up", "experts_too"))]
    with pytest.raises(
        ValueError, match=r"plan that Net carries asks for 'moe_tp_experts' of .*divides experts"
    ) as told:
        check_model_plan("Net", CARRIED, names)
    _, _, shown = str(told.value).partition("parallelize(model, ")
    left = ast.literal_eval(shown.removesuffix(")"))
    assert left == {"layers.*.q": "colwise", "layers.*.experts_too": "rowwise"}
    assert list(resolve_styles(left, names)) == ["layers.0.q", "layers.0.experts_too"]
    # What stands beside such a projection divides what it gives.
    with pytest.raises(ValueError, match=r"'mla_kv_a_proj' of 'layers.\*.latent.down'.*nothing is left of it"):
        check_model_plan("Net", CARRIED, ["layers.0.latent", "layers.0.latent.down", "layers.0.latent.up"])
    check_model_plan("Net", CARRIED, ["layers.0.q"])


def test_a_carried_plan_that_matches_nothing_is_refused() -> None:
    names = ["", "base_model", "base_model.model.layers.0.q", "base_model.model.layers.0.q.base_layer"]
    with pytest.raises(
        ValueError,
        match=r"that PeftModel carries matches none of its 4 modules.*its 'layers.\*.q' does not; near it are "
        r"'base_model.model.layers.\*.q'.*parallelize\(model, \{'base_model.model.layers.\*.q': 'colwise', ...\}\)",
    ):
        check_model_plan("PeftModel", CARRIED, names)


def test_every_style_of_transformers_is_known_or_refused_by_name() -> None:
    registered = pytest.importorskip("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    assert set(registered) <= {*STYLES, *UNSUPPORTED_STYLES}
