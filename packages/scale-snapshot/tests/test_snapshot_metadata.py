import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_snapshot import DamagedSnapshotError, NewerSnapshotError, SnapshotError
from scale_snapshot.format import metadata
from scale_snapshot.format.checksums import checksum
from scale_snapshot.format.metadata import FILE, read_manifest
from scale_snapshot.snapshot import save_snapshot

FIRST = '{"format": "scale-snapshot", "version": %s, "checksum": "%s",\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return save_snapshot(tmp_path, 1, {"a": torch.ones(4, 4), "b": torch.tensor(2), "note": 1.5}, extra={"x": [1]})


def rewrite(place: Path, change: Callable[[Any], object] | str, version: int = 2) -> None:
    """Writes a changed manifest with a right checksum, as somebody who means harm would."""
    text = (place / FILE).read_text()
    if isinstance(change, str):
        rest = change
    else:
        document = json.loads(text)
        change(document)
        rest = json.dumps({key: document[key] for key in document if key not in ("format", "version", "checksum")})[1:]
    digits = checksum((FIRST % (version, "")).encode(), rest.encode())
    (place / FILE).write_text(FIRST % (version, digits) + rest)


def test_a_manifest_is_json_with_a_checksum_in_its_first_line(place: Path) -> None:
    first, _, rest = (place / FILE).read_text().partition("\n")
    document = json.loads((place / FILE).read_text())
    assert (document["format"], document["version"], document["step"]) == ("scale-snapshot", 2, 1)
    assert document["checksum"] == checksum((FIRST % (2, "")).encode(), rest.encode())
    assert first == (FIRST % (2, document["checksum"])).rstrip("\n")


def test_any_flipped_bit_of_the_manifest_is_found(place: Path) -> None:
    data = (place / FILE).read_bytes()
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            (place / FILE).write_bytes(flipped)
            with pytest.raises(DamagedSnapshotError, match=r"manifest.json is damaged"):
                read_manifest(place)


def test_a_manifest_that_is_cut_or_grown_is_damaged(place: Path) -> None:
    data = (place / FILE).read_bytes()
    for other in (b"", data[:-1], data[:40], data + b" "):
        (place / FILE).write_bytes(other)
        with pytest.raises(DamagedSnapshotError):
            read_manifest(place)


def test_a_newer_version_is_refused_by_that_word(place: Path) -> None:
    rewrite(place, '"of a form": "that nobody knows yet"}', version=3)
    with pytest.raises(
        NewerSnapshotError,
        match=r"was written by a newer scale-core, format version 3; this one reads version 2: upgrade scale-core",
    ):
        read_manifest(place)


def test_the_version_that_was_never_released_is_refused(place: Path) -> None:
    (place / FILE).write_text('{"format": "scale-snapshot", "version": 1, "step": 1}')
    with pytest.raises(SnapshotError, match="is of format version 1, which was never released") as caught:
        read_manifest(place)
    assert type(caught.value) is SnapshotError


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Callable[[Any], object]] = {
    "a path out of the directory": lambda d: d["files"][0].update(name="../rank-00000.safetensors"),
    "an absolute path": lambda d: d["files"][0].update(name="/etc/passwd"),
    "a file named twice": lambda d: d["files"].append(d["files"][0]),
    "a file that is too short": lambda d: d["files"][0].update(bytes=8),
    "a checksum too few": lambda d: d["files"][0].update(checksums=[]),
    "checksums that are no list": lambda d: d["files"][0].update(checksums=7),
    "a huge shape": lambda d: d["tensors"]["a"].update(shape=[1 << 40, 1 << 40]),
    "a shape beyond all numbers": lambda d: d["tensors"]["a"].update(shape=[10**300]),
    "a negative shape": lambda d: d["tensors"]["a"].update(shape=[-4, -4]),
    "a shape of floats": lambda d: d["tensors"]["a"].update(shape=[4.0, 4.0]),
    "many dimensions": lambda d: d["tensors"]["a"].update(shape=[1] * 10_000),
    "a huge chunk": lambda d: d["tensors"]["a"]["chunks"][0].__setitem__(1, [1 << 40, 4]),
    "a chunk that is missing": lambda d: d["tensors"]["a"].update(chunks=[]),
    "a chunk that stands twice": lambda d: d["tensors"]["a"]["chunks"].append(d["tensors"]["a"]["chunks"][0]),
    "a chunk behind the end": lambda d: d["tensors"]["a"]["chunks"][0].__setitem__(3, 1 << 50),
    "a chunk of another file": lambda d: d["tensors"]["a"]["chunks"][0].__setitem__(2, 1),
    "a chunk of the last file": lambda d: d["tensors"]["a"]["chunks"][0].__setitem__(2, -1),
    "an unknown dtype": lambda d: d["tensors"]["a"].update(dtype="Q5"),
    "a dtype that is no text": lambda d: d["tensors"]["a"].update(dtype=["F32"]),
    "tensors that are a list": lambda d: d.update(tensors=[]),
    "values that are a list": lambda d: d.update(values=[1]),
    "a value named like a tensor": lambda d: d["values"].update(a=1),
    "no step": lambda d: d.pop("step"),
    "a step that is true": lambda d: d.update(step=True),
    "a step that is not finite": lambda d: d.update(step=float("nan")),
    "an infinite value": lambda d: d["values"].update(note=float("inf")),
    "an identity that is none": lambda d: d.update(save="../.."),
    "blocks of nothing": lambda d: d.update(block_bytes=0),
    "blocks beyond all numbers": lambda d: d.update(block_bytes=1 << 70),
    "deep nesting": lambda d: d.update(extra=nested(900)),
}


@pytest.mark.fault(56)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(place: Path, what: str) -> None:
    if what == "deep nesting":
        text = (place / FILE).read_text().partition("\n")[2]
        rewrite(place, text.replace('"extra": {"x": [1]}', '"extra": ' + "[" * 200_000 + "]" * 200_000))
    else:
        rewrite(place, HOSTILE[what])
    with pytest.raises(DamagedSnapshotError, match=r"step-00000001"):
        read_manifest(place)


@pytest.mark.parametrize(
    "text",
    ['"step": 1, "step": 2}', '"values": {"a": 1, "a": 2}}', '"extra": 1e999}', '"step": ' + "9" * 5000 + "}", "]"],
)
def test_ambiguous_or_oversized_json_is_refused(place: Path, text: str) -> None:
    rewrite(place, text)
    with pytest.raises(DamagedSnapshotError, match=r"manifest.json is damaged: \w*Error: "):
        read_manifest(place)


@pytest.mark.fault(56)
def test_a_manifest_beyond_the_limit_is_refused_unread(place: Path) -> None:
    os.truncate(place / FILE, 1 << 40)  # A sparse file.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SnapshotError, match="268,435,456 are the limit"):
        read_manifest(place)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_no_manifest_beyond_the_limit_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "LIMIT_BYTES", 1000)
    with pytest.raises(SnapshotError, match=r"the manifest has .* bytes, and 1,000 are the limit"):
        save_snapshot(tmp_path, 1, {"note": "x" * 1000})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [FILE, "rank-00000.safetensors"])
def test_links_are_not_followed(place: Path, name: str) -> None:
    (place / name).rename(place.parent / "elsewhere")
    (place / name).symlink_to(place.parent / "elsewhere")
    with pytest.raises(DamagedSnapshotError, match=r"is a link or no file|can't be read: OSError"):
        read_manifest(place)


def test_what_can_not_be_read_at_present_is_not_called_damaged(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        read_manifest(place)


def test_the_tensors_at_a_place_in_a_file_are_found(place: Path) -> None:
    manifest = read_manifest(place)
    begin = manifest.chunks["a"][0].begin
    assert list(manifest.tensors_within("rank-00000.safetensors", begin + 63, begin + 64)) == ["a"]
    assert list(manifest.tensors_within("rank-00000.safetensors", 0, begin)) == []
    assert list(manifest.tensors_within("rank-00000.safetensors", 0, 1 << 30)) == ["a", "b"]
