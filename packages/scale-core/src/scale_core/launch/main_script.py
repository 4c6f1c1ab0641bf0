"""Checks of the main script, which new processes run again to find their functions.

A script that starts ranks outside of `if __name__ == "__main__"` would start them again in each rank; and new processes
can't find functions that were typed in. Both errors give the line to write.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

UNGUARDED = 227
"""The exit code of a process that was to start ranks while it was only being started itself."""


def lacks_main_guard(call: str) -> str:
    """The error text for a script that starts ranks whenever it is imported."""
    return (
        f"{call} was called again by a rank that only imported the main script: each rank runs that script from the "
        f'top to find its functions. Write `if __name__ == "__main__":` above the line that calls {call}, and indent '
        "it, with everything that only the program itself is to do"
    )


def check_may_start(call: str, fn: Callable[..., object]) -> None:
    """Checks that ranks may be started here and can find `fn`; ends a process that only imports the script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # So multiprocessing asks itself.
        _end(call)
    while isinstance(fn, functools.partial):
        fn = fn.func
    if getattr(fn, "__module__", None) == "__main__" and not _has_file(sys.modules["__main__"]):
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise ValueError(
            f"{call}: new processes cannot find {name}, which is in no file: it was typed in, or given to `python -c`, "
            f"standard input or a notebook. Write it to a file beside this, work.py, and `from work import {name}`"
        )


@contextmanager
def main_hidden(unless: bool) -> Iterator[None]:
    """A context in which new processes don't run the main script (often pytest itself)."""
    main = sys.modules["__main__"]
    if not unless or not _has_file(main):
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _has_file(main: Any) -> bool:
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists())


def _end(call: str) -> NoReturn:
    print(lacks_main_guard(call), file=sys.stderr, flush=True)
    os._exit(UNGUARDED)  # Whoever imports the script may take any exception for one of its own, and go on.
