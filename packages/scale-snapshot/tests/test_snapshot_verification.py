import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scale_core.state.local_shard import LocalShard
from scale_core.testing import run_ranks
from scale_snapshot import DamagedSnapshotError, load_snapshot, save_snapshot, verify_snapshot
from scale_snapshot.format import safetensors_io as io
from scale_snapshot.format.checksums import checksum
from scale_snapshot.format.metadata import FILE, read_manifest
from scale_snapshot.format.verification import RankReads, all_blocks, blocks_to_verify

NAME = "rank-00000.safetensors"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(io, "BLOCK_BYTES", 128)
    return save_snapshot(tmp_path, 1, {f"layers.{n}": torch.full((32,), float(n)) for n in range(4)})


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_a_whole_snapshot_is_verified_to_the_last_byte(place: Path) -> None:
    seen: list[int] = []
    manifest = verify_snapshot(place, seen.append)
    assert sum(seen) == (place / NAME).stat().st_size == manifest.files[NAME].num_bytes


@pytest.mark.fault(51)
def test_any_flipped_bit_of_a_file_is_found(place: Path) -> None:
    data = (place / NAME).read_bytes()
    for position in range(len(data)):
        flip(place / NAME, position, bit=position % 8)
        with pytest.raises(DamagedSnapshotError, match=f"step-00000001 is damaged: the checksum of {NAME} differs in"):
            verify_snapshot(place)
        (place / NAME).write_bytes(data)
    verify_snapshot(place)


def test_the_error_names_file_bytes_and_tensors(place: Path) -> None:
    manifest = read_manifest(place)
    flip(place / NAME, manifest.chunks["layers.2"][0].begin + 70)
    with pytest.raises(DamagedSnapshotError, match=rf"checksum of {NAME} differs in bytes \d+ to \d+ \(.*layers.2"):
        verify_snapshot(place)
    flip(place / NAME, manifest.chunks["layers.2"][0].begin + 70)
    flip(place / NAME, 20)
    with pytest.raises(DamagedSnapshotError, match=r"in bytes 0 to 128 \(its header\)"):
        verify_snapshot(place)


def test_a_file_of_another_save_is_refused_by_its_identity(place: Path) -> None:
    other = save_snapshot(place.parent, 2, {f"layers.{n}": torch.full((32,), float(n)) for n in range(4)})
    shutil.copyfile(other / NAME, place / NAME)
    own, others = read_manifest(place).save, read_manifest(other).save
    with pytest.raises(DamagedSnapshotError, match=f"it is of another save: .* {others}, and the manifest {own}"):
        verify_snapshot(place)


def as_torch_save(path: Path, length: int) -> None:
    torch.save({"a": torch.ones(4)}, path)
    data = path.read_bytes()[:length]
    path.write_bytes(data + bytes(length - len(data)))


@pytest.mark.fault(112)
@pytest.mark.parametrize("key", ["layers.1", "halves"])
def test_chunks_that_the_manifest_exchanges_are_found(tmp_path: Path, key: str) -> None:
    """A manifest with a right checksum, as of a program that rewrites it."""
    run_ranks(save_in_halves, 2, tmp_path)
    place = tmp_path / "step-00000001"
    _, _, rest = (place / FILE).read_bytes().partition(b"\n")
    tensors = (document := json.loads(b"{" + rest))["tensors"]
    if key == "halves":
        here, there = tensors[key]["chunks"]
        here[:2], there[:2] = there[:2], here[:2]
    else:
        tensors[key], tensors["layers.2"] = tensors["layers.2"], tensors[key]
    changed = json.dumps(document)[1:].encode()
    form = b'{"format": "scale-snapshot", "version": 2, "checksum": "%s",\n'
    (place / FILE).write_bytes(form % checksum(form % b"", changed).encode() + changed)
    with pytest.raises(DamagedSnapshotError, match=rf"has other chunks than the manifest says: it .* {key}\["):
        verify_snapshot(place)


def save_in_halves(folder: Path) -> None:
    rank = dist.get_rank()
    halves = LocalShard(torch.full((4,), float(rank)), (8,), 4 * rank, 4 * rank + 4)
    save_snapshot(folder, 1, {"halves": halves, **{f"layers.{n}": torch.full((4,), float(n)) for n in range(4)}})


@pytest.mark.parametrize("write", [as_torch_save, lambda path, length: path.write_bytes(b"\x80\x04" * (length // 2))])
def test_a_file_of_the_right_length_but_another_form_is_refused(place: Path, write: Any) -> None:
    write(place / NAME, (place / NAME).stat().st_size)
    with pytest.raises(DamagedSnapshotError, match="it is no safetensors file"):
        verify_snapshot(place)


def test_nothing_is_loaded_from_a_damaged_file(place: Path) -> None:
    flip(place / NAME, (place / NAME).stat().st_size - 1)
    target = {f"layers.{n}": torch.full((32,), -1.0) for n in range(4)}
    with pytest.raises(DamagedSnapshotError, match=r"layers.3\)\. No older snapshot is complete"):
        load_snapshot(place.parent, target, step=1)
    assert all((tensor == -1).all() for tensor in target.values())


def verified_by(place: Path, reads: list[RankReads]) -> list[list[int]]:
    shares = [blocks_to_verify(read_manifest(place), reads, rank) for rank in range(len(reads))]
    return [[block for first, last in share.get(NAME, ()) for block in range(first, last)] for share in shares]


def test_what_no_rank_reads_is_shared_out_evenly(place: Path) -> None:
    (((_, total),),) = all_blocks(read_manifest(place)).values()
    shares = verified_by(place, [RankReads(host, {}) for host in "abb"])
    assert sorted(itertools.chain(*shares)) == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_host_verifies_what_its_ranks_read_once(place: Path) -> None:
    (((_, total),),) = all_blocks(read_manifest(place)).values()
    reads = [RankReads("a", {NAME: [(1, 4)]}), RankReads("b", {NAME: [(2, 3)]}), RankReads("a", {NAME: [(0, 2)]})]
    shares = verified_by(place, reads)
    on_a, on_b = [*shares[0], *shares[2]], shares[1]
    assert len({*on_a}) == len(on_a) and {0, 1, 2, 3} <= {*on_a} and 2 in on_b
    assert {*on_a, *on_b} == set(range(total)) and {*on_a} & {*on_b} == {2}
    assert abs(len(shares[0]) - len(shares[2])) <= 1


def test_ranks_of_a_host_that_read_all_share_the_verification(place: Path) -> None:
    manifest = read_manifest(place)
    shares = verified_by(place, [RankReads("a", all_blocks(manifest))] * 3)
    assert sorted(itertools.chain(*shares)) == list(range(len(manifest.files[NAME].checksums)))
