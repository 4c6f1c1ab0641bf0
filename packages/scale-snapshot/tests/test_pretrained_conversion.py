"""conversion.py: what the models of transformers say of other names and of experts, by classes that look alike."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from scale_core.sharded_tensor.chunks import Chunk
from scale_core.state.validation import SavedTensor
from scale_snapshot.pretrained.conversion import Conversions


@dataclass
class MergeModulelist:
    dim: int = 0


@dataclass
class SplitModulelist:
    dim: int = 0


@dataclass
class Concatenate:
    dim: int = 0


Divide = type("Chunk", (), {"dim": 1, "num_shards_attribute": None})
Transpose = type("Transpose", (), {})


@dataclass
class Transform:
    source_patterns: list[str]
    target_patterns: list[str]
    operations: list[Any] = field(default_factory=list)

    def rename_source_key(self, name: str) -> tuple[str, str | None]:
        for pattern in self.source_patterns:
            renamed, count = re.subn(re.escape(pattern).replace(r"\*", r"\d+"), self.target_patterns[0], name)
            if count:
                return renamed, pattern
        return name, None


def renaming(old: str, new: str) -> Transform:
    transform = Transform([old], [new])
    del transform.operations
    return transform


GATES = [".experts.*.w1", ".experts.*.w3"]
JOIN = Transform(GATES, [".experts.gate_up"], [MergeModulelist(0), Concatenate(1)])
PART = Transform([".experts.gate_up"], GATES, [Divide(), SplitModulelist(0)])
F32, BF16 = torch.float32, torch.bfloat16


def test_experts_are_boxes_of_one_tensor_in_their_order() -> None:
    saved = {f"moe.experts.{n}.{w}": SavedTensor((2, 3), F32) for n in range(11) for w in ("w1", "w3")}
    loading = Conversions(renamings=[renaming("moe.", "mlp.")], converters=[JOIN])
    (found,) = loading.assemble(saved, {"mlp.experts.gate_up"}).values()
    assert found.tensor == SavedTensor((11, 4, 3), F32)
    boxes = {piece.name: piece.chunk for piece in found.pieces}
    assert boxes["moe.experts.10.w1"] == Chunk((10, 0, 0), (1, 2, 3))
    assert boxes["moe.experts.2.w3"] == Chunk((2, 2, 0), (1, 2, 3))
    saving = Conversions(renamings=[renaming("mlp.", "moe.")], converters=[PART])
    (back,) = saving.split({"mlp.experts.gate_up": found.tensor}).values()
    assert {piece.name: piece.chunk for piece in back.pieces} == boxes
    assert {piece.shape for piece in back.pieces} == {(2, 3)}


def test_files_in_the_models_own_format_are_read_as_they_are() -> None:
    saved = {"mlp.experts.gate_up": SavedTensor((2, 4, 3), F32)}
    found = Conversions(converters=[JOIN]).assemble(saved, {"mlp.experts.gate_up"})
    assert [piece.name for piece in found["mlp.experts.gate_up"].pieces] == ["mlp.experts.gate_up"]


def test_the_prefix_of_a_base_model_is_put_before_or_taken_off() -> None:
    saved = {"h.0.weight": SavedTensor((1,), F32), "head.weight": SavedTensor((1,), F32)}
    found = Conversions(prefix="base").assemble(saved, {"base.h.0.weight", "head.weight"})
    assert set(found) == {"base.h.0.weight", "head.weight"}
    found = Conversions(prefix="base").assemble({"base.h.0.weight": SavedTensor((1,), F32)}, {"h.0.weight"})
    assert set(found) == {"h.0.weight"}


def test_expressions_rename_and_others_leave_out() -> None:
    conversions = Conversions(patterns=[(r"^text\.(\d+)", r"layers.\1")], ignored=[r"inv_freq$"])
    saved = {"text.3.weight": SavedTensor((1,), F32), "rope.inv_freq": SavedTensor((1,), F32)}
    assert set(conversions.assemble(saved, {"layers.3.weight"})) == {"layers.3.weight"}
    assert set(conversions.assemble(saved, {"layers.3.weight", "rope.inv_freq"})) == {
        "layers.3.weight",
        "rope.inv_freq",
    }


@pytest.mark.parametrize(
    ("saved", "converter", "expected"),
    [
        ({"a.experts.0.w1": SavedTensor((2, 3), F32), "a.experts.1.w1": SavedTensor((2, 3), BF16)}, JOIN, "don't fit"),
        (
            {"a.experts.0.w1": SavedTensor((2, 3), F32)},
            Transform(GATES, [".experts.gate_up"], [Transpose()]),
            "by Transpose, which is not supported: load it by from_pretrained",
        ),
        ({"a.x": SavedTensor((1,), F32), "b.x": SavedTensor((1,), F32)}, None, "a.x and b.x are both c.x"),
    ],
)
def test_what_can_not_be_put_together_says_why(saved: dict[str, SavedTensor], converter: Any, expected: str) -> None:
    conversions = Conversions(patterns=[(r"^[ab]\.x", "c.x")], converters=[converter] if converter else [])
    with pytest.raises(ValueError, match=expected):
        conversions.assemble(saved, {"a.experts.gate_up", "c.x"})


def test_what_can_not_be_taken_apart_says_why() -> None:
    undo = Transform([".experts.gate_up"], [".experts.*.w1"], [Transpose()])
    with pytest.raises(ValueError, match=r"made by Transpose.*save_original_format=False"):
        Conversions(converters=[undo]).split({"a.experts.gate_up": SavedTensor((2, 4, 3), F32)})
    with pytest.raises(ValueError, match="3 elements along dimension 1 are not 2 equal parts"):
        Conversions(converters=[PART]).split({"a.experts.gate_up": SavedTensor((2, 3, 3), F32)})
