import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from scale_snapshot.format import safetensors_io
from scale_snapshot.format.checksums import checksum
from scale_snapshot.format.safetensors_io import (
    DTYPES,
    TensorEntry,
    WrittenFile,
    memory_of,
    read_entries,
    read_metadata,
    write_tensors,
)
from scale_snapshot.format.stored_file import opened


def write(path: Path, tensors: dict[str, Tensor]) -> WrittenFile:
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return write_tensors(path, entries, list(tensors.values()).__getitem__, {"save": "this one"})


def random_of(dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_written_and_read_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_of(dtype)
    written = write(tmp_path / "file", {"a": tensor})
    read = torch.empty(2, 5, dtype=dtype)
    with opened(tmp_path / "file") as file:
        file.read_into([memory_of(read)], written.begins[0] + 5 * dtype.itemsize)
    assert torch.equal(read.view(torch.uint8), tensor[1:3].contiguous().view(torch.uint8))


def test_the_checksums_are_those_of_all_bytes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "BLOCK_BYTES", 100)
    written = write(tmp_path / "file", {"a": torch.arange(60), "b": torch.arange(7)})
    data = (tmp_path / "file").read_bytes()
    assert (written.num_bytes, written.block_bytes) == (len(data), 100)
    assert written.checksums == [checksum(data[begin : begin + 100]) for begin in range(0, len(data), 100)]


def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    tensors = {
        "weight[0:3, 0:5]": random_of(torch.bfloat16),
        "step[]": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "transposed": random_of(torch.float64).t(),
        "flags": torch.tensor([True, False, True]),
    }
    write(tmp_path / "file.safetensors", tensors)
    with safetensors.safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_a_tensor_is_produced_only_when_its_turn_comes(tmp_path: Path) -> None:
    held: list[int] = []

    def produce(index: int) -> Tensor:
        held.append(index)
        return torch.full((1 << 20,), float(index))

    entries = [TensorEntry(f"t{index}", torch.float32, (1 << 20,)) for index in range(3)]
    write_tensors(tmp_path / "file", entries, produce, {})
    assert held == [0, 1, 2]


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "file", {"a": torch.ones(2)})
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", {"a": torch.zeros(2)})


def test_neighbors_are_read_in_one_go_into_their_places(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20
    (tmp_path / "file").write_bytes(data)
    buffers = [bytearray(3) for _ in range(1500)]
    with opened(tmp_path / "file") as file:
        file.read_into([memoryview(buffer) for buffer in buffers], 7)
    assert b"".join(buffers) == data[7 : 7 + 4500]


@pytest.mark.fault(52)
def test_a_file_that_ends_early_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    with opened(tmp_path / "file") as file, pytest.raises(EOFError, match="it ends at byte 10, before what was"):
        file.read_into([memoryview(bytearray(8))], 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no safetensors file: 0 bytes are too short"),
        (b"\x80\x02}q\x00(X\x06\x00\x00" * 9, "no safetensors file: a header of"),
        (struct.pack("<Q", 4) + b"{}  more", None),
        (struct.pack("<Q", 4) + b"[1] more", "its header can't be read .AttributeError"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "its header can't be read .UnicodeDecodeError"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "its header can't be read .RecursionError"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes, message: str | None) -> None:
    (tmp_path / "file").write_bytes(data)
    with opened(tmp_path / "file") as file:
        if message is None:
            assert read_metadata(file) == {}
        else:
            with pytest.raises(ValueError, match=message):
                read_metadata(file)


def header_entry(begin: object, end: object, dtype: str = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"a": header_entry(0, 8), "b": header_entry(4, 12), "c": header_entry(12, 16, shape=[1])},
            "b overlaps with a",
        ),
        ({"a": header_entry(0, 16, shape=[4]), "b": header_entry(0, 16, shape=[4])}, "b overlaps with a: it begins at"),
        (
            {"a": header_entry(0, 4, shape=[1]), "b": header_entry(8, 16)},
            "b leaves a hole after a: it begins at byte 8",
        ),
        ({"a": header_entry(8, 16)}, "a leaves a hole after the header"),
        ({"a": header_entry(0, 8)}, r"a ends at byte \d+, and the file has"),
        ({"a": header_entry(0, 8), "b": header_entry(8, 20, shape=[3])}, "it is cut: b ends at byte"),
        ({"a": header_entry(-8, 0), "b": header_entry(0, 16, shape=[4])}, "a has .* the bytes -8 to 0, expected whole"),
        ({"a": header_entry(0, 16, shape=[-2, -2])}, r"a has the shape \(-2, -2\)"),
        ({"a": header_entry(0, 16, shape=[4.0])}, r"a has the shape \(4.0,\)"),
        ({"a": header_entry(0, 16, shape=[True, 4])}, r"a has the shape \(True, 4\)"),
        ({"a": header_entry(0, 16, "F64")}, None),
        ({"a": header_entry(0, 16, "F64", [4])}, "a of shape .4,. in F64 needs 32 bytes, got 16"),
        ({"a": header_entry(16, 0, shape=[4])}, "a of shape .4,. in F32 needs 16 bytes, got -16"),
        ({"a": header_entry(0, 16, "F128", [1])}, "a has the dtype F128, expected one of BOOL"),
        ({"a": [0, 16]}, "a has a header entry without dtype, shape and two data_offsets"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "a has a header entry without dtype"),
        ({"a": header_entry(0, 16, shape=4)}, "a has a header entry without dtype"),
    ],
)
def test_tensors_have_each_byte_of_a_file_once(tmp_path: Path, header: dict[str, object], message: str | None) -> None:
    """A file of 16 bytes of data; the safetensors library refuses the same headers."""
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with opened(tmp_path / "file") as file:
        if message is None:
            assert [stored.entry.name for stored in read_entries(file)] == ["a"]
        else:
            with pytest.raises(ValueError, match=message):
                read_entries(file)
            with pytest.raises(Exception, match=r"header|dtype|variant"):
                safe_open(tmp_path / "file", framework="pt").__enter__()


def test_empty_tensors_stand_between_others_in_any_order(tmp_path: Path) -> None:
    tensors = {"none": torch.empty(0, 3), "a": torch.ones(2), "nothing": torch.empty(0), "b": torch.ones(2)}
    written = write(tmp_path / "file", tensors)
    with opened(tmp_path / "file") as file:
        assert {stored.entry.name: stored.begin for stored in read_entries(file)} == dict(
            zip(tensors, written.begins, strict=True)
        )


def test_a_name_that_stands_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    entry = json.dumps(header_entry(0, 8))
    text = f'{{"a": {entry}, "a": {entry}}}'.encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with opened(tmp_path / "file") as file, pytest.raises(ValueError, match="'a' stands twice"):
        read_entries(file)


def test_the_metadata_of_a_file_is_read(tmp_path: Path) -> None:
    write(tmp_path / "file", {"a": torch.ones(2)})
    with opened(tmp_path / "file") as file:
        assert read_metadata(file) == {"save": "this one"}


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"symbolic links|not a regular file"), opened(tmp_path / name):
            pass


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"codes: torch.bits8 can't be written: convert it to one of BOOL, .*C128"):
        write(tmp_path / "file", {"codes": torch.empty(1, dtype=torch.bits8)})


def test_complex128_numbers_are_pairs_in_the_file(tmp_path: Path) -> None:
    spectrum = torch.randn(3, 2, dtype=torch.complex128)
    write(tmp_path / "file.safetensors", {"spectrum": spectrum})
    with safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        assert torch.equal(torch.view_as_complex(file.get_tensor("spectrum")), spectrum)
