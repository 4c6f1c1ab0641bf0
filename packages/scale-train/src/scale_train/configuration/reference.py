"""`docs/configuration.md`, made from the dataclasses.

python -m scale_train.configuration.reference > docs/configuration.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

from scale_train.configuration.checks import LIMITS
from scale_train.configuration.fields import OptionField, option_fields, table_help
from scale_train.configuration.help import default_text
from scale_train.options import Options

_BEGINNING = """# Configuration reference

All options of `scale-train lm`: as flags, as keys of a TOML file, and as fields in Python. The three have the same
names and the same checks, and flags override the file. This page is made from the dataclasses
([how they are used](guides/scale-train.md#configuration)).

```sh
scale-train lm --config run.toml --lr 1e-3      # flags override the file
scale-train lm --config run.toml --print-config # the file that repeats the run
```

```toml
[optimizer]
lr = 1e-3
```

<!-- not run: trains for minutes, on ranks that read its file again -->
```python
from scale_train import OptimizerOptions, Options, train

if __name__ == "__main__":
    train(Options(optimizer=OptimizerOptions(lr=1e-3)))
```

A value that is not set has no default in the table; a file leaves it out. Sizes, counts and rates have the limits in
brackets: a value outside of them raises an error before any memory is taken.
"""

_MAX_WORDS_IN_CELL = 15


def reference() -> str:
    """Returns the page."""
    parts = [_BEGINNING]
    tables: dict[str, list[OptionField]] = {}
    for field in option_fields().values():
        tables.setdefault(field.table, []).append(field)
    for table, fields in tables.items():
        options: Any = get_type_hints(Options)[table]
        parts += [f"\n## `[{table}]`, `{options.__name__}`\n", f"\n{table_help(table)}\n"]
        parts += ["\n| flag | key, field | value | default | meaning |\n", "|---|---|---|---|---|\n"]
        parts += [_row(field) for field in fields]
        further = [(field.flag, text) for field in fields if (text := _split_help(field)[1])]
        parts += ["\n", *(f"- `{flag}`: {text}\n" for flag, text in further)] if further else []
    return "".join(parts)


def _split_help(field: OptionField) -> tuple[str, str]:
    """Returns what stands in the table, and the further sentences of a long help, which stand below it."""
    if len(field.help.split()) <= _MAX_WORDS_IN_CELL:
        return field.help, ""
    first, end, further = field.help.partition(". ")
    return (f"{first}.", further) if end else (field.help, "")


def _row(field: OptionField) -> str:
    default = default_text(field)
    cells = (
        f"`{field.flag}`",
        f"`{field.name}`",
        _values(field),
        f"`{default}`" if default else "",
        _split_help(field)[0].replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |\n"


def _values(field: OptionField) -> str:
    if field.choices:
        return ("list of " if field.is_tuple else "") + ", ".join(f"`{choice}`" for choice in field.choices)
    name = {int: "integer", float: "number", bool: "`true`, `false`", str: "text", Path: "path"}[field.type]
    if field.name in LIMITS:
        least, most = (
            f"{limit:.0f}" if limit < 1e6 else f"{limit:.0e}".replace("e+0", "e") for limit in LIMITS[field.name]
        )
        name += f" [{least}, {most}]"
    return f"list of {name}s" if field.is_tuple else name


if __name__ == "__main__":
    print(reference(), end="")
