"""Launch: joins the ranks that torchrun started, or starts ranks of its own; an error is printed once, in one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch

from scale_core import fault_points
from scale_core.errors import ContractError, ScaleDistributedError, ScaleError
from scale_core.launch import LaunchError, init_distributed, launch_local
from scale_train.configuration.resolve import resolve_device
from scale_train.errors import InputError, Interrupted, RanksLost, TrainingDiverged
from scale_train.launch.standard_streams import open_standard_streams
from scale_train.options import Options
from scale_train.training.memory import check_fits
from scale_train.training.train import RunSummary, train_language_model

# Long enough to finish a step and save it after a signal.
GRACE_SECONDS = 60.0

# Of a message of a rank to the program: writes up to this size are atomic, so messages of two ranks never mix.
_PIPE_CHARACTERS = 800


@dataclass(frozen=True)
class RankExit:
    """How a rank ended early."""

    code: int
    message: str
    scope: str = "all"  # which ranks found the same: "all", those of this "machine", or this "rank" alone
    rank: int = 0
    diverged: bool = False

    def to_error(self) -> ScaleError:
        """Returns it as an exception, for programs that call `train`."""
        text = self.message.partition(": ")[2] or "its error is printed above"
        if self.code == InputError.exit_code:
            return InputError(text)
        if self.code > 128:
            return Interrupted(self.code - 128, text)
        return TrainingDiverged(text) if self.diverged else RanksLost(text)

    def should_print(self, environment: Mapping[str, str]) -> bool:
        """Whether this rank prints it, where each has its own standard error: one of those that found it does."""
        if self.scope == "rank":
            return True
        return environment.get("RANK" if self.scope == "all" else "LOCAL_RANK", "0") == "0"


def is_under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def launch_and_collect(
    fn: Callable[..., object], num_ranks: int, *args: Any, device: str, grace: float
) -> tuple[int, list[Any]]:
    """Calls `launch_local` and returns its exit code and the result of `fn` on each rank, in the order of arrival.

    None is not sent. Where several ranks return something, each must be small once pickled: `shortened` for messages.
    """
    receiver, sender = Pipe(duplex=False)  # no file: the disk may be full
    results: list[Any] = []
    with receiver:
        reader = Thread(target=_receive_all, args=(receiver, results), daemon=True)
        reader.start()
        with sender:
            code = launch_local(_send_result, num_ranks, fn, sender, *args, device=device, grace=grace)
        reader.join()
    return code, results


def _receive_all(receiver: Connection, results: list[Any]) -> None:
    """Reads while ranks run: a pipe that nobody reads is full after some kilobytes."""
    with suppress(EOFError, OSError):
        while True:
            results.append(receiver.recv())


def _send_result(fn: Callable[..., object], sender: Connection, *args: Any) -> None:
    """Of a started rank: sends the result of `fn`."""
    result = fn(*args)
    if result is not None:
        sender.send(result)


def shortened(message: str) -> str:
    """Returns a message of a rank in one line, short enough to be sent with the messages of other ranks."""
    message = " ".join(message.split())
    return message if len(message) <= _PIPE_CHARACTERS else message[:_PIPE_CHARACTERS] + " ..."


def start_ranks(options: Options, num_ranks: int) -> RunSummary | RankExit:
    """Trains on ranks that it starts."""
    code, results = launch_and_collect(
        _started_rank, num_ranks, options, device=resolve_device(options.parallel.device), grace=GRACE_SECONDS
    )
    exits = [result for result in results if isinstance(result, RankExit)]
    if exits:
        return min(exits, key=lambda ended: ended.rank)
    if code:
        return RankExit(code, "")  # The rank has printed its error.
    summary: RunSummary
    (summary,) = results
    return summary


def _started_rank(options: Options) -> RunSummary | RankExit | None:
    """Returns the rank's expected end, which is not a failure of the process, or the summary of rank 0."""
    open_standard_streams()
    # Until the loop catches it, Ctrl-C ends the rank at once: it may wait for one that has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ended = train_rank(options)
    return ended if isinstance(ended, RankExit) or _own_rank() == 0 else None


def train_rank(options: Options) -> RunSummary | RankExit:
    """Trains as one of the ranks that torchrun or this program started, or alone."""
    scope, rank = "machine", 0
    try:
        _check_environment(options)
        group = init_distributed(device=resolve_device(options.parallel.device))
        scope, rank = "all", group.rank
        summary = train_language_model(options, group)
        if fault_points.active is not None:
            fault_points.active("teardown", "")
    except LaunchError as error:
        return _exit_of(InputError.exit_code, error, "rank", _own_rank())
    except RanksLost as error:
        return _exit_of(error.exit_code, error, "rank", rank)
    except (InputError, TrainingDiverged, Interrupted) as error:
        return _exit_of(error.exit_code, error, scope, rank)
    except ContractError:
        raise  # as in `train_language_model`
    except ScaleDistributedError as error:  # before the first step, or while a checkpoint is loaded
        lost = RanksLost(f"lost the other ranks before the first step ({str(error).partition(chr(10))[0]})")
        return _exit_of(lost.exit_code, lost, "rank", rank)
    except KeyboardInterrupt:
        return RankExit(130, "", rank=rank)
    return summary


def _exit_of(code: int, error: Exception, scope: str, rank: int) -> RankExit:
    speaker = f"scale-train, rank {rank}" if scope == "rank" else "scale-train"
    return RankExit(code, shortened(f"{speaker}: {error}"), scope, rank, isinstance(error, TrainingDiverged))


def _own_rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _check_environment(options: Options) -> None:
    """Checks that the started ranks are those asked for and have devices and memory; equal on all of a machine."""
    num_ranks, started = options.parallel.ranks, _number_in("WORLD_SIZE")
    if num_ranks is not None and num_ranks != started:
        raise InputError(f"--ranks {num_ranks}: torchrun started {started} ranks; leave --ranks away under torchrun")
    num_local = _number_in("LOCAL_WORLD_SIZE")
    if resolve_device(options.parallel.device) == "cuda" and num_local > torch.cuda.device_count():
        raise InputError(
            f"more ranks than this machine's devices: {num_local} ranks were started, and there are "
            f"{torch.cuda.device_count()} GPUs"
        )
    check_fits(options, num_local, started)


def _number_in(variable: str) -> int:
    text = os.environ.get(variable, "1")
    if not text.isdecimal():
        raise InputError(f"{variable}={text}: a number is needed; start the ranks with torchrun, which sets it")
    return int(text)
