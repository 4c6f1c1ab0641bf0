"""What turns text into tokens: its bytes, or a `tokenizer.json` that the library tokenizers reads; without torch.

Long texts are encoded in pieces that end with a line, so that a piece fits into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from scale_train.model.config import NUM_BYTES
from scale_train.options import Options

BYTE = "byte"
_FILE = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")  # may say which token ends a document
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_PIECE_CHARACTERS = 1 << 20
_BATCH = 64  # pieces that are encoded side by side


class Tokenizer(Protocol):
    """Turns text into numbers below `vocabulary`, and back."""

    name: str
    vocabulary: int
    separator: tuple[int, ...]
    """Stands before each document; empty where nothing is known that does."""
    place: str
    """The name by which it is opened from anywhere."""
    sha256: str
    """Of its file; empty for bytes."""

    def encode(self, texts: Sequence[bytes]) -> Iterator[list[int]]:
        """Yields the tokens of each text, without separators."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns tokens as text for people."""


class ByteTokenizer:
    """Bytes as tokens; a zero byte begins a document."""

    name: str = BYTE
    vocabulary: int = NUM_BYTES
    separator: tuple[int, ...] = (0,)
    place: str = BYTE
    sha256: str = ""

    def encode(self, texts: Sequence[bytes]) -> Iterator[list[int]]:
        return map(list, texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """Without invalid UTF-8 and control characters."""
        text = bytes(tokens).decode("utf-8", errors="replace").replace("\0", "\n")
        return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text).strip("\n")


class FileTokenizer:
    """A `tokenizer.json`, as it lies in the folder of a model of Hugging Face."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Read
        except ImportError as error:
            raise ValueError(
                f"--tokenizer {path}: the library tokenizers is not installed: pip install 'scale-train[tokenizers]'"
            ) from error
        self.file = tokenizer_file(path)
        try:
            self.content = self.file.read_bytes()
            self._tokenizer: Any = Read.from_str(self.content.decode())
        except OSError as error:
            missing = f": there is no {_FILE} in it" if Path(path).is_dir() else f" ({error.strerror})"
            raise ValueError(f"--tokenizer {path}: cannot be read{missing}") from error
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"--tokenizer {path}: no tokenizer.json of the library tokenizers: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name: str = str(path)
        self.place: str = str(self.file.absolute())
        self.sha256: str = hashlib.sha256(self.content).hexdigest()
        self.vocabulary: int = max(ids.values(), default=0) + 1
        ends = [ids[text] for text in (*_ends_beside(self.file), *_USUAL_ENDS) if text in ids]
        self.separator: tuple[int, ...] = tuple(ends[:1])

    def encode(self, texts: Sequence[bytes]) -> Iterator[list[int]]:
        for text in texts:
            pieces = list(_pieces(text.decode("utf-8", errors="replace")))
            tokens: list[int] = []
            for first in range(0, len(pieces), _BATCH):
                batch = self._tokenizer.encode_batch(pieces[first : first + _BATCH], add_special_tokens=False)
                tokens += [token for encoding in batch for token in encoding.ids]
            yield tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def tokenizer_file(path: Path) -> Path:
    """Returns the file of `--tokenizer`: it, or the one in a folder."""
    return path / _FILE if path.is_dir() else path


def tokenizer_of(options: Options) -> str:
    """Returns the tokenizer's name: the one that was asked for, or the folder of the model, or byte."""
    model = options.model.model
    if options.data.tokenizer is not None or model is None:
        return options.data.tokenizer or BYTE
    folder = model if model.is_dir() else model.parent
    return str(folder) if (folder / _FILE).exists() else BYTE


@cache
def open_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer of `--tokenizer`; a ValueError where there is none."""
    return ByteTokenizer() if name == BYTE else FileTokenizer(Path(name))


def _ends_beside(file: Path) -> Iterator[str]:
    """The texts of the token that ends a document, as the files beside a tokenizer name it."""
    for name in _BESIDE:
        try:
            token = json.loads((file.parent / name).read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            yield token


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > _PIECE_CHARACTERS:
        end = text.rfind("\n", begin, begin + _PIECE_CHARACTERS) + 1 or begin + _PIECE_CHARACTERS
        yield text[begin:end]
        begin = end
    yield text[begin:]
