"""Verifies the files of a snapshot by the checksums in its manifest, in little memory, before anything is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scale_core.arguments import checked_arguments
from scale_snapshot.errors import DamagedSnapshotError
from scale_snapshot.format.checksums import BlockChecksums, ranges_of, union_of
from scale_snapshot.format.metadata import Manifest, read_manifest
from scale_snapshot.format.safetensors_io import read_entries, read_metadata
from scale_snapshot.format.stored_file import StoredFile, is_damage, opened

_PIECE_BYTES = 1 << 20  # Read and hashed at once, so that it is hashed in the processor's cache.
_NAMED = 10

BlockRanges = Mapping[str, Iterable[tuple[int, int]]]
"""Of each file the blocks `[first, last)`."""


@checked_arguments
def verify_snapshot(path: str | Path, progress: Callable[[int], None] = lambda num_bytes: None) -> Manifest:
    """Reads all of a snapshot and compares it with the checksums that were taken when it was written.

    Args:
        path: Its directory.
        progress: Called with the number of bytes that were verified since the last call.

    Returns:
        Its manifest.

    Raises:
        DamagedSnapshotError: The files differ from those that were written; the error names files, bytes and tensors.
        NewerSnapshotError: It was written by a newer version.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import save, verify_snapshot
        >>> path = save(tempfile.mkdtemp(), 1, {"model": torch.nn.Linear(4, 3)})
        >>> list(verify_snapshot(path).files)  # or DamagedSnapshotError
        ['rank-00000.safetensors']

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    path = Path(path)
    manifest = read_manifest(path)
    damage = find_damage(path, manifest, all_blocks(manifest), progress)
    if damage:
        raise DamagedSnapshotError(describe_damage(path, damage))
    return manifest


def all_blocks(manifest: Manifest) -> dict[str, list[tuple[int, int]]]:
    """The blocks of all files."""
    return {name: [(0, len(file.checksums))] for name, file in manifest.files.items()}


def find_damage(
    path: Path, manifest: Manifest, blocks: BlockRanges, progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Verifies these blocks and returns their damage, in words."""
    damages = []
    for name, ranges in blocks.items():
        try:
            damage = _damage_of(path, name, manifest, list(ranges), progress)
        except (OSError, EOFError) as error:
            if not is_damage(error):
                raise
            damage = f"{name} can't be read: {type(error).__name__}: {error}"
        if damage:
            damages.append(damage)
    return damages


def describe_damage(path: Path, found: list[str]) -> str:
    """One sentence for all damage of a snapshot."""
    more = f"; and {len(found) - _NAMED} more files" if len(found) > _NAMED else ""
    return f"{path} is damaged: {'; '.join(found[:_NAMED])}{more}"


def _damage_of(
    path: Path, name: str, manifest: Manifest, ranges: Sequence[tuple[int, int]], progress: Callable[[int], None]
) -> str:
    num_bytes, checksums = manifest.files[name].num_bytes, manifest.files[name].checksums
    with opened(path / name, progress) as file:
        bad: list[int] = []
        for first, last in ranges:
            begin, end = first * manifest.block_bytes, min(last * manifest.block_bytes, num_bytes)
            digests = _checksums(file, begin, end, manifest.block_bytes)
            bad += [block for block, digest in enumerate(digests, first) if digest != checksums[block]]
    refusal = ""
    if any(first == 0 for first, _ in ranges):  # Opened again, so that no byte is reported twice.
        with opened(path / name, lambda num_bytes: progress(0)) as file:
            refusal = _identity_refusal(file, name, manifest)
    if not bad:
        return refusal and f"{name} {refusal}"
    places = [(a * manifest.block_bytes, min(b * manifest.block_bytes, num_bytes)) for a, b in ranges_of(bad)]
    keys = list(dict.fromkeys(key for begin, end in places for key in manifest.tensors_within(name, begin, end)))
    contents = ", ".join(keys[:_NAMED]) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
    bytes_text = ", ".join(f"{begin} to {end}" for begin, end in places[:_NAMED])
    return f"the checksum of {name} differs in bytes {bytes_text} ({contents or 'its header'})" + (
        refusal and f"; it {refusal}"
    )


def _checksums(file: StoredFile, begin: int, end: int, block_bytes: int) -> list[str]:
    hashed = BlockChecksums(block_bytes)
    piece = memoryview(bytearray(min(_PIECE_BYTES, end - begin)))
    for position in range(begin, end, _PIECE_BYTES):
        part = piece[: end - position]
        file.read_into([part], position)
        hashed.update(part)
    return hashed.digests()


def _identity_refusal(file: StoredFile, name: str, manifest: Manifest) -> str:
    """Why this is not a file of this save, whatever its checksums are; "" if it is one."""
    try:
        save_id = read_metadata(file).get("save")
        if save_id != manifest.save:
            return f"is of another save: it has the identity {save_id}, and the manifest {manifest.save}"
        chunks = {(tensor.begin, tensor.entry.name) for tensor in read_entries(file)}
    except (ValueError, KeyError, TypeError) as error:
        return f"is {error}"
    expected = manifest.labels_in(name)
    if chunks != expected:
        begin, label = min(chunks ^ expected)
        where = "has" if (begin, label) in chunks else "does not have"
        return f"has other chunks than the manifest says: it {where} {label} at byte {begin}"
    return ""


@dataclass(frozen=True)
class RankReads:
    """The blocks that a rank is going to read, and the host whose file cache they come from."""

    host: str
    blocks: BlockRanges


def blocks_to_verify(manifest: Manifest, reads: Sequence[RankReads], rank: int) -> dict[str, list[tuple[int, int]]]:
    """A rank's share, so that each host verifies its ranks' blocks once, and all together the other blocks."""
    neighbors = [other for other, other_reads in enumerate(reads) if other_reads.host == reads[rank].host]
    read_here = _union([reads[other].blocks for other in neighbors])
    local_blocks = _share(read_here, neighbors.index(rank), len(neighbors))
    read = _union([rank_reads.blocks for rank_reads in reads])
    unread = {name: _gaps(read.get(name, []), len(file.checksums)) for name, file in manifest.files.items()}
    unread_blocks = _share(unread, rank, len(reads))
    names = dict.fromkeys([*local_blocks, *unread_blocks])
    return {name: sorted([*local_blocks.get(name, ()), *unread_blocks.get(name, ())]) for name in names}


def _union(reads: Sequence[BlockRanges]) -> dict[str, list[tuple[int, int]]]:
    """The blocks that are in any of them: sorted ranges that do not overlap."""
    everything: dict[str, list[tuple[int, int]]] = {}
    for blocks in reads:
        for name, ranges in blocks.items():
            everything.setdefault(name, []).extend(ranges)
    return {name: union_of(ranges) for name, ranges in everything.items()}


def _gaps(ranges: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """The ranges of `[0, total)` that lie between sorted ones."""
    edges = [0, *itertools.chain.from_iterable(ranges), total]
    return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]


def _share(blocks: Mapping[str, Sequence[tuple[int, int]]], index: int, count: int) -> dict[str, list[tuple[int, int]]]:
    """The part with this index, of `count` with equal numbers of blocks."""
    total = sum(last - first for ranges in blocks.values() for first, last in ranges)
    begin, end = total * index // count, total * (index + 1) // count
    local_blocks: dict[str, list[tuple[int, int]]] = {}
    before = 0
    for name, ranges in sorted(blocks.items()):
        for first, last in ranges:
            low, high = max(begin - before, 0), min(end - before, last - first)
            if low < high:
                local_blocks.setdefault(name, []).append((first + low, first + high))
            before += last - first
    return local_blocks
