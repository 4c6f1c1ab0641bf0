"""The command `scale-train`: checks its options, and joins the ranks that torchrun started or starts its own.

Exit codes: 0 done, 1 the training failed, 2 wrong input, 130 stopped by Ctrl-C, 143 stopped by SIGTERM. After the last
two the last step is saved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tyro

from scale_train.data import check_length, read_text
from scale_train.errors import InputError
from scale_train.launch import is_under_torchrun, run_as_rank, start_ranks
from scale_train.memory import check_fits
from scale_train.options import Options
from scale_train.resolve import check_options, num_local_ranks

DESCRIPTION = """The training program of scale.

lm  trains a GPT on the bytes of real text and reports how well it predicts text that it has not seen."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `scale-train` and returns its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else list(arguments))
    except SystemExit as end:  # how tyro ends, after --help and after an option that it does not know
        return end.code if isinstance(end.code, int) else 2
    try:
        return language_model(options)
    except InputError as error:
        print(f"scale-train: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def parse(arguments: list[str]) -> Options:
    """Parses a command line; a SystemExit for --help (code 0) and unknown options (code 2)."""
    chosen: Options = tyro.extras.subcommand_cli_from_dict(
        {"lm": Options},
        prog="scale-train",
        description=DESCRIPTION,
        args=with_bare_flag(arguments),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return chosen


def with_bare_flag(arguments: list[str]) -> list[str]:
    """Returns a command line in which `--checkpoint-activations` alone says "all"."""
    spelled = []
    for place, word in enumerate(arguments):
        spelled.append(word)
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
        if word == "--checkpoint-activations" and following.startswith("--"):
            spelled.append("all")
    return spelled


def language_model(options: Options) -> int:
    """`scale-train lm`: checks, and starts or joins the ranks."""
    if is_under_torchrun(os.environ):
        return run_as_rank(options)
    num_ranks = num_local_ranks(options)
    check_options(options, num_ranks)
    check_fits(options, num_ranks)
    check_length(read_text(options.data.text), options.data.sequence)
    return run_as_rank(options) if num_ranks == 1 else start_ranks(options, num_ranks)
