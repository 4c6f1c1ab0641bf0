"""What a verified snapshot costs beside plain writing and reading of the same bytes, and beside torch's checkpoints.

Each rank holds its rows of some large matrices and a thousand small tensors, as fully sharded training does.

- *plain*: each rank writes its tensors' bytes into one file, one tensor after the other, and waits until the disk has
  them; and reads them back into the tensors. *snapshot*: `save_snapshot` and `load_snapshot` with all that they do:
  plans, manifest, checksums, rename, verification before the first tensor changes. *without checksums*: the same with
  hashing and verification taken out. *DCP*: `torch.distributed.checkpoint` with the same shards, which waits for the
  disk, too, and verifies nothing.
- All take turns, and the time of a turn is that of the slower rank. Ratios are medians of ratios within one turn. GB/s
  counts the bytes of the state over the median time. CPU time is that of all ranks; on a machine with other work it
  says more than the time on the wall.
- A *cold* read finds nothing in the system's cache of files, which is emptied of them before; below the virtual machine
  other caches may have them. A *warm* one finds all there. *columns*: each rank reads its columns of matrices that were
  saved by rows. *1 to 2 ranks*: what one rank saved is read by two, each its rows.
- After each read all tensors are compared with what was saved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from report import Table, save
from team import ALLOCATOR_FOR_TIME, Handlers, Nursery, Team, raise_ranks
from torch import Tensor

from scale_core.comm.group import Group
from scale_core.state.local_shard import LocalShard
from scale_snapshot import load_snapshot, save_snapshot
from scale_snapshot import snapshot as snapshot_module
from scale_snapshot.format.checksums import BlockChecksums
from scale_snapshot.format.safetensors_io import memory_of

WAYS = {
    "plain": "plain",
    "snapshot": "snapshot",
    "unverified": "snapshot without checksums",
    "dcp": "torch.distributed.checkpoint",
}
OPERATIONS = {
    "write": tuple(WAYS),
    "cold read": tuple(WAYS),
    "warm read": tuple(WAYS),
    "warm read of columns": ("plain", "snapshot", "dcp"),
    "warm read, 1 to 2 ranks": ("plain", "snapshot", "dcp"),
}
WIDTH = 2048
SMALL = 1000


@dataclass(frozen=True)
class Row:
    """One size of state."""

    megabytes: int
    world_size: int

    @property
    def title(self) -> str:
        return f"{self.megabytes} MB of state, {self.world_size} rank{'s' if self.world_size > 1 else ''}"


class Rank:
    """A rank's side: its tensors, and each way to write and read them."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.folder = Path(order["folder"])
        height = order["megabytes"] * 1_000_000 // (WIDTH * 4) // 8 // 4 * 4
        shapes = {f"layers.{n}.weight": (height, WIDTH) for n in range(8)}
        shapes |= {f"layers.{n}.bias": (64,) for n in range(SMALL)}
        generator = torch.Generator().manual_seed(1)
        self.whole = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
        self.states: dict[tuple[bool, bool], dict[str, LocalShard]] = {}
        self.saved: dict[str, Path] = {}

    def run(self, operation: str, way: str) -> dict[str, Any]:
        """Does one turn; what it took, and whether all values are right."""
        verb = "write" if operation == "write" else "read"
        columns, from_one = "columns" in operation, "1 to 2" in operation
        state = self.state(columns=columns, alone=False)
        name = f"{way}{'-one' if from_one else ''}{'-columns' if columns and way == 'plain' else ''}"
        if verb == "read":
            if name not in self.saved:
                self.write(way, name, self.state(columns=columns and way == "plain", alone=from_one), alone=from_one)
            for shard in state.values():
                shard.tensor.zero_()
            if "cold" in operation:
                self.forget(self.saved[name])
        elif self.rank == 0 and name in self.saved:
            shutil.rmtree(self.saved[name])
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        if verb == "write":
            self.write(way, name, state)
        else:
            self.read(way, name, state)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
        right = verb == "write" or all(self.is_right(key, shard, columns) for key, shard in state.items())
        dist.barrier()
        return {"seconds": seconds, "cpu_seconds": cpu, "right": right}

    def state(self, *, columns: bool, alone: bool) -> dict[str, LocalShard]:
        """The shards of this rank, in memory of their own: the same at each call."""
        if (columns, alone) not in self.states:
            self.states[columns, alone] = self.new_state(columns=columns, alone=alone)
        return self.states[columns, alone]

    def new_state(self, *, columns: bool, alone: bool) -> dict[str, LocalShard]:
        rank, size = (0, 1) if alone else (self.rank, self.size)
        shards = {}
        for key, tensor in self.whole.items():
            if columns and tensor.ndim == 2:
                part = tensor.chunk(size, dim=1)[rank].contiguous()
                ranges = ((0, tensor.shape[0]),), ((rank * WIDTH // size, (rank + 1) * WIDTH // size),)
                shards[key] = LocalShard(part, tensor.shape, 0, part.numel(), ranges)
            else:
                begin, end = (tensor.numel() * r // size for r in (rank, rank + 1))
                shards[key] = LocalShard(tensor.view(-1)[begin:end].clone(), tensor.shape, begin, end)
        return shards

    def is_right(self, key: str, shard: LocalShard, columns: bool) -> bool:
        expected = self.state_of(key, columns)
        return torch.equal(shard.tensor.view(-1), expected.reshape(-1))

    def state_of(self, key: str, columns: bool) -> Tensor:
        tensor = self.whole[key]
        if columns and tensor.ndim == 2:
            return tensor.chunk(self.size, dim=1)[self.rank]
        begin, end = (tensor.numel() * r // self.size for r in (self.rank, self.rank + 1))
        return tensor.view(-1)[begin:end]

    def write(self, way: str, name: str, state: dict[str, LocalShard], *, alone: bool = False) -> None:
        """Writes into a new directory; all ranks, or the first alone."""
        self.saved[name] = place = self.folder / name
        if alone and self.rank:
            return
        if way == "plain":
            place.mkdir(parents=True, exist_ok=True)
            write_plainly(place / f"rank-{self.rank}", state)
        elif way == "dcp":
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(place), no_dist=alone)
        else:
            with checksums(way != "unverified"):
                save_snapshot(place, 1, state, Group() if alone else None)

    def read(self, way: str, name: str, state: dict[str, LocalShard]) -> None:
        place = self.folder / name
        if way == "plain":
            from_one = name.endswith("-one")
            read_plainly(place / f"rank-{0 if from_one else self.rank}", state, from_one=from_one)
        elif way == "dcp":
            dcp.load(dict(state), storage_reader=dcp.FileSystemReader(place))
        else:
            with checksums(way != "unverified"):
                load_snapshot(place, state)

    def forget(self, place: Path) -> None:
        """Takes the files out of the system's cache."""
        os.sync()
        for path in place.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def write_plainly(path: Path, state: dict[str, LocalShard]) -> None:
    with path.open("wb") as file:
        for shard in state.values():
            file.write(memory_of(shard.tensor))
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path, state: dict[str, LocalShard], *, from_one: bool) -> None:
    with path.open("rb") as file:
        position = 0
        for shard in state.values():
            if from_one:
                file.seek(position + shard.start * 4)
                position += shard.numel() * 4
            buffer = memory_of(shard.tensor)
            while len(buffer):
                buffer = buffer[file.readinto(buffer) :]


@contextmanager
def checksums(wanted: bool) -> Iterator[None]:
    """Takes hashing and verification out, to see what they cost."""
    update, find_damage = BlockChecksums.update, snapshot_module.find_damage
    if not wanted:
        BlockChecksums.update = _count_only  # type: ignore[method-assign]
        vars(snapshot_module)["find_damage"] = lambda *_arguments: []
    try:
        yield
    finally:
        BlockChecksums.update = update  # type: ignore[method-assign]
        vars(snapshot_module)["find_damage"] = find_damage


def _count_only(self: BlockChecksums, data: memoryview) -> None:
    """What `update` does without the hash, so that the manifest has as many checksums as it must."""
    total = self.block_bytes - self._room + len(data)
    self._full += ["0" * 32] * (total // self.block_bytes)
    self._room = self.block_bytes - total % self.block_bytes


def start_rank(order: dict[str, Any]) -> Handlers:
    rank = Rank(order)
    return {"run": rank.run}


@dataclass
class Result:
    """One operation in one way.

    Attributes:
        seconds: Per turn, of the slower rank.
        cpu_seconds: Per turn, of all ranks.
        ratio: Over the plain one of the same turn, median.
        cpu_ratio: The same of CPU time.
        right: Whether all that was read is what was saved.
    """

    row: str
    operation: str
    way: str
    megabytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    ratio: float | None = None
    cpu_ratio: float | None = None
    right: bool = True


def measure_row(nursery: Nursery, row: Row, turns: int, folder: Path) -> list[Result]:
    """All ways by turns, one operation after the other."""
    results = {
        (operation, way): Result(row.title, operation, way, row.megabytes)
        for operation, ways in OPERATIONS.items()
        for way in ways
        if row.world_size > 1 or operation in ("write", "cold read", "warm read")
    }
    order = {"folder": str(folder), "megabytes": row.megabytes}
    with Team(nursery, order, world_size=row.world_size) as team:
        for operation in dict.fromkeys(operation for operation, _ in results):
            ways = [way for of, way in results if of == operation]
            for turn in range(-1 if operation == "write" else 0, turns):  # One before them warms up.
                print(f"{row.title}: {operation}, turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
                shift = turn % len(ways)
                for way in (*ways[shift:], *ways[:shift]):
                    answers = team.ask("run", operation=operation, way=way)
                    results[operation, way].right &= all(answer["right"] for answer in answers)
                    if turn >= 0:
                        results[operation, way].seconds.append(max(answer["seconds"] for answer in answers))
                        results[operation, way].cpu_seconds.append(sum(answer["cpu_seconds"] for answer in answers))
    for (operation, _), result in results.items():
        plain = results[operation, "plain"]
        result.ratio = median(a / b for a, b in zip(result.seconds, plain.seconds, strict=True))
        result.cpu_ratio = median(a / b for a, b in zip(result.cpu_seconds, plain.cpu_seconds, strict=True))
    return list(results.values())


def table_of(row: Row, results: Sequence[Result]) -> Table:
    lines = []
    for result in results:
        seconds = median(result.seconds)
        speed = f"{result.megabytes / 1000 / seconds:.2f}"
        right = "" if result.operation == "write" else "right" if result.right else "WRONG"
        lines.append(
            [result.operation, WAYS[result.way], f"{result.ratio:.2f}", f"{result.cpu_ratio:.2f}", f"{seconds:.3f}"]
        )
        lines[-1] += [f"{median(result.cpu_seconds):.3f}", speed, right]
    return Table(row.title, ["", "", "over plain", "CPU", "s", "CPU s", "GB/s", "values"], lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", default="256,1000")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="where to write; a temporary directory if left out")
    parser.add_argument("--smoke", action="store_true", help="8 MB, one turn; checked")
    parser.add_argument("--date", help="writes results/DATE-snapshots.json and .md")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.megabytes, options.turns = "8", 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.nursery is not None:
        return raise_ranks(options.nursery, start_rank)
    tables, figures = [], []
    with Nursery(__file__, ALLOCATOR_FOR_TIME) as nursery:
        for megabytes in map(int, options.megabytes.split(",")):
            for ranks in map(int, options.ranks.split(",")):
                row = Row(megabytes, ranks)
                with tempfile.TemporaryDirectory(dir=options.folder, prefix="snapshots-") as folder:
                    results = measure_row(nursery, row, options.turns, Path(folder))
                tables.append(table_of(row, results))
                figures += [asdict(result) for result in results]
                print(tables[-1].markdown(), flush=True)
    if options.date:
        save("snapshots", options.date, __doc__ or "", tables, figures)
    wrong = [f"{each['row']}, {each['operation']}, {each['way']}" for each in figures if not each["right"]]
    if wrong:
        print("\n".join(["read back other values:", *wrong]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
