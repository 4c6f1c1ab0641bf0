"""All mistakes in options at once; the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class OptionsError(ValueError):
    """Options that cannot be meant: all problems, each one line. The training itself raises `InputError` for them."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)

    def lines(self) -> str:
        """Returns one problem in one line, or several below a first one."""
        if len(self.problems) == 1:
            return f"scale-train: {self.problems[0]}"
        return "\n".join(
            [f"scale-train: {len(self.problems)} problems", *(f"  {problem}" for problem in self.problems)]
        )


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns an addition to "no such option": the name that was probably meant, or nothing.

    >>> nearest("--stpes", ["--steps", "--seed"])
    '; the nearest is --steps'
    >>> nearest("--color", ["--steps", "--seed"])
    ''
    """
    matches = difflib.get_close_matches(name, names, 1, 0.6)
    return f"; the nearest is {matches[0]}" if matches else ""
