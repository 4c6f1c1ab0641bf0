"""The command `scale-train`. It loads torch when it is known which command needs it.

Exit codes: 0 done; 1 the training failed, a snapshot is damaged, two checkpoints differ, ranks do not work; 2 wrong
input; 130 stopped by Ctrl-C, 143 stopped by SIGTERM. After the last two the last step of a training is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from scale_train.doctor.options import DoctorOptions
from scale_train.interrupts import leave_on_ctrl_c
from scale_train.options import Options
from scale_train.pipe.options import PipeOptions
from scale_train.plan.options import PlanOptions
from scale_train.snapshot.options import SnapshotOptions
from scale_train.why.options import WhyOptions

DESCRIPTION = """The training program of scale.

lm        trains a GPT on the bytes of real text and reports how well it predicts text that it has not seen.
plan      says which way of training a model fits into the memory of a machine, and what each costs.
doctor    says whether training on several ranks works on this machine, and how fast its memory and links are.
pipe      draws the schedule of a pipeline, planned beside measured.
snapshot  lists, verifies, compares, converts and prunes checkpoints.
why       says in one sentence why a training on several ranks ended, from what the ranks left behind."""


Command = Options | PlanOptions | DoctorOptions | PipeOptions | SnapshotOptions | WhyOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `scale-train` and returns its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else list(arguments))
    except SystemExit as end:  # how tyro ends, after --help and after an option that it does not know
        return end.code if isinstance(end.code, int) else 2
    try:
        return _command_for(options)(options)
    except KeyboardInterrupt:
        return 130


def parse(arguments: list[str]) -> Command:
    """Parses a command line; a SystemExit for --help (code 0) and unknown options (code 2)."""
    chosen: Command = tyro.extras.subcommand_cli_from_dict(
        {
            "lm": Options,
            "plan": PlanOptions,
            "doctor": DoctorOptions,
            "pipe": PipeOptions,
            "snapshot": SnapshotOptions,
            "why": WhyOptions,
        },
        prog="scale-train",
        description=DESCRIPTION,
        args=with_bare_flag(arguments),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
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


def _command_for(options: Command) -> Callable[[Any], int]:
    with leave_on_ctrl_c():
        if isinstance(options, WhyOptions):
            from scale_train.why.command import why

            return why
        if isinstance(options, PlanOptions):
            from scale_train.plan.command import plan

            return plan
        if isinstance(options, DoctorOptions):
            from scale_train.doctor.command import doctor

            return doctor
        if isinstance(options, PipeOptions):
            from scale_train.pipe.command import pipe

            return pipe
        if isinstance(options, SnapshotOptions):
            from scale_train.snapshot.commands import snapshot

            return snapshot
        from scale_train.lm import language_model

        return language_model
