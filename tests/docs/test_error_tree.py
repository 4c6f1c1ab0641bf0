"""The tree in `scale_core.errors`, the one in the guide, and the classes are the same, and each has its section."""

import importlib
import inspect
import pickle
import pkgutil
import re
from pathlib import Path

import pytest

import scale_core.errors
from scale_core.errors import ScaleError

PACKAGES = ["core", "fsdp", "oss", "pipe", "tp", "checkpoint", "adascale", "check", "snapshot", "train"]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "troubleshooting.md"


def tree_of_classes() -> dict[str, str]:
    """The parent of each error of the tree, by name."""
    for package in (f"scale_{name}" for name in PACKAGES):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found, waiting = dict[str, str](), [ScaleError]
    while waiting:
        parent = waiting.pop()
        for child in parent.__subclasses__():
            if child.__module__.startswith("scale_"):
                found[child.__name__] = parent.__name__
                waiting.append(child)
    return found


def tree_of_text(text: str) -> dict[str, str]:
    """The parent of each name of a drawn tree."""
    found, path = dict[str, str](), {0: "ScaleError"}
    for indent, name in re.findall(r"^ *?((?:\|   |    )*)[|`]-- (\w+)", inspect.cleandoc(text), re.MULTILINE):
        depth = len(indent) // 4 + 1
        found[name], path[depth] = path[depth - 1], name
    return found


def test_the_docstring_draws_the_tree_of_the_classes() -> None:
    drawn = (scale_core.errors.__doc__ or "").replace("\n    ", "\n")
    assert tree_of_text(drawn) == tree_of_classes()


@pytest.mark.skipif(not GUIDE.exists(), reason="the guide is in the repository alone")
def test_the_guide_draws_the_same_tree_with_examples() -> None:
    text = GUIDE.read_text()
    assert tree_of_text(text) == tree_of_classes()
    sections = dict(re.findall(r"^#### (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    assert sections.keys() == tree_of_classes().keys()
    for name, section in sections.items():
        assert re.match(r"`[^`]+`\n: ", section), f"{name}: an example in backquotes, then what to do"


def test_every_error_of_the_tree_can_be_pickled() -> None:
    waiting = [ScaleError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        error = kind.__new__(kind, "text")
        error.args = ("text",)
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is kind and found.args == ("text",)
