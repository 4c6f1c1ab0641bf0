"""`scale-train pipe show`: a schedule in letters and as a picture, planned and, on ranks, measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scale_pipe import simulate
from scale_pipe.schedules.registry import get_schedule
from scale_tools.pipe.text_drawing import draw_text
from scale_train.cli import main
from scale_train.configuration.resolve import MAX_RANKS_PER_CORE


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["pipe", "show", *words]) == 0
    return capsys.readouterr().out


def test_each_computation_is_a_box_and_waiting_is_space() -> None:
    simulation = simulate(get_schedule("gpipe", 2, 2, 1))
    assert simulation.makespan == 9  # 2 ranks, 2 forwards of 1 and 2 backwards of 2
    assert draw_text(simulation, makespan=9, width=9 + 9 * 3).splitlines() == [
        "rank 0  |F0=F1=         B1----B0----",
        "rank 1  |   F0=F1=B1----B0----",
    ]
    # On half the width, a box keeps what there is room for.
    assert draw_text(simulation, makespan=18, width=9 + 9).splitlines()[0].startswith("rank 0  |F")


def test_a_plan_is_drawn_with_its_bubble(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    out = shown(capsys, "--ranks", "4", "--chunks", "8", "--width", "120", "--svg", str(picture))
    assert "1F1B: 4 stages on 4 ranks" in out and "planned: bubble 27.3%, 33 forwards" in out
    assert [line[:8] for line in out.splitlines() if line.startswith("rank")] == [f"rank {each}  " for each in range(4)]
    assert "F forward, B both gradients; spaces: waiting" in out
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    saved = tmp_path / "own.json"
    get_schedule("zb_v", 2, 4, 2).save(saved)
    content = json.loads(_json(capsys, "--schedule", str(saved), "--ranks", "2"))
    assert content["planned"]["bubble"] == simulate(get_schedule("zb_v", 2, 4, 2)).bubble
    assert content["schedule"]["rank_of_stage"] == [0, 1, 1, 0] and content["measured_on"] is None


def test_schedules_are_listed_the_shortest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipe", "ls", "--ranks", "4", "--chunks", "8"]) == 0
    out = capsys.readouterr().out
    assert out.index("zb_v ") < out.index("1f1b ") and "27.3%" in out
    assert main(["pipe", "ls", "--ranks", "2", "--chunks", "2", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["schedules"]
    assert [each["bubble"] for each in listed] == sorted(each["bubble"] for each in listed)
    assert {each["name"]: each["stages"] for each in listed}["zb_v"] == 4
    assert main(["pipe", "ls", "--chunks", "0"]) == 2


def test_a_measurement_has_no_more_ranks_than_the_cores_can_take(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (os.cpu_count() or 1) * MAX_RANKS_PER_CORE + 1
    assert main(["pipe", "show", "--ranks", str(asked), "--measure"]) == 2
    assert f"--ranks {asked}: --measure starts as many here" in capsys.readouterr().err


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    return shown(capsys, "--json", *words)


def test_what_was_measured_stands_beside_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "both.svg"
    words = f"--ranks 2 --stages 2 --schedule gpipe --chunks 3 --measure --svg {picture}".split()
    content: dict[str, Any] = json.loads(_json(capsys, *words))
    assert content["planned"]["bubble"] == pytest.approx(1 / 4)
    measured, planned = content["measured"], content["planned_with_measured_times"]
    # The same computations, each as long as it was: what else there is is waiting.
    assert 0 < planned["makespan"] <= measured["makespan"] and 0 < measured["bubble"] < 1
    assert picture.read_text(encoding="utf-8").count("<text") > 10 and "makespan" in picture.read_text(encoding="utf-8")


@pytest.mark.soak
def test_solve_is_measured_and_found(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--schedule", "solve", "--measure", "--chunks", "4")
    assert "measured: bubble" in out and "planned, measured times: bubble" in out


@pytest.mark.parametrize(
    "words, line",
    [
        ("--schedule 2f2b", "there is no schedule '2f2b'; there are gpipe"),
        ("--schedule solve", "--schedule solve: it is found for measured times; add --measure"),
        ("--stages 3", "--stages 3 does not divide among 2 ranks; take 2 or a multiple"),
        ("--ranks 1000000", "--ranks 1000000: a number from 1 to 1024"),
        ("--chunks 0", "--chunks 0: a number from 1"),
        ("--width 5", "--width 5: 40 or more"),
        ("--device tpu", "invalid choice 'tpu' for argument '--device'"),
        ("--svg no/such.svg", "such.svg: No such file or directory"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipe", "show", *words.split()]) == 2
    assert line in capsys.readouterr().err
