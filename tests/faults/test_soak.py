"""benchmarks/soak.py in its smallest form: a rank is killed, torchrun starts the ranks again, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def soak(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.fault(15)
@pytest.mark.soak  # The default run has test_train_launch.py's restart.
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with torchrun's agent as Linux has it")
@pytest.mark.parametrize("seed", range(1, 11))  # Ranks that start again find each other, or don't, by chance.
def test_a_killed_rank_is_restarted_and_nothing_is_lost(seed: int) -> None:
    told = soak("--smoke", "--seed", str(seed))
    assert "1 faults" in told and "different: nothing" in told


@pytest.mark.fault(15, place="faults that a seed draws, for two minutes")
@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with torchrun's agent as Linux has it")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_it_is_so_with_every_technique_and_faults_of_every_sort(kind: str) -> None:
    assert "different: nothing" in soak("--kinds", kind, "--minutes", "2")
