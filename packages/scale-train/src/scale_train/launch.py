"""Where ranks come from, and how what went wrong on them reaches the one person at the terminal.

Under torchrun each rank is a process that somebody else started; otherwise the program starts its own. Either way many
ranks find the same fault, and it must be told once, in one line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from scale_core.launch import LaunchError, init_distributed, launch_local
from scale_train.config.options import Options
from scale_train.config.resolve import device_type
from scale_train.errors import InputError, Interrupted, RanksLost, TrainingDiverged
from scale_train.memory import check_fits
from scale_train.train import language_model

# Long enough to finish a step and save it after a signal.
GRACE_SECONDS = 60.0


# A message of a rank to the program; pipes take so much at once, and the messages of ranks do not mix.
_PIPE_CHARACTERS = 800


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, if not by the report.

    Attributes:
        code: The exit code.
        message: For the person at the terminal.
        found_by: Which ranks found the same: "all" of them, those of this "machine", or this "rank" alone.
        rank: Who says it.
    """

    code: int
    message: str
    found_by: str = "all"
    rank: int = 0

    def is_to_be_said(self, environment: Mapping[str, str]) -> bool:
        """Whether this rank has to say it, where each has its own standard error: one of those that found it does."""
        if self.found_by == "rank":
            return True
        return environment.get("RANK" if self.found_by == "all" else "LOCAL_RANK", "0") == "0"


def is_under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether somebody else started the ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def join(options: Options) -> int:
    """Trains as one of the ranks that torchrun started, or alone; returns the exit code, and says what was wrong."""
    outcome = train_rank(options)
    if outcome is None:
        return 0
    if outcome.message and outcome.is_to_be_said(os.environ):
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.code


def start(options: Options, num_ranks: int) -> int:
    """Trains on ranks of its own, says once what went wrong, and returns the exit code."""
    receiver, sender = Pipe(duplex=False)  # no file: the disk may be what is full
    with receiver:
        with sender:
            code = launch_local(
                _as_started_rank, num_ranks, options, sender, device=device_type(options), grace=GRACE_SECONDS
            )
        outcomes = _received(receiver)
    if not outcomes:
        return code
    first = min(outcomes, key=lambda outcome: outcome.rank)
    if first.message:
        print(first.message, file=sys.stderr, flush=True)
    return first.code


def _received(receiver: Connection) -> list[Outcome]:
    outcomes = []
    with suppress(EOFError, OSError):
        while True:
            outcomes.append(receiver.recv())
    return outcomes


def _as_started_rank(options: Options, sender: Connection) -> None:
    """What a started rank does: an expected end is told to the program, and is no failure of the process."""
    # Until the loop catches it, Ctrl-C ends the rank at once: it may be waiting for one that has gone already.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    outcome = train_rank(options)
    if outcome is not None:
        sender.send(outcome)


def train_rank(options: Options) -> Outcome | None:
    """Joins the others and trains; returns how it ended before its time, if it did."""
    found_by, rank = "machine", 0
    try:
        _check_environment(options)
        group = init_distributed(device=device_type(options))
        found_by, rank = "all", group.rank
        language_model(options, group)
    except LaunchError as error:
        return _outcome(InputError.exit_code, error, "rank", _own_rank())
    except RanksLost as error:
        return _outcome(error.exit_code, error, "rank", rank)
    except (InputError, TrainingDiverged, Interrupted) as error:
        return _outcome(error.exit_code, error, found_by, rank)
    except KeyboardInterrupt:
        return Outcome(130, "", rank=rank)
    return None


def _outcome(code: int, error: Exception, found_by: str, rank: int) -> Outcome:
    speaker = f"scale-train, rank {rank}" if found_by == "rank" else "scale-train"
    message = " ".join(f"{speaker}: {error}".split())
    if len(message) > _PIPE_CHARACTERS:
        message = message[:_PIPE_CHARACTERS] + " ..."
    return Outcome(code, message, found_by, rank)


def _own_rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _check_environment(options: Options) -> None:
    """Finds out whether the ranks that were started are those that were asked for and have devices.

    Raises:
        InputError: They have not, or the machine has not memory enough for their models. On all ranks of the machine,
            so that none waits for the others.
    """
    asked, started = options.parallel.ranks, _number_in("WORLD_SIZE")
    if asked is not None and asked != started:
        raise InputError(f"--ranks {asked}: torchrun started {started} ranks; leave --ranks away under torchrun")
    here = _number_in("LOCAL_WORLD_SIZE")
    if device_type(options) == "cuda" and here > torch.cuda.device_count():
        raise InputError(
            f"more ranks than this machine's devices: {here} ranks were started, and there are "
            f"{torch.cuda.device_count()} GPUs"
        )
    check_fits(options, here, started)


def _number_in(variable: str) -> int:
    text = os.environ.get(variable, "1")
    if not text.isdecimal():
        raise InputError(f"{variable}={text}: a number is needed; start the ranks with torchrun, which sets it")
    return int(text)
