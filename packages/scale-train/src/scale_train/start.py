"""Where ranks come from, and how what went wrong on them reaches the one person at the terminal.

Under torchrun each rank is a process that somebody else started; otherwise the program starts its own. Either way many
ranks find the same fault, and it must be told once, in one line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from scale_core.launch import LaunchError, init_distributed, launch_local
from scale_train.errors import InputError, Interrupted, TrainingDiverged
from scale_train.options import Options, device_type
from scale_train.run import language_model

# Long enough to finish a step and save it after a signal.
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, if not by the report.

    Attributes:
        code: The exit code.
        message: For the person at the terminal.
    """

    code: int
    message: str


def is_under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether somebody else started the ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def join(options: Options) -> int:
    """Trains as one of the ranks that torchrun started, or alone; returns the exit code. Rank 0 says what was wrong."""
    outcome = train_rank(options)
    if outcome is None:
        return 0
    if outcome.message and os.environ.get("RANK", "0") == "0":
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.code


def start(options: Options, num_ranks: int) -> int:
    """Trains on ranks of its own, says once what went wrong, and returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="scale-train-") as folder:
        code = launch_local(
            _as_started_rank, num_ranks, options, folder, device=device_type(options), grace=GRACE_SECONDS
        )
        paths = sorted(Path(folder).glob("outcome-*.json"))
        outcomes = [Outcome(**json.loads(path.read_text())) for path in paths]
    if not outcomes:
        return code
    if outcomes[0].message:
        print(outcomes[0].message, file=sys.stderr, flush=True)
    return outcomes[0].code


def _as_started_rank(options: Options, folder: str) -> None:
    """What a started rank does: an expected end is left as a file, and is no failure of the process."""
    outcome = train_rank(options)
    if outcome is not None:
        path = Path(folder, f"outcome-{int(os.environ['RANK']):05}.json")
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(outcome)))
        partial.rename(path)


def train_rank(options: Options) -> Outcome | None:
    """Joins the others and trains; returns how it ended before its time, if it did."""
    try:
        _check_environment(options)
        language_model(options, init_distributed(device=device_type(options)))
    except (InputError, TrainingDiverged, Interrupted) as error:
        return Outcome(error.exit_code, f"scale-train: {error}")
    except LaunchError as error:
        return Outcome(InputError.exit_code, f"scale-train: {error}")
    except KeyboardInterrupt:
        return Outcome(130, "")
    return None


def _check_environment(options: Options) -> None:
    """Finds out whether the ranks that were started are those that were asked for and have devices.

    Raises:
        InputError: They have not. On all ranks of the machine, so that none waits for the others.
    """
    asked, started = options.parallel.ranks, int(os.environ.get("WORLD_SIZE", "1"))
    if asked is not None and asked != started:
        raise InputError(f"--ranks {asked}: torchrun started {started} ranks; leave --ranks away under torchrun")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device_type(options) == "cuda" and here > torch.cuda.device_count():
        raise InputError(
            f"more ranks than this machine's devices: {here} ranks were started, and there are "
            f"{torch.cuda.device_count()} GPUs"
        )
