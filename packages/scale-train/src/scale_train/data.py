"""Text as bytes, in a training and a held-out part, and the batch that a rank sees at each step.

The default needs no download: the source files of the running Python's own standard library. Files are read in sorted
order and joined by a zero byte, so that the same files give the same text everywhere, and a zero byte means "a file
starts here", which is also the prompt for a sample.

The order of the data is a pure function of the seed and of how many sequences were drawn, so it is the same at any
number of ranks and after a resume, and ranks need no communication for it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from scale_core import fault_points
from scale_train.errors import InputError

SEPARATOR = b"\0"
HELD_OUT_EVERY = 20
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "node_modules"})


@dataclass(frozen=True)
class Text:
    """A corpus of bytes in two parts."""

    train: Tensor  # uint8 `[train bytes]`
    held_out: Tensor  # uint8 `[held-out bytes]`; none of it is in `train`
    num_files: int
    source: str  # for messages
    split: str  # for messages

    def fingerprint(self) -> str:
        """SHA-256 of both parts."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """Size and split, in one line."""
        total = len(self.train) + len(self.held_out)
        return (
            f"{self.source}: {total / 1e6:.1f} MB in {self.num_files} file{'s' if self.num_files > 1 else ''}; "
            f"held out: {len(self.held_out) / 1e6:.2f} MB ({self.split})"
        )


def read_text(paths: Sequence[Path] = ()) -> Text:
    """Reads files and folders, or the standard library's sources where none are named.

    Folders are walked in sorted order, without hidden entries, tests and files that are no text.
    """
    if paths:
        # Each file once, by its real path: read twice it could be in both parts.
        seen: set[Path] = set()
        files = [file for path in paths for file in _files_of(path, seen)]
        source = ", ".join(str(path) for path in paths)
    else:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in _walk(folder, set()) if file.suffix == ".py"] if folder.is_dir() else []
        source = "the standard library of Python"
        if not files:
            raise InputError(f"no source files of the standard library in {folder}: name a text with --text PATH")
    named = {path.resolve() for path in paths}
    contents = [content for file in files if (content := _read(file, named=file.resolve() in named))]
    if not contents:
        raise InputError(f"--text {source}: expected text, but found 0 bytes in {len(files)} files")
    return _split(contents, source)


def _files_of(path: Path, seen: set[Path]) -> list[Path]:
    try:
        if path.is_dir():
            return list(_walk(path, seen))
        if path.is_file():
            return [path] if _is_new(path, seen) else []
    except OSError as error:  # a name too long, a folder that may not be entered
        raise InputError(f"--text {path}: cannot be read ({error.strerror})") from error
    raise InputError(f"--text {path}: no such file or folder")


def _is_new(path: Path, seen: set[Path]) -> bool:
    """Whether no earlier path led to this file; remembers it."""
    real = path.resolve()
    is_new = real not in seen
    seen.add(real)
    return is_new


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file() and _is_new(path, seen):
                yield path


def _read(file: Path, *, named: bool) -> bytes:
    """The bytes of a file; none of a file in a folder that is no text."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"--text {file}: cannot be read ({error.strerror})") from error
    return content if named or SEPARATOR not in content[:8192] else b""


def _split(contents: list[bytes], source: str) -> Text:
    """Every twentieth file is held out; with fewer files, the last twentieth of the bytes."""
    if len(contents) >= HELD_OUT_EVERY:
        held = contents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        kept = [content for index, content in enumerate(contents, 1) if index % HELD_OUT_EVERY]
        train, held_out = _join(kept), _join(held)
        split = f"every {HELD_OUT_EVERY}th file, {len(held)} file{'s' if len(held) > 1 else ''}"
    else:
        joined = _join(contents)
        cut = len(joined) - len(joined) // HELD_OUT_EVERY
        train, held_out = joined[:cut], joined[cut:]
        split = f"the last {100 / HELD_OUT_EVERY:.0f} %"
    return Text(_as_tensor(train), _as_tensor(held_out), len(contents), source, split)


def _join(contents: list[bytes]) -> bytes:
    return b"".join(SEPARATOR + content for content in contents)


def _as_tensor(content: bytes) -> Tensor:
    # A bytearray, because torch warns about memory that it may not write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def check_length(text: Text, sequence: int) -> None:
    """Raises InputError where a part of the text holds no sequence and the byte after it."""
    for name, part in (("training", text.train), ("held-out", text.held_out)):
        if len(part) < sequence + 1:
            raise InputError(
                f"--text {text.source}: too few tokens for --sequence {sequence}: the {name} part has {len(part)} "
                f"bytes, and {sequence + 1} are needed; name more text or a shorter --sequence"
            )


@dataclass
class Sampler:
    """Draws windows of a text without replacement, in another order each epoch."""

    num_bytes: int  # length of the text; at least `sequence + 1`
    sequence: int  # tokens in a window; its targets are the same window one byte later
    seed: int  # of the order
    drawn: int = 0  # sequences drawn so far by all ranks together
    _epoch: int = field(default=-1, init=False, repr=False)
    _starts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), init=False, repr=False)

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        # One less than would fit, where several fit, leaves room for another shift in each epoch.
        return max(1, (self.num_bytes - 1) // self.sequence - 1)

    def starts(self, batch: int) -> Tensor:
        """Draws the global batch of a step: where each window starts, `[batch]`, int64."""
        starts = torch.stack([self._start(index) for index in range(self.drawn, self.drawn + batch)])
        self.drawn += batch
        return starts

    def _start(self, index: int) -> Tensor:
        epoch, position = divmod(index, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            spare = self.num_bytes - 1 - self.windows * self.sequence
            shift = torch.randint(min(spare, self.sequence) + 1, (), generator=generator)
            self._starts = torch.randperm(self.windows, generator=generator) * self.sequence + shift
            self._epoch = epoch
        return self._starts[position]

    def state(self) -> dict[str, int]:
        """Returns the data position, as JSON."""
        return {"num_bytes": self.num_bytes, "sequence": self.sequence, "seed": self.seed, "drawn": self.drawn}

    def load_state(self, state: dict[str, int]) -> None:
        """Goes on from a `state`; an InputError where it belongs to another order of the data."""
        for name in ("num_bytes", "sequence", "seed"):
            if state[name] != getattr(self, name):
                raise InputError(
                    f"the checkpoint's data position has {name}={state[name]}, but this run has {getattr(self, name)}: "
                    f"resume with the same --text, --sequence and --seed"
                )
        self.drawn = state["drawn"]


def slice_of_rank(starts: Tensor, rank: int, num_ranks: int, accumulate: int) -> Tensor:
    """Returns a rank's micro-batches of a global batch: `[batch]` to `[accumulate, batch / num_ranks / accumulate]`."""
    return starts.view(num_ranks, accumulate, -1)[rank]


def windows_at(text: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens of `text`, uint8 `[bytes]`, at `starts`, `[batch]`, and those after them.

    Both are int64, `[batch, sequence]`.
    """
    if fault_points.active is not None:
        fault_points.active("data", "")
    windows = text[starts.unsqueeze(1) + torch.arange(sequence + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
