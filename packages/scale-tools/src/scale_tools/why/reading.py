"""The texts that ranks left behind, from the files and folders that the user names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_SUFFIXES = {".log", ".txt", ".json", ".out", ".err"}
_READ_BYTES = 4 << 20  # of the end of each file, where it says how it ended
_MOST_FILES = 20_000


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Returns the texts of the files by their paths; of a folder, all logs in it, and of restarts the last attempt.

    A path that does not exist is left out, because the folder of flight records is made by the first rank that fails.

    Raises:
        ValueError: None of the files and folders exists, there is no log in them, or one can't be read.
    """
    texts: dict[str, str] = {}
    missing = missing_paths(paths)
    if missing and len(missing) == len(paths):
        raise ValueError(f"{', '.join(map(str, missing))}: no such file or folder")
    for path in paths:
        for file in _last_attempts(_files(path)):
            try:
                texts[str(file)] = _end_of(file)
            except OSError as error:
                raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    if not texts:
        raise ValueError(
            f"no logs in {', '.join(map(str, paths)) or 'nothing'}: name files, or folders with {_kinds()}"
        )
    return texts


def missing_paths(paths: Sequence[Path]) -> list[Path]:
    """Returns the paths that do not exist."""
    return [path for path in paths if not path.exists()]


def _kinds() -> str:
    return ", ".join(sorted(f"*{suffix}" for suffix in _SUFFIXES))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in sorted(path.rglob("*"))[:_MOST_FILES] if file.is_file() and file.suffix in _SUFFIXES]


def _last_attempts(files: Iterable[Path]) -> Iterator[Path]:
    """The files without the attempts that torchrun has restarted."""
    listed = list(files)
    attempts = {file: _attempt(file) for file in listed}
    last: dict[str, int] = {}
    for numbers in attempts.values():
        if numbers is not None:
            last[numbers[0]] = max(last.get(numbers[0], 0), numbers[1])
    for file in listed:
        latest = attempts[file]
        if latest is None or last[latest[0]] == latest[1]:
            yield file


def _attempt(file: Path) -> tuple[str, int] | None:
    match = re.search(r"^(.*)attempt_(\d+)(?:/|$)", file.as_posix())
    return (match[1], int(match[2])) if match else None


def _end_of(file: Path) -> str:
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - _READ_BYTES))
        return opened.read().decode("utf-8", errors="replace")
