import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scale_core.comm.group import group_of
from scale_core.consistency.contract import Contract
from scale_core.errors import ScaleDistributedError
from scale_core.testing import run_ranks
from scale_train.cli import main

RECORDED = Path(__file__).parent / "recorded_logs"


def test_the_sentence_is_printed_with_code_0(capsys):
    assert main(["why", str(RECORDED / "raise")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "rank 1 raised ValueError: no such token: 70000 in step 4"


def test_json_is_one_object(capsys):
    assert main(["why", str(RECORDED / "kill" / "launcher.log"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank"], found["kind"], found["num_logs"]) == (1, "ended", 1)


def test_logs_that_do_not_say_why_are_code_1_and_none_code_2(capsys, tmp_path):
    (tmp_path / "a.log").write_text("all is well")
    assert main(["why", str(tmp_path)]) == 1
    assert "these 1 logs do not say why. If a rank was killed, only torchrun knows it" in capsys.readouterr().out
    assert main(["why", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["why", str(tmp_path / "empty")]) == 2
    assert "no logs in" in capsys.readouterr().err


def test_a_folder_of_records_that_no_rank_made_is_left_out(capsys, tmp_path):
    (tmp_path / "torchrun.log").write_text((RECORDED / "kill" / "launcher.log").read_text())
    assert main(["why", str(tmp_path / "torchrun.log"), str(tmp_path / "records")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("rank 1 was killed by SIGKILL")
    assert printed.err == f"scale-train: {tmp_path / 'records'}: no such file or folder\n"


def test_of_several_attempts_the_last_one_counts(capsys, tmp_path):
    for attempt, error in ((0, "ValueError: old"), (1, "ValueError: new")):
        folder = tmp_path / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"Traceback (most recent call last):\n{error}\n")
    assert main(["why", str(tmp_path)]) == 0
    assert "rank 0 raised ValueError: new" in capsys.readouterr().out


def rank_that_never_comes() -> None:
    contract = Contract(group_of(), limit_seconds=2.0)
    contract.check_equal("the settings", ["a"])
    if group_of().rank == 0:
        with pytest.raises(ScaleDistributedError):
            contract.check_equal("the plan", ["b"])


def test_flight_records_alone_are_enough(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SCALE_FLIGHT_RECORDS", str(tmp_path / "records"))
    run_ranks(rank_that_never_comes, 2)
    assert [path.name.startswith("rank-00000-") for path in (tmp_path / "records").iterdir()] == [True]
    assert main(["why", str(tmp_path / "records")]) == 0
    assert "rank 1 " in capsys.readouterr().out


def test_it_does_without_torch():
    program = (
        "import sys; from scale_train.cli import main; code = main(['why', sys.argv[1]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(RECORDED / "kill")], env=dict(os.environ), timeout=600, check=False
    )
    assert ended.returncode == 0
