"""Recognizes checkpoints that are no snapshots of scale, by their files' names and first bytes.

No code of a file is run: of a pickle, only the names of classes and the texts in it are read, by `pickletools`.
"""

from __future__ import annotations

import json
import os
import pickletools
import re
import shlex
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Literal

_STEP = re.compile(r"step-\d{8,}")
_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save's magic number, pickled
_LONGEST_PICKLE = 1 << 28  # bytes; of the structure alone, without tensors
_LONGEST_TEXT = 1 << 24  # bytes; of one text in it
_LONGEST_HEADER = 100_000_000  # bytes; as the safetensors library has it
_MODEL_WORDS = {"weight", "bias", "model", "state_dict", "model_state_dict"}
_NUMBER = re.compile(r"\d+")


class Format(Enum):
    """The kind of a checkpoint, as a user would call it.

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    SNAPSHOT = "a snapshot of scale"
    SNAPSHOT_FOLDER = "a folder of snapshots of scale"
    TORCH_FILE = "a file of torch.save"
    TORCH_SHARDS = "one rank's shard of a checkpoint that FairScale or FSDP saved rank by rank"
    DCP = "a folder of torch.distributed.checkpoint (DCP)"
    SAFETENSORS = "a safetensors file"
    SAFETENSORS_FOLDER = "a folder of safetensors files, as Hugging Face's save_pretrained writes it"
    TORCH_FOLDER = "a folder of pytorch_model.bin files, as Hugging Face's save_pretrained wrote it"
    OPTIMIZER_FILE = "an optimizer's state alone (of torch.optim or FairScale's OSS), in a file of torch.save"
    TORCHSCRIPT = "a TorchScript archive"
    PICKLE = "a pickle"
    DEEPSPEED = "a checkpoint of DeepSpeed"
    MEGATRON = "a checkpoint of Megatron-LM"


_INSTEAD = {
    Format.OPTIMIZER_FILE: "It has parameters by number and not by name: save it beside the model's, as "
    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) gives it",
    Format.TORCHSCRIPT: "Save the weights alone: torch.save(torch.jit.load(path).state_dict(), file)",
    Format.PICKLE: "It may run any code when it is opened: save its tensors by torch.save in the program that made it",
    Format.DEEPSPEED: "Run the zero_to_fp32.py that DeepSpeed has put into it, and convert the file which that writes",
    Format.MEGATRON: "Convert it by Megatron's own tools (tools/checkpoint/convert.py) to the torch_dist or the "
    "Hugging Face format, and that by scale-train snapshot convert",
}


@dataclass(frozen=True)
class Recognized:
    """The kind of checkpoint at a path.

    Attributes:
        path: The file or folder.
        format: Its format.
        parts: Of `TORCH_SHARDS`, the file of each rank, by rank.

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    path: Path
    format: Format
    parts: tuple[Path, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """Whether it is another format than scale's own."""
        return self.format not in (Format.SNAPSHOT, Format.SNAPSHOT_FOLDER)

    @property
    def is_convertible(self) -> bool:
        """Whether `scale_snapshot.convert` reads it."""
        return self.format not in _INSTEAD

    def advice(self, to: Literal["snapshot", "safetensors"] = "snapshot") -> str:
        """Says in two sentences its kind and how it becomes a snapshot, or a folder of safetensors files."""
        problem = "no snapshot of scale" if to == "snapshot" else "no folder of safetensors files"
        fact = f"{self.path} is {self.format.value}, and {problem}. "
        if not self.is_convertible:
            return fact + _INSTEAD[self.format]
        target = self.path.with_name(f"{self.path.name}-{to}")
        options, arguments = (
            ("", "") if to == "snapshot" else (" --to safetensors --model-only", ", to='safetensors', model_only=True")
        )
        return (
            f"{fact}Convert it, and load {target}: scale-train snapshot convert {shlex.quote(str(self.path))} "
            f"{shlex.quote(str(target))}{options} (or, in Python: from scale_snapshot import convert_checkpoint; "
            f"convert_checkpoint({str(self.path)!r}, {str(target)!r}{arguments}))"
        )


def recognize(path: str | os.PathLike[str]) -> Recognized | None:
    """Returns the kind of a file or folder; None if it is not a known checkpoint, or is missing.

    Raises:
        OSError: It can't be read.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot.foreign import recognize
        >>> path = f"{tempfile.mkdtemp()}/weights.pt"
        >>> torch.save(torch.nn.Linear(4, 3).state_dict(), path)
        >>> recognize(path).format.name
        'TORCH_FILE'

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    path = Path(path)
    if path.is_dir():
        return _recognize_folder(path)
    return _recognize_file(path) if path.is_file() else None


def _recognize_file(path: Path) -> Recognized | None:
    with path.open("rb") as file:
        start = file.read(16)
        if start.startswith(b"PK\x03\x04"):
            return _recognize_zip(path)
        if start.startswith(_LEGACY_TORCH):
            file.seek(0)
            for _ in range(3):  # the magic number, the version of the format, and the description of the machine
                _words(file)
            return _of_pickle(path, _words(file))
        if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
            return Recognized(path, Format.PICKLE)
        return Recognized(path, Format.SAFETENSORS) if _is_safetensors(path, start) else None


def _recognize_zip(path: Path) -> Recognized | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            pickled = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
            if not pickled:
                return None
            if any("/code/" in name for name in names):
                return Recognized(path, Format.TORCHSCRIPT)
            try:
                with archive.open(pickled[0]) as file:
                    return _of_pickle(path, _words(file))
            except (zipfile.BadZipFile, zlib.error, RuntimeError):  # Damaged; whoever opens it will say so.
                return Recognized(path, Format.TORCH_FILE)
    except (zipfile.BadZipFile, NotImplementedError):
        return None


def _of_pickle(path: Path, words: set[str]) -> Recognized:
    if "param_metadata" in words or "ShardedTensor" in words or any("flat_param" in word for word in words):
        return Recognized(path, Format.TORCH_SHARDS, siblings(path))
    if {"state", "param_groups"} <= words and not any("." in word or word in _MODEL_WORDS for word in words):
        return Recognized(path, Format.OPTIMIZER_FILE)
    return Recognized(path, Format.TORCH_FILE)


class _BoundedReader:
    """A file for `pickletools`: a pickle may announce a text of 2^62 bytes, for which `read` would make room."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.tell = file, file.tell

    def read(self, num_bytes: int) -> bytes:
        return self._file.read(min(num_bytes, _LONGEST_TEXT))

    def readline(self) -> bytes:
        return self._file.readline(_LONGEST_TEXT)


def _words(file: IO[bytes]) -> set[str]:
    """The texts of one pickle and the names of its classes, without modules; nothing of it is run."""
    words: set[str] = set()
    try:
        # It calls these three methods, and its stubs ask for all of a file.
        for code, argument, position in pickletools.genops(_BoundedReader(file)):  # type: ignore[arg-type]
            if isinstance(argument, str):
                words.add(argument.rpartition(" ")[2].rpartition(".")[2] if code.name == "GLOBAL" else argument)
            if position is not None and position > _LONGEST_PICKLE:
                break
    except (ValueError, EOFError, UnicodeDecodeError):  # damaged; whoever opens it will say so
        pass
    return words


def _is_safetensors(path: Path, start: bytes) -> bool:
    if len(start) < 9 or start[8:9] != b"{":
        return False
    (length,) = struct.unpack("<Q", start[:8])
    return bool(length <= min(_LONGEST_HEADER, path.stat().st_size - 8))


def siblings(path: Path) -> tuple[Path, ...]:
    """The files next to one whose names differ only in the last number, by that number: one for each rank."""
    numbers = list(_NUMBER.finditer(path.stem))
    if not numbers:
        return (path,)
    last = numbers[-1]
    before, after = path.name[: last.start()], path.name[last.end() :]
    pattern = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
    path_by_number = {
        int(match[1]): other for other in path.parent.iterdir() if (match := pattern.fullmatch(other.name))
    }
    return tuple(path_by_number[number] for number in sorted(path_by_number))


def _recognize_folder(path: Path) -> Recognized | None:
    names = {entry.name for entry in path.iterdir()}
    for folder_format in _folder_formats(path, names):
        return Recognized(path, folder_format)
    return _recognize_rank_files(path, sorted(names))


def _folder_formats(path: Path, names: set[str]) -> Iterator[Format]:
    if "manifest.json" in names and any(re.fullmatch(r"rank-\d{5,}\.safetensors", name) for name in names):
        yield Format.SNAPSHOT
    if any(_STEP.fullmatch(name) for name in names):
        yield Format.SNAPSHOT_FOLDER
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        yield Format.DCP
    if "latest_checkpointed_iteration.txt" in names or _holds(path, names, "mp_rank_*/model_optim_rng.pt"):
        yield Format.MEGATRON
    if "zero_to_fp32.py" in names or any(re.match(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_", name) for name in names):
        yield Format.DEEPSPEED
    if any(re.fullmatch(r"mp_rank_\d+_model_states\.pt", name) for name in names) or _holds(
        path, names, "global_step*/*_states.pt"
    ):
        yield Format.DEEPSPEED
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        yield Format.SAFETENSORS_FOLDER
    if any(re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", name) for name in names):
        yield Format.TORCH_FOLDER


def _holds(path: Path, names: set[str], pattern: str) -> bool:
    folder = pattern.partition("*")[0]
    return any(name.startswith(folder) for name in names) and next(path.glob(pattern), None) is not None


def _recognize_rank_files(path: Path, names: Sequence[str]) -> Recognized | None:
    files = [path / name for name in names if Path(name).suffix in _TORCH_SUFFIXES]
    first = _recognize_file(files[0]) if files else None
    if first is None:
        return None
    if first.format is Format.TORCH_SHARDS and set(first.parts) == set(files):
        return Recognized(path, first.format, first.parts)
    return first if len(files) == 1 else None


def index_of(folder: Path) -> dict[str, str] | None:
    """The index of a folder of several files, as {name of a tensor: name of its file}; None where there is none.

    Raises:
        ValueError: The file is not an index, or names a file outside of the folder.
    """
    index_files = [*sorted(folder.glob("*.safetensors.index.json")), *sorted(folder.glob("*.bin.index.json"))]
    return read_index(index_files[0]) if index_files else None


def read_index(path: Path) -> dict[str, str]:
    """The content of an index; see `index_of`."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_by_name = {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of tensors: expected a 'weight_map' of names to files") from error
    for name, file in file_by_name.items():
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{path}: {name} is said to be in {file!r}, expected a file of this folder")
    return file_by_name
