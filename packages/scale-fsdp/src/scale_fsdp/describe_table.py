"""The description of a sharded model as a table of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # describe.py stands on this file.
    from scale_fsdp.describe import DescribedBuffer, DescribedUnit, Description

_HEAD = ("unit", "class", "parameters", "elements", "shard", "padding", "shards in", "computes", "reduces", "lives on")
_SHARDS = (
    "parameters() yields this rank's shards of them; scale_core.full_shape(param), full_numel(param) and",
    "num_parameters(model) count the whole",
)
_SIDES = "<<>>>><<<<"


def table_of(description: Description) -> str:
    """Returns the description as lines: units, memory on this rank, cuts, and the order of gathers."""
    units = description.units
    owned = [buffer for unit in units for buffer in unit.buffers]
    elements = description.num_elements
    ranks = max((buffer.num_ranks * buffer.num_copies for buffer in owned), default=1)
    parameters = sum(unit.num_parameters for unit in units)
    lines = [
        f"{description.model_class}: {_count(len(units), 'unit')}, {_count(parameters, 'parameter')}, "
        f"{_count(elements, 'element')} on {_count(ranks, 'rank')}",
        *(_SHARDS if ranks > 1 else ()),
        *_aligned([_HEAD, *(row for unit in units for row in _rows(unit))]),
        "",
        "memory on this rank",
        *_aligned(_memory(description)),
    ]
    if description.cut_at_elements:
        lines += ["", "cut at elements, since rows would pad too much", *_wrapped(description.cut_at_elements)]
    for kind, order in description.gather_order.items():
        lines += ["", f"order of use, {kind}", *_wrapped([name or "root" for name in order])]
    return "\n".join(lines)


def short_dtype(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


def size_text(num_bytes: int) -> str:
    """Returns a size in the unit that leaves one to four digits before the point."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _rows(unit: DescribedUnit) -> list[tuple[str, ...]]:
    """One line for each buffer of a unit; its name and class stand in the first."""
    name = unit.name or "root"
    if not unit.buffers:
        return [(name, unit.module_class, "0", "0", "0", "0", "", "", "", _notes(unit, None))]
    rows: list[tuple[str, ...]] = []
    for number, buffer in enumerate(unit.buffers):
        first = (name, unit.module_class) if number == 0 else ("", "")
        rows.append(
            (
                *first,
                f"{len(buffer.names):,}",
                f"{buffer.num_elements:,}",
                f"{buffer.shard_numel:,}",
                f"{buffer.padding:,}",
                short_dtype(buffer.dtype),
                short_dtype(buffer.compute_dtype),
                short_dtype(buffer.reduce_dtype) if buffer.trains else "-",
                _places(buffer) + _notes(unit if number == 0 else None, buffer),
            )
        )
    return rows


def _places(buffer: DescribedBuffer) -> str:
    moves = buffer.device != buffer.compute_device
    return f"{buffer.device}, computes on {buffer.compute_device}" if moves else str(buffer.device)


def _notes(unit: DescribedUnit | None, buffer: DescribedBuffer | None) -> str:
    notes = []
    if buffer is not None and not buffer.trains:
        notes.append("frozen")
    if buffer is not None and buffer.num_copies > 1:
        notes.append(f"{buffer.num_copies:,} copies, each on {buffer.num_ranks:,} ranks")
    if unit is not None and unit.buffers and not unit.reshard_after_forward:
        notes.append("stays gathered after its forward")
    elif buffer is not None and buffer.kept_bytes and buffer.kept_bytes < buffer.gathered_bytes:
        notes.append(f"{size_text(buffer.kept_bytes)} stay after its forward")
    if unit is not None and unit.shares_with:
        notes.append(f"shares with {', '.join(name or 'root' for name in unit.shares_with)}")
    return "".join(f"; {note}" for note in notes).removeprefix("" if buffer is not None else "; ")


def _memory(description: Description) -> list[tuple[str, ...]]:
    state = description.state_of_elementwise_optimizer
    return [
        ("shards", size_text(description.shards), "always"),
        ("gathered", size_text(description.gathered_at_most), "at most, in a forward or backward"),
        ("gradients", size_text(description.gradients), "of the shards"),
        ("", size_text(description.flat_gradients_at_most), "at most beside them, of one unit before it is reduced"),
        ("optimizer", size_text(state), f"for each state of an elementwise one: {size_text(2 * state)} with Adam"),
    ]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    sides = _SIDES if len(rows[0]) == len(_HEAD) else "<><"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _wrapped(names: Sequence[str], width: int = 100) -> list[str]:
    """Names one after the other, in lines of at most `width` characters where names are that short."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + 2 + len(name) > width:
            lines.append("")
        lines[-1] += f", {name}" if lines[-1] else name
    return [f"  {line}" for line in lines]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
