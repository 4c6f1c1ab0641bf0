"""The command line of `scale-train lm`: flags over a TOML file over the defaults, with all problems at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale_train.configuration.checks import option_problems
from scale_train.configuration.fields import option_fields
from scale_train.configuration.problems import OptionsError, nearest
from scale_train.configuration.toml_file import Given, Values, read_toml, value_of
from scale_train.options import Options

CONFIG, PRINT_CONFIG, HELP = "--config", "--print-config", "--help"


def parse_command_line(words: Sequence[str]) -> Options:
    """Parses the words after `scale-train lm`; an OptionsError with all mistakes, also in values."""
    file: str | None = None
    flags = Given({}, [])
    for flag, values in split_flags(words):
        if flag == CONFIG:
            if file is not None or len(values) != 1:
                flags.problems.append(f"{CONFIG}: expected one file, got {' '.join(values) or 'nothing'}")
            file = values[0] if values else file
        elif flag != PRINT_CONFIG:
            _take(flag, values, flags)
        elif values:
            flags.problems.append(f"{PRINT_CONFIG}: expected nothing after it, got {' '.join(values)}")
    in_file = Given({}, [])
    if file is not None:
        try:
            in_file = read_toml(Path(file))
        except OptionsError as error:
            flags.problems.extend(error.problems)
    options = with_values({**in_file.values, **flags.values})
    problems = [*in_file.problems, *flags.problems, *option_problems(options)]
    if problems:
        raise OptionsError(problems)
    return options


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag with the words after it; the words before the first flag with the flag "".

    >>> list(split_flags(["--text", "a", "b", "--lr=-1", "--adascale"]))
    [('--text', ['a', 'b']), ('--lr', ['-1']), ('--adascale', [])]
    """
    flag, values = "", list[str]()
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag or values:
            yield flag, values
        flag, has_value, value = word.partition("=")
        values = [value] if has_value else []
    if flag or values:
        yield flag, values


def _take(flag: str, words: list[str], flags: Given) -> None:
    """Adds the value of one flag, or the mistake in it."""
    field = option_fields().get(flag)
    if field is None:
        problem = f"{flag}: no such option" if flag else f"{' '.join(words)}: expected options, as --steps 400"
        positive = option_fields().get(f"--{flag.removeprefix('--no-')}")
        better = nearest(flag, [*option_fields(), CONFIG, PRINT_CONFIG, HELP]) if flag else ""
        flags.problems.append(problem + (f"; write {positive.flag} false" if positive else better))
        return
    if field in flags.values:
        flags.problems.append(f"{flag}: given twice; {'name all after one' if field.is_tuple else 'leave one out'}")
        return
    values = words or ([field.bare] if field.bare is not None else [])
    if not field.is_tuple and len(values) != 1:
        got = "nothing" if not values else " ".join(values)
        flags.problems.append(f"{flag}: expected {field.expected}, got {got}")
        return
    try:
        flags.values[field] = field.from_text(values)
    except ValueError:
        better = nearest(values[0], field.choices)
        flags.problems.append(f"{flag} {' '.join(values)}: expected {field.expected}{better}")


def with_values(values: Values) -> Options:
    """Returns the defaults with these values."""
    options = Options()
    for table in dict.fromkeys(field.table for field in values):
        changed: Any = {field.name: value for field, value in values.items() if field.table == table}
        options = replace(options, **{table: replace(getattr(options, table), **changed)})
    return options


def with_checked_types(options: Options) -> Options:
    """Returns options with the types of their fields, as a path for a text; an OptionsError where one is wrong."""
    checked = Given({}, [])
    for field in option_fields().values():
        value = value_of(options, field)
        try:
            checked.values[field] = field.checked(value)
        except ValueError as error:
            checked.problems.append(f"{field.key}={value!r}: expected {error}")
    if checked.problems:
        raise OptionsError(checked.problems)
    return with_values(checked.values)
