"""Runs a program of a client on two ranks of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")


def launch(folder: Path, script: Path, *arguments: str, pythonpath: Path | None = None) -> str:
    """Runs a script on two ranks in a folder; returns what it prints.

    Args:
        folder: Where it runs.
        script: The script.
        *arguments: Its arguments.
        pythonpath: Where Python looks first, as for a `sitecustomize.py`.

    Raises:
        AssertionError: It failed; with all that it has printed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # They load their own files by torch.load as before 2.6.
    environment["PYTHONPATH"] = str(pythonpath or PROGRAMS)
    run = subprocess.run(
        [*command, str(script), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout[-20000:]
    return run.stdout


def run_program(name: str, folder: Path, way: str, stage: str = "begin") -> Any:
    """Runs `programs/{name}.py` with a way of training; returns what rank 0 writes.

    Args:
        name: Of the program. Rank 0 writes `result.json` into its folder.
        folder: Where it runs, and keeps its checkpoints between two stages.
        way: How it trains, as the program names it.
        stage: "begin", or "resume" from the checkpoint.
    """
    launch(folder, PROGRAMS / f"{name}.py", way, stage)
    return json.loads((folder / "result.json").read_text())
