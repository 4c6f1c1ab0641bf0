"""A folder in which tests start the training program in processes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXT = bytes((7 * index * index) % 26 + 97 for index in range(3_000))


def enter_program_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes to a folder with a file `text`, and takes away what torchrun or pytest has set for this process."""
    monkeypatch.chdir(folder)
    # Warnings are errors here, not in the program that is started: Python's multiprocessing itself has some at its end.
    for name in ("RANK", "WORLD_SIZE", "PYTHONWARNINGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (folder / "text").write_bytes(TEXT)
