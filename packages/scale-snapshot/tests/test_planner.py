"""What is planned to be read, from saved chunks of any cut into held ones of any other."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scale_core.sharded_tensor.chunks import Chunk
from scale_core.state.local_shard import LocalShard
from scale_core.state.validation import SavedTensor
from scale_snapshot.format.metadata import Manifest, SavedChunk, SavedFile
from scale_snapshot.format.planner import plan_reads
from scale_snapshot.format.reads import read_tensors
from scale_snapshot.format.safetensors_io import memory_of


def cut(drawn: random.Random, chunk: Chunk, depth: int) -> Iterator[Chunk]:
    """Cuts a chunk at random places into chunks."""
    dim = drawn.randrange(len(chunk.sizes)) if chunk.sizes else 0
    if not depth or not chunk.sizes or chunk.sizes[dim] < 2:
        yield chunk
        return
    at = drawn.randint(1, chunk.sizes[dim] - 1)
    for begin, size in ((0, at), (at, chunk.sizes[dim] - at)):
        offsets = (*chunk.offsets[:dim], chunk.offsets[dim] + begin, *chunk.offsets[dim + 1 :])
        yield from cut(drawn, Chunk(offsets, (*chunk.sizes[:dim], size, *chunk.sizes[dim + 1 :])), depth - 1)


def manifest_of(tensor: torch.Tensor, chunks: list[SavedChunk]) -> Manifest:
    saved = SavedTensor(tuple(tensor.shape), tensor.dtype)
    return Manifest("0" * 32, 1, {"a": saved}, {"a": chunks}, {}, None, {"file": SavedFile(0, [])}, 1)


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (3, 4, 5), (0, 3)])
def test_saved_chunks_fill_held_ranges_of_any_other_cut(tmp_path: Path, shape: tuple[int, ...]) -> None:
    drawn = random.Random(len(shape))
    whole = torch.rand(shape)
    for _ in range(20):
        data, chunks = b"", []
        for chunk in cut(drawn, Chunk((0,) * len(shape), shape), 3):
            part = whole[tuple(slice(o, o + s) for o, s in zip(*chunk, strict=True))].contiguous()
            chunks.append(SavedChunk(chunk, "file", len(data)))
            data += memory_of(part).tobytes()
        (tmp_path / "file").write_bytes(data)
        drawn.shuffle(chunks)
        start, stop = sorted(drawn.randint(0, whole.numel()) for _ in range(2))
        held = torch.zeros(stop - start)
        read_tensors(tmp_path, plan_reads(manifest_of(whole, chunks), {"a": LocalShard(held, shape, start, stop)}))
        assert torch.equal(held, whole.view(-1)[start:stop])
        into = torch.zeros(shape)
        read_tensors(tmp_path, plan_reads(manifest_of(whole, chunks), {"a": into}))
        assert torch.equal(into, whole)


def test_elements_that_no_chunk_has_are_refused() -> None:
    tensor = torch.zeros(4, 2)
    manifest = manifest_of(tensor, [SavedChunk(Chunk((0, 0), (3, 2)), "file", 0)])
    with pytest.raises(ValueError, match="reading a: 6 elements in the chunks of a tensor of 8"):
        plan_reads(manifest, {"a": tensor})
    assert plan_reads(manifest, {"b": tensor}) == []
