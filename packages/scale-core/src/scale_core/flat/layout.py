"""The place of every parameter in one flat buffer that all ranks share evenly.

A unit gathers all its parameters with one collective, so they are in one 1-D buffer that is cut into `world_size`
shards of one size. This module computes where: names, shapes and numbers in, numbers out, so that a plan can be
printed, compared between ranks and tested without a tensor or a process.

An *atom* is a run of elements that no two ranks may share. It is a row by default, so that a local shard keeps its
number of dimensions and is one box of its tensor on disk.

    >>> layout = FlatLayout.plan(["bias", "weight", "scale"], [(6,), (5, 6), ()], world_size=2, atom="row")
    >>> print(layout.describe())
    3 parameters, 37 elements on 2 ranks: 19 each, 1 of padding (2.70 %)
    name    shape   cut  atom  offset  ranks
    bias    (6,)    row     1      31  1
    weight  (5, 6)  row     6       1  0-1
    scale   ()      row     1       0  0
    >>> [layout.span(1, rank).shape for rank in range(2)]
    [(3, 6), (2, 6)]

See `packing` for how atoms are placed, and how much padding that costs at most.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from scale_core.arguments import did_you_mean
from scale_core.flat.packing import Piece, pack

ALIGNED_BYTES = 16
"""Where a parameter starts in its flat buffer is a multiple of this many bytes; see `alignment_of`."""

AUTO_PADDING = 100
"""An "auto" plan keeps rows while its padding is at most one part in this many."""

Cut: TypeAlias = Literal["element", "row", "block", "parameter"]


@dataclass(frozen=True)
class BlockAtom:
    """An atom of `size` consecutive elements, counted from the parameter's start; the last one may be shorter.

    Raises:
        ValueError: `size` is below 1.

    Examples:
        >>> from scale_core.flat.layout import BlockAtom
        >>> BlockAtom(256)  # `fully_shard(model, atom=BlockAtom(256))`: for optimizers of 8 bits
        BlockAtom(size=256)

    See also: [the core](../how-the-core-works.md).
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a block holds at least one element, got BlockAtom({self.size}): write BlockAtom(128)")


Atom: TypeAlias = Literal["auto", "element", "row", "parameter"] | BlockAtom
ATOM_NAMES: tuple[str, ...] = ("auto", "element", "row", "parameter")


@dataclass(frozen=True)
class LayoutEntry:
    """One parameter's place in the full buffer.

    Attributes:
        name: Qualified name.
        shape: Global shape.
        atom: Elements that stay together on one rank: 1, the row's length, the block's size, or all of them.
        cut: The name of `atom`.
        offset: First element in the full buffer.
        note: Why "auto" fell back to elements; empty where it didn't.
        numel: Elements of the full parameter.
    """

    name: str
    shape: tuple[int, ...]
    atom: int
    cut: Cut
    offset: int
    note: str = ""
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))


@dataclass(frozen=True)
class ShardSpan:
    """The part of one parameter that one rank holds.

    Attributes:
        start: First element, counted in the row-major flattened parameter.
        stop: One past the last element; equal to `start` where the rank holds nothing.
        shard_offset: Where the part begins in the rank's shard.
        shape: Local shape: the full shape if the rank holds the full parameter; (rows, *rest), after any leading ones,
            if it is cut between rows; 1-D if it is cut inside a row; (0, *shape[1:]) if the rank holds nothing.
        numel: Elements of the part.
    """

    start: int
    stop: int
    shard_offset: int
    shape: tuple[int, ...]
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", self.stop - self.start)


@dataclass(frozen=True)
class FlatLayout:
    """The places of parameters in a buffer of `world_size` shards of `shard_numel` elements each.

    Attributes:
        entries: One per parameter, in the order in which the caller gave them. Their offsets have a different order.
        world_size: Ranks that hold a shard.
        shard_numel: Elements of every shard, padding included.
        full_numel: Elements of the full buffer.
        numel: Elements of all parameters.
        padding: Elements of the full buffer that belong to no parameter.

    Examples:
        >>> from scale_core.flat.layout import FlatLayout
        >>> layout = FlatLayout.plan(["weight", "bias"], [(4, 3), (4,)], world_size=2)
        >>> layout.shard_numel  # of 16 elements
        8
        >>> [span.start for span in layout.spans(rank=1)]
        [8, 0]

    See also: [the core](../how-the-core-works.md).
    """

    entries: tuple[LayoutEntry, ...]
    world_size: int
    shard_numel: int
    full_numel: int = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    padding: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "full_numel", self.world_size * self.shard_numel)
        object.__setattr__(self, "numel", sum(entry.numel for entry in self.entries))
        object.__setattr__(self, "padding", self.full_numel - self.numel)

    @classmethod
    def plan(
        cls,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        world_size: int,
        atom: Atom | Callable[[str, tuple[int, ...]], Atom] = "auto",
        *,
        alignment: int = 1,
    ) -> FlatLayout:
        """Places the parameters; the same arguments give the same layout on every rank.

        Args:
            names: Qualified names, each once.
            shapes: Global shapes, one per name.
            world_size: Ranks that share the buffer.
            atom: The block that is never cut, for all parameters or by a function of name and shape. "auto" is "row"
                for parameters of two or more dimensions, if the plan then pads by at most 1 %, or by no more than
                "element" would. If not, it cuts the parameters with the longest rows at elements, and as few of them as
                possible.
            alignment: Every parameter starts at a multiple of this many elements, and so does every local part of one
                in its shard; see `alignment_of`. It costs fewer than `alignment` elements per parameter.

        Raises:
            ValueError: Names, shapes, `world_size` or `alignment` make no layout, or an atom has an unknown name.
            TypeError: An atom is neither a name nor a `BlockAtom`.
        """
        if world_size < 1:
            raise ValueError(f"a layout needs a world of at least one rank, but world_size is {world_size}")
        if alignment < 1:
            raise ValueError(f"a parameter starts at a multiple of at least one element, but alignment is {alignment}")
        if len(names) != len(shapes):
            raise ValueError(f"each name needs one shape, but there are {len(names)} names and {len(shapes)} shapes")
        if len(set(names)) < len(names):
            twice = min(name for name in names if names.count(name) > 1)
            raise ValueError(f"each parameter is in a layout once, but {twice!r} was given more than once")
        requests = [_asked(name, tuple(map(int, shape)), atom) for name, shape in zip(names, shapes, strict=True)]
        rows = [_resolve(entry, wish) for entry, wish in requests]
        free = {i for i, (_, wish) in enumerate(requests) if wish == "auto" and rows[i].cut == "row"}
        return _keep_rows(rows, free, world_size, alignment)

    def span(self, index: int, rank: int) -> ShardSpan:
        """The part of parameter `index`, in the caller's order, that `rank` holds.

        Raises:
            ValueError: `rank` is not a rank of this layout.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"a rank of this layout is 0 to {self.world_size - 1}, but {rank} was given")
        entry = self.entries[index]
        numel = entry.numel
        ahead = entry.offset - rank * self.shard_numel
        start = min(max(-ahead, 0), numel)
        stop = min(max(self.shard_numel - ahead, 0), numel)
        shard_offset = min(max(ahead, 0), self.shard_numel)
        return ShardSpan(start, stop, shard_offset, _local_shape(entry, stop - start))

    def spans(self, rank: int) -> list[ShardSpan]:
        """The parts of all parameters that `rank` holds, in the caller's order."""
        return [self.span(index, rank) for index in range(len(self.entries))]

    def describe(self) -> str:
        """A table of the plan, one line per parameter, with the reason where "auto" fell back to elements."""
        share = 100 * self.padding / max(1, self.numel)
        title = (
            f"{len(self.entries):,} parameters, {self.numel:,} elements on {self.world_size:,} ranks: "
            f"{self.shard_numel:,} each, {self.padding:,} of padding ({share:.2f} %)"
        )
        table = [("name", "shape", "cut", "atom", "offset", "ranks")]
        for entry in self.entries:
            where = self._ranks(entry) + (f"  {entry.note}" if entry.note else "")
            table.append((entry.name, str(entry.shape), entry.cut, f"{entry.atom:,}", f"{entry.offset:,}", where))
        width = [max(len(line[column]) for line in table) for column in range(5)]
        sides = "<<<>>"
        lines = [
            "  ".join([*(f"{line[i]:{sides[i]}{width[i]}}" for i in range(5)), line[5]]).rstrip() for line in table
        ]
        return "\n".join([title, *lines])

    def digest(self) -> int:
        """A hash of 63 bits of names, shapes, offsets, shard size and world size: equal on every rank and machine."""
        places = [(entry.name, entry.shape, entry.offset) for entry in self.entries]
        plan = (self.world_size, self.shard_numel, places)
        return int.from_bytes(hashlib.blake2b(repr(plan).encode(), digest_size=8).digest(), "big") >> 1

    def _ranks(self, entry: LayoutEntry) -> str:
        """The ranks that hold a part of `entry`, as text."""
        if entry.numel == 0:
            return "-"
        first, last = entry.offset // self.shard_numel, (entry.offset + entry.numel - 1) // self.shard_numel
        return str(first) if first == last else f"{first}-{last}"


def alignment_of(itemsize: int) -> int:
    """The alignment of parameters of this many bytes per element: 16 bytes, as of most kernels' loads.

    A view of a different dtype, for example `view_as_complex`, raises if the offset is not a multiple of that dtype's
    elements. On a GPU a kernel may read 16 bytes at once. Tensors of their own start at 64 bytes or more, so models
    rely on it.

    Example:
        >>> tuple(alignment_of(itemsize) for itemsize in (1, 2, 4, 8))
        (16, 8, 4, 2)
    """
    return max(1, ALIGNED_BYTES // itemsize)


def row_dim(shape: Sequence[int]) -> int:
    """The dimension whose slices are the rows: the first one longer than one (0 where there is none)."""
    return next((dim for dim, length in enumerate(shape) if length > 1), 0)


def row_numel(shape: Sequence[int]) -> int:
    """Elements of one row; 1 for scalars, 1-D and empty tensors."""
    return max(1, math.prod(shape[row_dim(shape) + 1 :]))


def _asked(
    name: str, shape: tuple[int, ...], atom: Atom | Callable[[str, tuple[int, ...]], Atom]
) -> tuple[LayoutEntry, Atom]:
    """An entry without a place, and the atom that the caller wants for it."""
    if any(length < 0 for length in shape):
        raise ValueError(f"dimensions are 0 or longer, but {name!r} has the shape {shape}")
    wish: Any = atom(name, shape) if callable(atom) else atom
    if not isinstance(wish, BlockAtom) and wish not in ATOM_NAMES:
        hint = did_you_mean(str(wish), ATOM_NAMES, "")
        raise (ValueError if isinstance(wish, str) else TypeError)(
            f"an atom is one of {', '.join(map(repr, ATOM_NAMES))} or BlockAtom(k), but {name!r} got {wish!r}"
            f"{hint and f'; {hint}'}"
        )
    return LayoutEntry(name, shape, 1, "element", 0), wish


def _resolve(entry: LayoutEntry, wish: Atom) -> LayoutEntry:
    """Gives an entry the atom that was asked for; "auto" wants rows where there are any."""
    if isinstance(wish, BlockAtom):
        return replace(entry, atom=wish.size, cut="block")
    if wish == "parameter":
        return replace(entry, atom=max(1, entry.numel), cut="parameter")
    if wish == "row" or (wish == "auto" and len(entry.shape) >= 2):
        return replace(entry, atom=row_numel(entry.shape), cut="row")
    return entry


def _keep_rows(rows: list[LayoutEntry], free: set[int], world_size: int, alignment: int) -> FlatLayout:
    """Places `rows`; tensors of `free` with the longest rows are cut at elements where the plan would pad too much."""

    def demoted(longest: int) -> list[LayoutEntry]:
        return [_as_elements(e) if i in free and e.atom > longest else e for i, e in enumerate(rows)]

    if world_size == 1:
        return _place_all(rows, 1, alignment)
    lengths = [0, *sorted({rows[i].atom for i in free if rows[i].atom > 1})]
    best = _place_all(demoted(0), world_size, alignment)
    most = max(best.shard_numel, (best.numel + best.numel // AUTO_PADDING) // world_size)
    # lengths[low] is known to pad little enough. The first trial keeps all rows, which is nearly always the answer.
    low, high, middle = 0, len(lengths) - 1, len(lengths) - 1
    while low < high:
        trial = _place_all(demoted(lengths[middle]), world_size, alignment)
        if trial.shard_numel <= most:
            best, low = trial, middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return best


def _as_elements(entry: LayoutEntry) -> LayoutEntry:
    note = f"auto: rows of {entry.atom:,} elements would pad the plan by more than {100 / AUTO_PADDING:g} %"
    return replace(entry, atom=1, cut="element", note=note)


def _local_shape(entry: LayoutEntry, held: int) -> tuple[int, ...]:
    """The shape of `held` elements of `entry` on one rank."""
    if held == entry.numel:
        return entry.shape
    if held == 0:
        return (0, *entry.shape[1:])
    if entry.cut == "row":
        dim = row_dim(entry.shape)
        return (*entry.shape[:dim], held // entry.atom, *entry.shape[dim + 1 :])
    return (held,)


def _place_all(entries: Sequence[LayoutEntry], world_size: int, alignment: int) -> FlatLayout:
    """Places entries with known atoms in the smallest shards that were found to hold them."""
    # Longest atoms first: large matrices stay aligned, small parameters remain for gaps and for the end. The order
    # depends on sizes before it depends on the caller's order, so that the latter can't change the padding.
    order = sorted(range(len(entries)), key=lambda i: (-_whole(entries[i]), -entries[i].numel, i))
    pieces = [Piece(entries[i].numel, _whole(entries[i])) for i in order]
    shard_numel, offsets = pack(pieces, world_size, alignment)
    placed = list(entries)
    for i, offset in zip(order, offsets, strict=True):
        placed[i] = replace(entries[i], offset=offset)
    return FlatLayout(tuple(placed), world_size, shard_numel)


def _whole(entry: LayoutEntry) -> int:
    """The elements that stay together: an atom is no longer than its parameter."""
    return max(1, min(entry.atom, entry.numel))
