"""The command `scale-train`. It loads torch when it is known which command needs it.

Exit codes: 0 done; 1 the training failed, a snapshot is damaged, two checkpoints differ, ranks do not work; 2 wrong
input; 130 stopped by Ctrl-C, 143 stopped by SIGTERM. After the last two the last step of a training is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from scale_train.configuration.command_line import PRINT_CONFIG, parse_command_line
from scale_train.configuration.help import help_text, overview
from scale_train.configuration.problems import OptionsError
from scale_train.configuration.toml_file import to_toml
from scale_train.doctor.options import DoctorOptions
from scale_train.interrupts import leave_on_ctrl_c
from scale_train.options import Options
from scale_train.pipe.options import PipeOptions
from scale_train.plan.help import plan_help_text
from scale_train.plan.options import PlanOptions
from scale_train.snapshot.options import SnapshotOptions
from scale_train.trained_model.options import ExportOptions, PplOptions
from scale_train.why.options import WhyOptions

Command = (
    Options | PplOptions | ExportOptions | PlanOptions | DoctorOptions | PipeOptions | SnapshotOptions | WhyOptions
)

COMMANDS = {
    "lm": "Train a language model on text, and report how well it predicts text that it has not seen.",
    "ppl": "Say how well a trained model predicts a text: loss, perplexity, bits per byte.",
    "export": "Write the model of a run as a folder that transformers reads.",
    "plan": "Say which parallelism fits the memory of a machine, and what each costs.",
    "doctor": "Test if training on several ranks works here, and how fast memory and links are.",
    "pipe": "Draw the schedule of a pipeline, planned and measured.",
    "snapshot": "List, verify, compare, convert and prune checkpoints.",
    "why": "Say in one sentence why a run on several ranks ended.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `scale-train` and returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(words) and (page := _help_page(words[0])):
        print(page)
        return 0
    try:
        options = parse(words)
        if isinstance(options, Options) and PRINT_CONFIG in words:
            print(to_toml(options), end="")
            return 0
    except OptionsError as error:
        print(error.lines(), file=sys.stderr)
        return 2
    except SystemExit as end:  # how tyro ends, after --help and after an option that it does not know
        return end.code if isinstance(end.code, int) else 2
    try:
        return _command_for(options)(options)
    except KeyboardInterrupt:
        return 130


def _help_page(first: str) -> str:
    """Returns the text of --help after this word; "" for commands whose help tyro prints."""
    if first in ("-h", "--help"):
        return overview(COMMANDS.items())
    return {"lm": help_text, "plan": plan_help_text}.get(first, str)()


def parse(arguments: list[str]) -> Command:
    """Parses a command line; an OptionsError, or a SystemExit for --help (code 0) and unknown options (code 2)."""
    if arguments[:1] == ["lm"]:
        return parse_command_line(arguments[1:])
    chosen: Command = tyro.extras.subcommand_cli_from_dict(
        {
            "lm": Options,
            "ppl": PplOptions,
            "export": ExportOptions,
            "plan": PlanOptions,
            "doctor": DoctorOptions,
            "pipe": PipeOptions,
            "snapshot": SnapshotOptions,
            "why": WhyOptions,
        },
        prog="scale-train",
        description="The training program of scale.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return chosen


def _command_for(options: Command) -> Callable[[Any], int]:
    with leave_on_ctrl_c():
        if isinstance(options, PplOptions):
            from scale_train.trained_model.perplexity import ppl

            return ppl
        if isinstance(options, ExportOptions):
            from scale_train.trained_model.export import export

            return export
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
