"""The commands of `scale-train`: its own, and the commands of installed packages such as scale-tools.

A package adds commands with entry points of the group `scale_train.commands`, each of which names a `Command`. Nothing
here loads torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from scale_train.configuration.help import help_text
from scale_train.options import Options
from scale_train.trained_model.options import ExportOptions, PplOptions

GROUP = "scale_train.commands"
OF_SCALE_TOOLS = ("plan", "doctor", "pipe", "snapshot", "why")
"""What scale-tools adds, in the order in which --help lists it."""


@dataclass(frozen=True)
class Command:
    """One command: the sentence on it, the dataclass of its options, and where its function is."""

    summary: str
    options: type
    function: str
    """As "module:function". The function takes the options and returns the exit code. The module may load torch."""
    help_text: Callable[[], str] | None = None
    """Returns the text of --help; by default tyro makes it from the dataclass."""

    def load(self) -> Callable[[Any], int]:
        """Imports the function."""
        module, _, name = self.function.partition(":")
        function: Callable[[Any], int] = getattr(import_module(module), name)
        return function


OWN_COMMANDS = {
    "lm": Command(
        "Train a language model on text, and report how well it predicts text that it has not seen.",
        Options,
        "scale_train.lm:language_model",
        help_text,
    ),
    "ppl": Command(
        "Say how well a trained model predicts a text: loss, perplexity, bits per byte.",
        PplOptions,
        "scale_train.trained_model.perplexity:ppl",
    ),
    "export": Command(
        "Write the model of a run as a folder that transformers reads.",
        ExportOptions,
        "scale_train.trained_model.export:export",
    ),
}


def installed_commands() -> dict[str, Command]:
    """Returns all commands by name: first of this package, then of scale-tools, then of other packages in order."""
    added = {point.name: point for point in entry_points(group=GROUP)}
    names = [*(name for name in OF_SCALE_TOOLS if name in added), *sorted(added.keys() - set(OF_SCALE_TOOLS))]
    return {**OWN_COMMANDS, **{name: added[name].load() for name in names}}
