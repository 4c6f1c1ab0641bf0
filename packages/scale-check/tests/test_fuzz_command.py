"""`scale-check fuzz`: right libraries have no finding, mistakes are found and made small, errors are counted."""

from __future__ import annotations

import json

import pytest

from scale_check.cli import main
from scale_check.fuzz import models, programs
from scale_check.fuzz.command import FuzzFinding, fuzz
from scale_check.fuzz.engines import ENGINES
from scale_check.fuzz.pool import Outcome, kind_of, run_in_turn
from scale_check.fuzz.programs import program_of, smaller
from scale_check.harness import parity


def test_a_seed_is_one_program_and_its_text_is_its_code() -> None:
    names = {**vars(models), **vars(programs)}
    for seed in range(20):
        program = program_of("ddp", seed)
        assert program == program_of("ddp", seed)
        assert eval(repr(program), names) == program


def test_smaller_programs_have_one_thing_less() -> None:
    program = program_of("ddp", 3)
    candidates = list(smaller(program))
    assert program not in candidates and len(set(map(repr, candidates))) > 5


def test_right_programs_have_no_finding() -> None:
    summary = fuzz("ddp", range(6), 2)
    assert summary.is_right and not summary.findings
    assert str(summary).startswith("6 programs: 6 compute what one process does, 0 do not, 0 raise an error")


def findings_of(engine: str, seeds: range) -> list[FuzzFinding]:
    told: list[FuzzFinding] = []
    summary = fuzz(f"planted_engines:{engine}", seeds, 2, tell=told.append)
    assert not summary.is_right
    return told


def test_a_wrong_accumulation_is_found_and_made_small() -> None:
    finding, *_ = findings_of("SumOfGradients", range(4))
    (step,) = finding.program.steps
    assert finding.kind == "different" and step.no_sync and step.clip is None
    assert finding.program.model.blocks == () and finding.program.optimizer == "SGD"
    assert finding.text.startswith("step 1: gradient of ")


def test_a_wrong_clipping_is_found_and_made_small() -> None:
    finding, *_ = findings_of("OtherClipping", range(4))
    (step,) = finding.program.steps
    assert step.clip is not None and step.passes == 1
    assert finding.text.startswith("step 1: gradient of ")


def test_a_program_that_is_printed_can_be_given_to_parity() -> None:
    run = programs.Run(program_of("ddp", 2))
    parity(run.build, run.step, run.wrap, batches=run.batches(2), optimizer=run.optimizer, dtype=None)


def test_errors_of_all_ranks_count_and_are_no_wrong_numbers() -> None:
    summary = fuzz("planted_engines:Refusing", range(3), 2)
    assert summary.is_right and summary.count("error") == 3
    assert "3 times error: TypeError: rank # of # does not like #" in str(summary)


def double(number: int, folder: object) -> int:
    if number == 3:
        raise ValueError("no three")
    return 2 * number


def test_a_program_that_raises_does_not_keep_others_from_running() -> None:
    outcomes: list[Outcome[int, int]] = list(run_in_turn(double, [1, 3, 5], 2))
    assert [outcome.results for outcome in outcomes] == [(2, 2), (), (10, 10)]
    assert outcomes[1].is_clean and kind_of(outcomes[1].failure) == "ValueError: no three"


def test_the_command_prints_json_and_has_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--engine", "ddp", "--programs", "2"]) == 0
    assert "2 programs: 2 compute" in capsys.readouterr().out
    options = ["--programs", "4", "--no-shrink", "--json"]
    assert main(["fuzz", "--engine", "planted_engines:OtherClipping", *options]) == 1
    first = json.loads(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("{")))
    assert first["kind"] == "different" and first["report"]["first"]["step"] >= 1
    for wrong in (["--engine", "horovod"], ["--engine", "nowhere:Engine"], ["--engine", "ddp", "--programs", "0"]):
        with pytest.raises(SystemExit):
            main(["fuzz", *wrong])


def test_an_engine_whose_library_is_missing_is_a_wrong_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ENGINES["deepspeed3"], "library", "no_such_library")
    with pytest.raises(SystemExit) as caught:
        main(["fuzz", "--engine", "deepspeed3"])
    assert caught.value.code == 2
    assert "deepspeed3 trains with no_such_library, which is not installed: pip install" in capsys.readouterr().err
