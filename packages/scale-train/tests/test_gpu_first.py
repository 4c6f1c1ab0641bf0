"""benchmarks/gpu_first.py: parts run on the CPU, what hangs is ended, and figures stand with those expected."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_first.py"


@pytest.fixture
def gpu_first(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_first", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_first", module)
    spec.loader.exec_module(module)
    return module


def test_parts_leave_their_figures_in_files(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--stand-in", "--out", str(tmp_path), "--parts", "nccl", "kernels"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    contents = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(contents) == {"nccl", "kernels"}
    assert all(content["status"] == "ok" and content["stand_in"] for content in contents.values())
    calls = contents["nccl"]["figures"]
    assert len(calls) >= 5 and all(entry == {"measured": "equal"} for entry in calls.values())
    assert contents["kernels"]["figures"]["MoE: ms"]["measured"] > 0


def test_a_part_that_hangs_is_ended_and_keeps_its_figures(
    gpu_first: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(
        "import sys, time\n"
        "open(sys.argv[sys.argv.index('--figures') + 1], 'w').write('[\"first\", 1]\\n[\"sec')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_first, "__file__", str(program))
    part = gpu_first.Part("nccl", 600, (gpu_first.Expected("first", at_most=2),))
    content = gpu_first.run(part, tmp_path, stand_in=False, limit_seconds=3.0)
    assert content["status"] == "ended after its 3 s"
    assert content["figures"] == {"first": {"measured": 1, "expected": "<= 2", "met": True}}
    assert json.loads((tmp_path / "nccl.json").read_text()) == content


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"at_most": 1.3}, 1.3, 1.31),
        ({"at_least": 0.98, "at_most": 1.02}, 1.0, 0.97),
        ({"at_most": 1}, 0, "an error"),
        ({"equal": True}, True, False),
        ({"like": r"2\.(11|13)\..*"}, "2.11.0+cu130", "2.8.0"),
    ],
)
def test_a_figure_meets_what_is_expected_or_not(
    gpu_first: ModuleType, options: dict[str, Any], good: Any, bad: Any
) -> None:
    expected = gpu_first.Expected("a", **options)
    assert expected.is_met(good) and not expected.is_met(bad)


def test_all_parts_fit_into_fifteen_minutes(gpu_first: ModuleType) -> None:
    assert sum(part.limit_seconds for part in gpu_first.PARTS) <= 60 * gpu_first.MINUTES
