"""`scale-train lm --help`, made from the table of options."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from scale_train.configuration.fields import OptionField, option_fields, table_help
from scale_train.options import Options

_GENERAL = (
    ("--config FILE", "Take options from a TOML file; those on the command line override it."),
    ("--print-config", "Print the TOML file that repeats the run, and end."),
    ("-h, --help", "Print this, and end."),
)
_COLUMN = 26  # where the texts begin


def help_text(width: int | None = None) -> str:
    """Returns all options of `scale-train lm`, by their tables."""
    width = width or min(100, shutil.get_terminal_size().columns)
    lines = ["usage: scale-train lm [--config FILE] [OPTIONS]", "", *textwrap.wrap(Options.__doc__ or "", width), ""]
    for flag, text in _GENERAL:
        lines += _entry(flag, text, width)
    table = ""
    for field in option_fields().values():
        if field.table != table:
            table = field.table
            lines += ["", *textwrap.wrap(f"[{table}] {table_help(table)}", width)]
        default = default_text(field)
        text = f"{field.help} (default: {default})" if default else field.help
        lines += _entry(f"{field.flag} {field.placeholder}", text, width)
    return "\n".join(lines)


def default_text(field: OptionField) -> str:
    """Returns the default as it is written on a command line; "" where the help text says it."""
    value = field.default
    if value is None or value in ((), ""):
        return ""
    if isinstance(value, Path | str):
        return str(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _entry(flag: str, text: str, width: int) -> list[str]:
    """The flag, and beside it or below it the text."""
    body = textwrap.wrap(text, max(30, width - _COLUMN))
    indented = [" " * _COLUMN + line for line in body]
    if len(flag) + 4 > _COLUMN:
        return [f"  {flag}", *indented]
    return [f"  {flag}".ljust(_COLUMN) + (body[0] if body else ""), *indented[1:]]
