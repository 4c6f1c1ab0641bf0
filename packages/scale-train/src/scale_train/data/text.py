"""Text as tokens, in a training and a held-out part, and the batch that a rank sees at each step.

The default needs no download: the bytes of the source files of the running Python's own standard library. Documents are
files, or the lines of JSON-lines files. They are read in sorted order, and before each stands a separator (of bytes a
zero byte), so that the same files give the same text everywhere; it is also the prompt for a sample.

The tokens of a text are kept on disk, and mapped into the memory of all ranks from there.

The order of the data is a pure function of the seed and of how many sequences were drawn, so it is the same at any
number of ranks and after a resume, and ranks need no communication for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core import fault_points
from scale_pipe.microbatch import micro_batch_sizes
from scale_train.data.tokenizer import BYTE, ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer, tokenizer_of
from scale_train.errors import InputError
from scale_train.options import Options

SEPARATOR = b"\0"
JSON_LINES = (".jsonl", ".ndjson")
PARTS = ("train", "held-out")
HELD_OUT_EVERY = 20
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "node_modules"})


@dataclass(frozen=True)
class Text:
    """A corpus of tokens in two parts."""

    train: Tensor  # `[train tokens]`, uint8 of bytes, else int32
    held_out: Tensor  # `[held-out tokens]`; none of it is in `train`
    num_documents: int
    source: str  # for messages
    split: str  # for messages
    tokenizer: Tokenizer
    num_bytes: tuple[int, int]  # of both parts, each separator counted as one

    @property
    def tokens_per_byte(self) -> float:
        """Of the held-out part."""
        return len(self.held_out) / max(1, self.num_bytes[1])

    def fingerprint(self) -> str:
        """SHA-256 of both parts."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.numpy().data)
        return digest.hexdigest()

    def describe(self) -> str:
        """Size and split, in one line."""
        total, held_out = sum(self.num_bytes), self.num_bytes[1]
        tokens = "" if self.tokenizer.name == BYTE else f" ({len(self.train) + len(self.held_out):,} tokens)"
        return (
            f"{self.source}: {total / 1e6:.1f} MB{tokens} in {self.num_documents} "
            f"document{'s' if self.num_documents > 1 else ''}; held out: {held_out / 1e6:.2f} MB ({self.split})"
        )


def read_data(options: Options) -> Text:
    """Reads the text of the options by their tokenizer; an InputError where that cannot be."""
    try:
        tokenizer = open_tokenizer(tokenizer_of(options))
    except ValueError as error:
        raise InputError(str(error)) from error
    data = options.data
    return read_text(data.text, tokenizer, text_field=data.text_field, cache=data.token_cache)


def read_text(
    paths: Sequence[Path] = (),
    tokenizer: Tokenizer | None = None,
    *,
    text_field: str = "text",
    cache: Path | None = None,
    held_out_every: int = HELD_OUT_EVERY,
) -> Text:
    """Reads files and folders, or the standard library's sources where none are named.

    Folders are walked in sorted order, without hidden entries, tests and files that are no text.

    Args:
        paths: Files of text, JSON-lines files (.jsonl), or folders of both.
        tokenizer: None is bytes.
        text_field: Of an object of a JSON-lines file, where its text is.
        cache: Where tokens are kept; None is a folder in the user's cache.
        held_out_every: Which document is held out; 1 is all of them.
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
    contents = [
        content for file in files for content in _documents(file, file.resolve() in named, text_field) if content
    ]
    if not contents:
        raise InputError(f"--text {source}: expected text, but found 0 bytes in {len(files)} files")
    train_pieces, held_out_pieces, split = _split([_Piece(content, True) for content in contents], held_out_every)
    tokenizer = tokenizer or ByteTokenizer()
    if isinstance(tokenizer, FileTokenizer):
        train, held_out = _kept_tokens(tokenizer, train_pieces, held_out_pieces, cache or default_cache())
    else:
        train, held_out = _as_tensor(_joined(train_pieces)), _as_tensor(_joined(held_out_pieces))
    sizes = (sum(piece.num_bytes for piece in train_pieces), sum(piece.num_bytes for piece in held_out_pieces))
    return Text(train, held_out, len(contents), source, split, tokenizer, sizes)


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
    """The bytes of a file; none if it is in a folder and is not text."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"--text {file}: cannot be read ({error.strerror})") from error
    return content if named or SEPARATOR not in content[:8192] else b""


def _documents(file: Path, is_named: bool, text_field: str) -> Iterator[bytes]:
    """Yields a file, or the texts of the lines of a JSON-lines file."""
    content = _read(file, named=is_named)
    if file.suffix not in JSON_LINES:
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InputError(f"--text {file}: line {number} is not JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get(text_field), str):
            fields = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
            raise InputError(
                f"--text {file}: line {number} has no text in {text_field!r}, but {fields}; name the field with "
                "--text-field"
            )
        yield entry[text_field].encode("utf-8", errors="surrogatepass")


class _Piece(NamedTuple):
    """A document, or a part of the one where the held-out part begins."""

    content: bytes
    begins: bool  # whether a separator stands before it

    @property
    def num_bytes(self) -> int:
        return len(self.content) + self.begins


def _split(pieces: list[_Piece], every: int) -> tuple[list[_Piece], list[_Piece], str]:
    """Every twentieth document is held out; with fewer ones, the last twentieth of the bytes."""
    if len(pieces) < every:
        return *_cut(pieces), f"the last {100 / HELD_OUT_EVERY:.0f} %"
    held_out = pieces[every - 1 :: every]
    train = [piece for index, piece in enumerate(pieces, 1) if index % every]
    return train, held_out, f"every {every}th document, {len(held_out)} document{'s' if len(held_out) > 1 else ''}"


def _cut(pieces: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
    total = sum(piece.num_bytes for piece in pieces)
    left = total - total // HELD_OUT_EVERY
    pieces_of_train: list[_Piece] = []
    for index, piece in enumerate(pieces):
        if piece.num_bytes > left:
            if not left:
                return pieces_of_train, pieces[index:]
            inside = left - 1  # behind its separator
            first, second = _Piece(piece.content[:inside], True), _Piece(piece.content[inside:], False)
            return [*pieces_of_train, first], [second, *pieces[index + 1 :]]
        left -= piece.num_bytes
        pieces_of_train.append(piece)
    return pieces_of_train, []


def _joined(pieces: list[_Piece]) -> bytes:
    return b"".join(SEPARATOR * piece.begins + piece.content for piece in pieces)


def _as_tensor(content: bytes) -> Tensor:
    # A bytearray, because torch warns about memory that it may not write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def default_cache() -> Path:
    """Where tokens are kept: a folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scale-train" / "tokens"


def _kept_tokens(
    tokenizer: FileTokenizer, kept: list[_Piece], held: list[_Piece], cache: Path
) -> tuple[Tensor, Tensor]:
    """The tokens of both parts, from the disk if they are there; else they are made and, if possible, left there."""
    digest = hashlib.sha256(tokenizer.content + repr(tokenizer.separator).encode())
    for part in (kept, held):
        digest.update(len(part).to_bytes(8, "little"))
        for piece in part:
            digest.update(piece.num_bytes.to_bytes(8, "little") + bytes([piece.begins]) + piece.content)
    folder = cache / digest.hexdigest()[:32]
    if not folder.is_dir():
        parts = [_encoded(tokenizer, part) for part in (kept, held)]
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as partial:
                for name, tokens in zip(PARTS, parts, strict=True):
                    Path(partial, name).write_bytes(tokens.tobytes())
                Path(partial).rename(folder)
                Path(partial).mkdir()  # which the context removes
        except OSError:  # A full or read-only disk, or another rank was faster.
            if not folder.is_dir():
                train, held_out = (
                    torch.frombuffer(part, dtype=torch.int32) if part else torch.empty(0, dtype=torch.int32)
                    for part in parts
                )
                return train, held_out
    train, held_out = (_mapped(folder / name) for name in PARTS)
    return train, held_out


def _mapped(file: Path) -> Tensor:
    size = file.stat().st_size // 4
    if size == 0:
        return torch.empty(0, dtype=torch.int32)
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.int32)


def _encoded(tokenizer: FileTokenizer, pieces: list[_Piece]) -> array[int]:
    tokens = array("i")
    for piece, piece_tokens in zip(pieces, tokenizer.encode([piece.content for piece in pieces]), strict=True):
        tokens.extend(tokenizer.separator if piece.begins else ())
        tokens.extend(piece_tokens)
    return tokens


def check_length(text: Text, sequence: int) -> None:
    """Raises InputError where a part of the text holds no sequence and the token after it."""
    for name, part in (("training", text.train), ("held-out", text.held_out)):
        if len(part) < sequence + 1:
            raise InputError(
                f"--text {text.source}: too few tokens for --sequence {sequence}: the {name} part has {len(part)} "
                f"tokens, and {sequence + 1} are needed; name more text or a shorter --sequence"
            )


@dataclass
class Sampler:
    """Draws windows of a text without replacement, in another order each epoch."""

    num_bytes: int  # length of the text in tokens, as checkpoints name it; at least `sequence + 1`
    sequence: int  # tokens in a window; its targets are the same window one token later
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


def slice_of_rank(starts: Tensor, rank: int, num_ranks: int, micro_batches: int) -> list[Tensor]:
    """Returns a rank's micro-batches of a global batch, `[batch]`, int64, which its ranks divide.

    A micro-batch of all ranks is one piece of the global batch, whatever their number: a computation over all of it,
    as the capacity of experts does, sees the same tokens. There may be fewer than asked for, and the last may be
    smaller.
    """
    sizes = [num_ranks * size for size in micro_batch_sizes(len(starts) // num_ranks, micro_batches)]
    return [piece.view(num_ranks, -1)[rank] for piece in starts.split(sizes)]


def windows_at(text: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens of `text`, `[tokens]`, at `starts`, `[batch]`, and those after them.

    Both are int64, `[batch, sequence]`.
    """
    if fault_points.active is not None:
        fault_points.active("data", "")
    windows = text[starts.unsqueeze(1) + torch.arange(sequence + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
