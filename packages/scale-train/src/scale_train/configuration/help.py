"""The texts of `scale-train --help` and `scale-train lm --help`, made from the table of options."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scale_train.configuration.fields import OptionField, option_fields, purpose_of, table_help
from scale_train.options import Options

HELP = ("-h, --help", "Print this, and end.")
_GENERAL = (
    ("--config FILE", "Read options from a TOML file. Flags override the file."),
    ("--print-config", "Print the TOML file that repeats the run, and end."),
    HELP,
)
_COLUMN = 26  # where the texts begin
_COMMAND_COLUMN = 12


def overview(commands: Iterable[tuple[str, str]], width: int | None = None) -> str:
    """Returns all commands, each with the sentence on it."""
    width = width or _terminal_width()
    lines = ["usage: scale-train COMMAND [OPTIONS]", "", "The training program of scale. Commands:", ""]
    for name, text in commands:
        lines += _entry(name, text, width, _COMMAND_COLUMN)
    return "\n".join([*lines, "", "scale-train COMMAND --help shows the options of a command."])


def help_text(width: int | None = None) -> str:
    """Returns all options of `scale-train lm`, by their tables."""
    groups: dict[str, list[OptionField]] = {}
    for field in option_fields().values():
        groups.setdefault(f"[{field.table}] {table_help(field.table)}", []).append(field)
    usage = "usage: scale-train lm [--config FILE] [OPTIONS]"
    return help_page(usage, purpose_of(Options), _GENERAL, groups, width)


def help_page(
    usage: str,
    text: str,
    general: Sequence[tuple[str, str]],
    groups: Mapping[str, Sequence[OptionField]],
    width: int | None = None,
) -> str:
    """Returns a help text: the usage, the purpose of the command, and its options by groups with a title each."""
    width = width or _terminal_width()
    lines = [usage]
    for paragraph in text.split("\n\n"):
        lines += ["", *textwrap.wrap(paragraph, width)]
    lines.append("")
    for flag, meaning in general:
        lines += _entry(flag, meaning, width)
    for title, fields in groups.items():
        lines += ["", *textwrap.wrap(title, width)]
        for field in fields:
            default = default_text(field)
            meaning = f"{field.help} (default: {default})" if default else field.help
            lines += _entry(f"{field.flag} {field.placeholder}".rstrip(), meaning, width)
    return "\n".join(lines)


def default_text(field: OptionField) -> str:
    """Returns the default as you write it on a command line; "" where the help text says it."""
    value = field.default
    if value is None or value in ((), ""):
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, Path | str):
        return str(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _terminal_width() -> int:
    return min(100, shutil.get_terminal_size().columns)


def _entry(flag: str, text: str, width: int, column: int = _COLUMN) -> list[str]:
    """The flag, and next to it or below it the text."""
    body = textwrap.wrap(text, max(30, width - column), break_on_hyphens=False)
    indented = [" " * column + line for line in body]
    if len(flag) + 4 > column:
        return [f"  {flag}", *indented]
    return [f"  {flag}".ljust(column) + (body[0] if body else ""), *indented[1:]]
