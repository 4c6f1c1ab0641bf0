"""The fields of `Options` as a table: flag, TOML key, type, default and help text, all from the dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import scale_train.options
from scale_train.options import Options


@dataclass(frozen=True)
class OptionField:
    """One option: `--weight-decay`, `weight_decay` in the table `[optimizer]`, `OptimizerOptions.weight_decay`."""

    table: str
    name: str
    type: type  # of one value: int, float, bool, str or Path
    choices: tuple[str, ...]  # all values of a text, where they are known
    is_optional: bool  # whether None is a value, which a file says by leaving it out
    is_tuple: bool
    default: Any
    bare: str | None  # the value of the flag without a word; None where it needs one
    placeholder: str  # the text after the flag in the help
    help: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def expected(self) -> str:
        """The expected kind of value, for messages."""
        if self.choices:
            return " or ".join(filter(None, (", ".join(self.choices[:-1]), self.choices[-1])))
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
        return f"a list, each {names[self.type]}" if self.is_tuple else names[self.type]

    def from_text(self, words: Sequence[str]) -> Any:
        """Converts the words after the flag; a ValueError where it is none of this type."""
        if self.is_tuple:
            return tuple(self._one_from_text(word) for word in words)
        (word,) = words
        return self._one_from_text(word)

    def _one_from_text(self, word: str) -> Any:
        if self.type is bool:
            return {"true": True, "false": False}[word.lower()] if word.lower() in ("true", "false") else self._fail()
        return self.checked(word if self.type is Path else self.type(word), is_one=True)

    def checked(self, value: Any, *, is_one: bool = False) -> Any:
        """Returns a value of a TOML file or of Python as the dataclass has it; a ValueError where its type is wrong."""
        if value is None and self.is_optional:
            return None
        if self.is_tuple and not is_one:
            values = value if isinstance(value, list | tuple) else self._fail()
            return tuple(self.checked(item, is_one=True) for item in values)
        if self.type is Path and isinstance(value, str | Path):
            # "" is Path("."), and a variable of a shell that is not set.
            return Path(value) if str(value) else self._fail()
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, self.type) or (self.type is int and isinstance(value, bool)):
            self._fail()
        if self.choices and value not in self.choices:
            self._fail()
        return value

    def _fail(self) -> Any:
        raise ValueError(self.expected)


@cache
def option_fields() -> Mapping[str, OptionField]:
    """Returns the fields of all tables by flag, in the order of the dataclasses."""
    tables = typing.get_type_hints(Options)
    fields = [
        field
        for group in dataclasses.fields(Options)
        for field in fields_of(tables[group.name], group.name, scale_train.options)
    ]
    return {field.flag: field for field in fields}


def fields_of(options: Any, table: str, module: types.ModuleType) -> list[OptionField]:
    """Returns the fields of one dataclass of options, in their order; its source stands in `module`."""
    hints, texts = typing.get_type_hints(options), docstrings_of(options, module)
    return [
        _field_of(table, dataclass_field, hints[dataclass_field.name], texts[dataclass_field.name])
        for dataclass_field in dataclasses.fields(options)
    ]


def table_help(table: str) -> str:
    """Returns the one sentence on a table."""
    options: Any = typing.get_type_hints(Options)[table]
    return purpose_of(options)


def _field_of(table: str, field: dataclasses.Field[Any], hint: Any, text: str) -> OptionField:
    parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    is_optional = type(None) in parts
    (one,) = [part for part in parts if part is not type(None)]
    is_tuple = typing.get_origin(one) is tuple
    if is_tuple:
        one = typing.get_args(one)[0]
    choices = typing.get_args(one) if typing.get_origin(one) is typing.Literal else ()
    kind = str if choices else one
    bare = "true" if kind is bool else field.metadata.get("bare")
    placeholder = field.metadata.get("placeholder") or _placeholder(kind, choices, is_tuple, field.default)
    return OptionField(table, field.name, kind, choices, is_optional, is_tuple, field.default, bare, placeholder, text)


def _placeholder(kind: type, choices: tuple[str, ...], is_tuple: bool, default: Any) -> str:
    if kind is bool:
        return "{true,false}" if default else "[true|false]"
    if sum(map(len, choices)) > 50:
        return "NAME"  # The text lists them.
    word = f"{{{','.join(choices)}}}" if choices else {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")
    return f"[{word} ...]" if is_tuple else word


def docstrings_of(options: type, module: types.ModuleType) -> dict[str, str]:
    """Returns the text below each field of a dataclass, on one line.

    The module is an argument because `options.__module__` is the public package once somebody has imported it.
    """
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == options.__name__)
    texts = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(statement.target, ast.Name) and isinstance(following.value, ast.Constant)
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def purpose_of(options: type) -> str:
    """Returns the docstring of a dataclass of options, without its example and what follows that."""
    return (inspect.getdoc(options) or "").partition("\n\nExample")[0].partition("\n\nSee also:")[0]
