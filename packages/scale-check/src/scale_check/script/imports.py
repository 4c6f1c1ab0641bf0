"""The imports with which a script begins, made once for all runs of a rank.

They run before any other line of the script, so a process that is forked after them computes the same. If an import is
of a module of the script's own folder, fails, starts a thread (which no fork keeps), asks for a device (which no fork
may use then) or reads the rank (which differs in the next run), each run makes all imports itself.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from scale_check.script.rank import SEED, exact_norms, seed_everything, without_dropout

LAUNCHER_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    }
)
"""The variables that a launcher sets, and that this process does not have."""

_ALLOCATOR_THREAD = "jemalloc_bg_thd"  # Of pyarrow, so pandas and datasets have it; jemalloc itself handles forks.


def import_for_script(arguments: Sequence[str]) -> bool:
    """Makes the first imports of a script in this process; False if a fork of it can't stand for a process of its own.

    Args:
        arguments: The script and its arguments, as its `sys.argv`.
    """
    script = Path(arguments[0])
    folder = script.absolute().parent
    try:
        statements = list(first_imports(script.read_text(encoding="utf-8"), folder))
    except (OSError, ValueError, SyntaxError):  # The run says so.
        return True
    own_arguments, sys.argv = sys.argv, list(arguments)
    sys.path.insert(0, str(folder))  # As in the run: libraries may look for modules, too.
    num_threads, modules = _num_threads(), set(sys.modules)
    seed_everything(SEED)  # A library that draws numbers has the same ones on all ranks, and in all runs.
    try:
        # A module that is imported may keep a reference to these functions.
        with _watched_variables() as used, without_dropout(), exact_norms():
            exec(compile(ast.Module(statements, type_ignores=[]), str(script), "exec"), {"__name__": "__main__"})
    except BaseException:
        return False
    finally:
        sys.argv = own_arguments
        sys.path.remove(str(folder))
    own_modules = [name for name in sys.modules.keys() - modules if _is_in(folder, name)]
    return not used and not own_modules and _num_threads() == num_threads and _forks_may_use_devices()


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
        if any(_is_in(folder, name) for name in names):
            return
        yield statement


def _is_in(folder: Path, module: str) -> bool:
    return PathFinder.find_spec(module.partition(".")[0], [str(folder)]) is not None


@contextmanager
def _watched_variables() -> Iterator[set[str]]:
    """The variables of the launcher that are read or set meanwhile."""
    used: set[str] = set()
    environ_class = type(os.environ)

    class Watched(environ_class):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if name in LAUNCHER_VARIABLES:
                used.add(name)
            value: str = super().__getitem__(name)
            return value

        def __setitem__(self, name: str, value: str) -> None:
            if name in LAUNCHER_VARIABLES:
                used.add(name)
            super().__setitem__(name, value)

    os.environ.__class__ = Watched
    try:
        yield used
    finally:
        os.environ.__class__ = environ_class


def _num_threads() -> int:
    """The number of threads of this process, with threads of libraries in C where the system tells."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return threading.active_count()
    num_threads = 0
    for task in tasks.iterdir():
        with suppress(OSError):  # It has just ended.
            num_threads += (task / "comm").read_text().strip() != _ALLOCATOR_THREAD
    return num_threads


def _forks_may_use_devices() -> bool:
    """False once anything has asked torch for a device, as `torch.cuda.is_available()` does: only a fork is told so."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    code = 1
    try:
        code = int(torch.cuda._is_in_bad_fork() or torch.xpu._is_in_bad_fork())
    finally:
        os._exit(code)
