"""The newest snapshot without a NaN or an infinity."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from scale_snapshot import finite as finite_module
from scale_snapshot import latest_snapshot, save_snapshot


@pytest.mark.fault(113)
@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([1.0, math.nan]),
        torch.tensor([[1.0, -math.inf]], dtype=torch.bfloat16),
        torch.tensor([1.0, math.nan]).to(torch.float8_e5m2),
        torch.tensor([1.0, complex(0, math.nan)]),
        torch.cat([torch.ones(999), torch.tensor([math.inf])]),
        torch.tensor(math.inf),
    ],
    ids=["float32", "bfloat16", "float8", "complex", "at the end", "a scalar"],
)
def test_snapshots_with_a_nan_or_an_infinity_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: torch.Tensor
) -> None:
    monkeypatch.setattr(finite_module, "_PIECE_BYTES", 256)
    good = {"a": torch.arange(3), "b": torch.zeros_like(bad), "empty": torch.empty(0)}
    save_snapshot(tmp_path, 1, good)
    save_snapshot(tmp_path, 2, good)
    save_snapshot(tmp_path, 3, {**good, "b": bad})
    assert latest_snapshot(tmp_path) == tmp_path / "step-00000003"
    seen: list[int] = []
    with pytest.warns(UserWarning, match=r"passing over .*step-00000003: b has a NaN or an infinity"):
        assert latest_snapshot(tmp_path, finite=True, progress=seen.append) == tmp_path / "step-00000002"
    assert sum(seen) > (tmp_path / "step-00000002" / "rank-00000.safetensors").stat().st_size


@pytest.mark.filterwarnings("ignore:passing over:UserWarning")
def test_none_is_left_where_all_have_one(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, {"a": torch.tensor(math.nan)})
    assert latest_snapshot(tmp_path, finite=True) is None


def test_a_mask_of_zeros_and_infinities_is_no_reason(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -math.inf).triu(1)
    save_snapshot(tmp_path, 1, {"weight": torch.ones(2), "mask": mask})
    assert latest_snapshot(tmp_path, finite=True) == tmp_path / "step-00000001"
