"""The imports with which a script begins, made once for all runs of a rank.

They run before any other line of the script, so a process that is forked after them computes the same. Modules of the
script's own folder are not among them. If an import fails, starts a thread (which no fork keeps), or reads the rank
(which differs in the next run), each run makes all imports itself.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

from scale_check.script.rank import exact_norms, without_dropout

LAUNCHER_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
"""The variables that a launcher sets, and that differ between runs."""

_ALLOCATOR_THREAD = "jemalloc_bg_thd"  # Of pyarrow, so pandas and datasets have it; jemalloc itself handles forks.


def import_for_script(arguments: Sequence[str]) -> bool:
    """Makes the first imports of a script in this process; False if a fork of it can't stand for a process of its own.

    Args:
        arguments: The script and its arguments, as its `sys.argv`.
    """
    script = Path(arguments[0])
    try:
        statements = list(first_imports(script.read_text(encoding="utf-8"), script.absolute().parent))
    except (OSError, ValueError, SyntaxError):  # The run says so.
        return True
    own_arguments, sys.argv = sys.argv, list(arguments)
    num_threads = _num_threads()
    try:
        # A module that is imported may keep a reference to these functions.
        with _watched_variables() as reads, without_dropout(), exact_norms():
            exec(compile(ast.Module(statements, type_ignores=[]), str(script), "exec"), {"__name__": "__main__"})
    except BaseException:
        return False
    finally:
        sys.argv = own_arguments
    return not reads and _num_threads() == num_threads


def first_imports(source: str, folder: Path) -> Iterator[ast.stmt]:
    """The imports before any other statement of a script and any module of its folder.

    >>> [ast.unparse(statement) for statement in first_imports("import os; import torch; x = 1; import ast", Path())]
    ['import os', 'import torch']
    """
    for number, statement in enumerate(ast.parse(source).body):
        if number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # Its docstring.
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [statement.module]
        else:
            return
        if any(PathFinder.find_spec(name.partition(".")[0], [str(folder)]) for name in names):
            return
        yield statement


@contextmanager
def _watched_variables() -> Iterator[set[str]]:
    """The variables of the launcher that are read meanwhile."""
    reads: set[str] = set()
    environ_class = type(os.environ)

    class Watched(environ_class):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if name in LAUNCHER_VARIABLES:
                reads.add(name)
            value: str = super().__getitem__(name)
            return value

    os.environ.__class__ = Watched
    try:
        yield reads
    finally:
        os.environ.__class__ = environ_class


def _num_threads() -> int:
    """The number of threads of this process, with threads of libraries in C where the system tells."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return threading.active_count()
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
    return len([name for name in names if name != _ALLOCATOR_THREAD])
