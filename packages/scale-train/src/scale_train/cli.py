"""The command `scale-train`. It loads torch when it is known which command needs it.

Exit codes: 0 done; 1 the training failed, a snapshot is damaged, two checkpoints differ, ranks do not work; 2 wrong
input; 130 stopped by Ctrl-C, 143 stopped by SIGTERM. After the last two the last step of a training is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tyro

from scale_train.commands import OF_SCALE_TOOLS, OWN_COMMANDS, Command, installed_commands
from scale_train.configuration.command_line import PRINT_CONFIG, parse_command_line
from scale_train.configuration.help import overview
from scale_train.configuration.problems import OptionsError
from scale_train.configuration.toml_file import to_toml
from scale_train.launch.interrupts import leave_on_ctrl_c
from scale_train.options import Options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `scale-train` and returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    commands = OWN_COMMANDS if words[:1] and words[0] in OWN_COMMANDS else installed_commands()
    if words[:1] and words[0] in OF_SCALE_TOOLS and words[0] not in commands:
        print(f"scale-train {words[0]} is part of scale-tools: pip install scale-tools", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(words) and (page := _help_page(words[0], commands)):
        print(page)
        return 0
    try:
        options = parse(words, commands)
        if isinstance(options, Options) and PRINT_CONFIG in words:
            print(to_toml(options), end="")
            return 0
    except OptionsError as error:
        print(error.lines(), file=sys.stderr)
        return 2
    except SystemExit as end:  # how tyro ends, after --help and after an option that it does not know
        return end.code if isinstance(end.code, int) else 2
    try:
        with leave_on_ctrl_c():
            run = commands[words[0]].load()
        return run(options)
    except KeyboardInterrupt:
        return 130


def _help_page(first: str, commands: dict[str, Command]) -> str:
    """Returns the text of --help after this word; "" for commands whose help tyro prints."""
    if first in ("-h", "--help"):
        return overview((name, command.summary) for name, command in commands.items())
    text = commands[first].help_text if first in commands else None
    return text() if text else ""


def parse(arguments: list[str], commands: dict[str, Command] | None = None) -> Any:
    """Parses a command line into the options of its command.

    Raises an OptionsError for wrong options of `lm`; tyro raises SystemExit for --help (code 0) and for options and
    commands that do not exist (code 2).
    """
    if arguments[:1] == ["lm"]:
        return parse_command_line(arguments[1:])
    commands = installed_commands() if commands is None else commands
    return tyro.extras.subcommand_cli_from_dict(
        {name: command.options for name, command in commands.items()},
        prog="scale-train",
        description="The training program of scale.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
    )
