"""Texts that tests train on."""

from pathlib import Path

import pytest
import torch


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 5000 letters at random."""
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(97, 123, (5_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """A file of one sentence, fifty times."""
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    return path
