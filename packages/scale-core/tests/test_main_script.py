"""Programs that start ranks in ways that new processes cannot follow: an error at once, with what to write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scale_core.launch import launch_local
from scale_core.launch.launcher import UNGUARDED, check_may_start, main_hidden
from scale_core.testing import run_ranks

LAUNCH = """
from scale_core.launch import launch_local
def work():
    print("at work")
try:
    print("code", launch_local(work, 1))
except ValueError:
    raise
except OSError:  # A program that takes an error for one of its own goes on.
    pass
"""
RUN = """
from scale_core.testing import run_ranks
def main():
    return 3
print(run_ranks(main, 1))
"""
SPAWN = """
import multiprocessing
multiprocessing.get_all_start_methods = lambda: ["spawn"]  # As on Windows.
"""
OF_A_MODULE = """
from operator import add
import test_main_script
from scale_core.launch import launch_local
from scale_core.testing import run_ranks
print(run_ranks(add, 1, 1, 2, backend=None), launch_local(test_main_script.end, 1, 5))
"""


def end(code: int) -> None:
    sys.exit(code)


def started(*arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, [os.path.dirname(__file__), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.fault(95)
def test_programs_new_processes_cannot_follow_are_refused(tmp_path: Path) -> None:
    scripts = [tmp_path / name for name in ("launch.py", "run.py", "spawn.py", "of_a_module.py")]
    for script, text in zip(scripts, (LAUNCH, RUN, SPAWN + RUN, OF_A_MODULE), strict=True):
        script.write_text(text)
    unguarded, works = [started(str(script)) for script in scripts], started("-c", OF_A_MODULE)
    for process, call in zip(unguarded, ("launch_local", "run_ranks", "run_ranks", "launch_local"), strict=True):
        output, _ = process.communicate()
        assert process.returncode == 1 and "at work" not in output
        errors = ("scale_core.errors.LaunchError", "scale_core.testing.rank.RankError")
        assert output.rstrip().splitlines()[-1].startswith(errors)
        assert f'Write `if __name__ == "__main__":` above the line that calls {call}' in output.splitlines()[-1]
    output, _ = works.communicate()
    assert works.returncode == 0 and "[3] 5" in output, output


@pytest.mark.parametrize("call", [launch_local, run_ranks])
def test_a_function_that_is_in_no_file_is_refused(call: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = ModuleType("__main__")  # As in `python -c` and a program from standard input.
    exec("def work(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    refusal = f"{call.__name__}: new processes cannot find work, which is in no file: .*`from work import work`"
    with pytest.raises(ValueError, match=refusal):
        call(main.work, 2)


@pytest.mark.parametrize("call", [launch_local, run_ranks])
def test_a_function_that_is_not_at_the_top_level_is_refused(call: Callable[..., object]) -> None:
    def work() -> None:
        pass

    for function in (work, partial(work), lambda: None):
        with pytest.raises(ValueError, match=f"{call.__name__}: new processes cannot find .*: it is a lambda or is "):
            call(function, 2)


def make_base() -> type:
    class Base:
        def work(self) -> None:
            pass

    return Base


class Task(make_base()):  # type: ignore[misc]
    pass


def test_a_method_that_a_local_class_defines_is_found_by_its_object() -> None:
    check_may_start("run_ranks", Task().work)
    with pytest.raises(ValueError, match=r"cannot find make_base\.<locals>\.Base\.work: it is a lambda"):
        check_may_start("run_ranks", make_base()().work)


def test_a_process_that_only_imports_the_program_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_may_start("launch_local", end)
    ended: list[int] = []

    def leave(code: int) -> None:
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr("multiprocessing.process._current_process._inheriting", True, raising=False)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        check_may_start("launch_local", end)
    assert ended == [UNGUARDED]


def test_the_main_script_is_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(KeyError), main_hidden(unless=False):
        assert sys.modules["__main__"] is not main
        raise KeyError
    assert sys.modules["__main__"] is main
    with main_hidden(unless=True):
        assert sys.modules["__main__"] is main
