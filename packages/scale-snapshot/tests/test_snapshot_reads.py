import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from scale_core.sharded_tensor.chunks import Chunk
from scale_snapshot.format import reads as reads_module
from scale_snapshot.format import stored_file
from scale_snapshot.format.reads import Read, blocks_of, read_tensors
from scale_snapshot.format.safetensors_io import memory_of
from scale_snapshot.format.stored_file import StoredFile


def a_read(source: torch.Tensor, part: Chunk, into: torch.Tensor, begin: int = 0) -> Read:
    return Read("file", begin, tuple(source.shape), part, source.dtype, into)


@pytest.mark.parametrize("staged_bytes", [2, 16, 40, 1 << 20])
def test_random_parts_land_in_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged_bytes: int) -> None:
    monkeypatch.setattr(reads_module, "_STAGED_BYTES", staged_bytes)
    drawn = random.Random(staged_bytes)
    for turn in range(60):
        shape = tuple(drawn.randint(1, 5) for _ in range(drawn.randint(0, 4)))
        source = torch.randint(0, 100, shape, dtype=torch.int16)
        (tmp_path / "file").write_bytes(b"header" + memory_of(source).tobytes())
        offsets = tuple(drawn.randrange(size) for size in shape)
        sizes = tuple(drawn.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True))
        into = torch.zeros(sizes, dtype=drawn.choice([torch.int16, torch.float32]))
        if turn % 3 == 0 and into.ndim > 1:
            into = into.transpose(0, 1).contiguous().transpose(0, 1)
        read_tensors(tmp_path, [a_read(source, Chunk(offsets, sizes), into, begin=6)])
        expected = source[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert torch.equal(into, expected.to(into.dtype)), (shape, offsets, sizes)


def test_neighbors_are_read_by_one_call_and_files_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.arange(12.0)
    (tmp_path / "file").write_bytes(memory_of(source).tobytes())
    calls: list[tuple[int, int]] = []
    files: list[Path] = []

    class CountedFile(StoredFile):
        def __init__(self, path: Path, progress: Callable[[int], None], retry_seconds: float | None) -> None:
            files.append(path)
            super().__init__(path, progress, retry_seconds)

        def read_into(self, buffers: Sequence[memoryview], begin: int) -> None:
            calls.append((len(buffers), begin))
            super().read_into(buffers, begin)

    monkeypatch.setattr(stored_file, "StoredFile", CountedFile)
    parts = [torch.zeros(3) for _ in range(4)]
    order = (2, 0, 3, 1)
    read_tensors(tmp_path, [a_read(source, Chunk((3 * n,), (3,)), parts[n]) for n in order])
    assert calls == [(4, 0)] and len(files) == 1
    assert torch.equal(torch.cat(parts), source)


def test_autograd_hears_that_a_tensor_was_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(memory_of(torch.ones(3)).tobytes())
    weight = torch.zeros(3, requires_grad=True)
    loss = (weight * weight).sum()
    read_tensors(tmp_path, [a_read(torch.ones(3), Chunk((0,), (3,)), weight.detach())])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_blocks_of_reads_are_those_that_they_touch() -> None:
    source = torch.zeros(100, dtype=torch.uint8)
    reads = [
        a_read(source, Chunk((at,), (size,)), torch.zeros(size, dtype=torch.uint8))
        for at, size in ((95, 5), (0, 10), (10, 1), (59, 2))
    ]
    assert blocks_of(reads, 10) == {"file": [(0, 2), (5, 7), (9, 10)]}
