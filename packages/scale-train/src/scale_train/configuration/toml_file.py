"""Options as a TOML file: a table for each group of options, a key for each field; missing ones have the default."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scale_train.configuration.fields import OptionField, option_fields
from scale_train.configuration.problems import OptionsError, nearest
from scale_train.options import Options

Values = dict[OptionField, Any]
"""What was given, by field."""


class Given(NamedTuple):
    """The options of a file or a command line, and all mistakes in them."""

    values: Values
    problems: list[str]


def read_toml(path: Path) -> Given:
    """Reads a file; an OptionsError where it cannot be read or is not TOML."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError([f"--config {path}: cannot be read ({error.strerror})"]) from error
    except ValueError as error:  # no UTF-8, or no TOML; the latter's text has line and column
        raise OptionsError([f"--config {path}: no TOML: {error}"]) from error
    return given_by_tables(content, str(path))


def given_by_tables(content: Mapping[str, Any], source: str) -> Given:
    """Takes the values out of tables, with the problems of all of them."""
    by_key = {field.key: field for field in option_fields().values()}
    tables = list(dict.fromkeys(field.table for field in by_key.values()))
    options = Given({}, [])
    for table, entries in content.items():
        if table not in tables or not isinstance(entries, dict):
            home = next((field.table for field in by_key.values() if field.name == table), None)
            better = f"; it belongs to the table [{home}]" if home else nearest(table, tables)
            options.problems.append(f"{source}: {table}: no such table{better}")
            continue
        for name, value in entries.items():
            field = by_key.get(f"{table}.{name}")
            if field is None:
                better = nearest(f"{table}.{name}", list(by_key))
                options.problems.append(f"{source}: {table}.{name}: no such key{better}")
                continue
            try:
                options.values[field] = field.checked(value)
            except ValueError as error:
                better = nearest(str(value), field.choices)
                options.problems.append(f"{source}: {field.key} = {value!r}: expected {error}{better}")
    return options


def to_toml(options: Options) -> str:
    """Returns the file that repeats a run exactly; an OptionsError where a text is not Unicode, which TOML needs."""
    lines: list[str] = []
    table = ""
    for field in option_fields().values():
        if field.table != table:
            table = field.table
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
        value = value_of(options, field)
        lines.append(f"# {field.name} is not set" if value is None else f"{field.name} = {_toml_of(value, field)}")
    return "\n".join(lines) + "\n"


def value_of(options: Options, field: OptionField) -> Any:
    """Returns the value of a field."""
    return getattr(getattr(options, field.table), field.name)


def _toml_of(value: Any, field: OptionField) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_of(item, field) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionsError(
            [f"{field.flag} {text!r}: TOML holds Unicode alone, and this text has other bytes"]
        ) from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's.
