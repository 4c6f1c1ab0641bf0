"""What must be alike before the units of a model run: among themselves, and on all ranks.

Ranks that would cut, cast or fetch differently read each other's bytes as something else. So every rank describes in
words all that decides what is sent and when, and the descriptions are compared before the first gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scale_core.events import unit_title
from scale_core.group import Group
from scale_fsdp.blank import refuse_blank

if TYPE_CHECKING:  # unit.py stands on this file's user, root.py.
    from scale_fsdp.unit import Unit


def check_units(units: Sequence[Unit], group: Group) -> None:
    """Checks that the units of one model can run together.

    Args:
        units: All of them.
        group: The ranks that share the model.

    Raises:
        ValueError: A unit shares a parameter with one outside of the model, or is sharded over other ranks.
        RuntimeError: A parameter or a buffer has no values.
    """
    for unit in units:
        refuse_blank(unit)
        for lender in unit.lenders:
            if lender not in units:
                raise ValueError(
                    f"a {type(unit.module).__name__} shares a parameter with a {type(lender.module).__name__} that is "
                    "sharded too, but no sharded module holds both: call fully_shard on the module around them"
                )
        ranks = unit.options.ranks.whole
        if unit.buffers and ranks.size > 1 and ranks.ranks != group.ranks:
            raise ValueError(
                f"{unit_title(unit.name)} is sharded over ranks {list(ranks.ranks)} and the rest over "
                f"{list(group.ranks)}: pass one process_group to every fully_shard of a model"
            )


def describe_units(units: Sequence[Unit]) -> list[str]:
    """Returns, line by line, all that decides what the units send: equal lines mean equal messages."""
    lines = []
    for unit in units:
        title = unit.name or "root"
        for buffer in unit.buffers:
            lines += [
                f"{title}: {name.removesuffix(unit.of_ranks)} {entry.shape} {buffer.dtype} "
                f"trains={buffer.exposed_of(index).requires_grad} cut at {entry.cut}"
                for index, (name, entry) in enumerate(zip(buffer.names, buffer.layout.entries, strict=True))
            ]
            lines.append(
                f"{title}: computes in {buffer.compute_dtype}, reduces in {buffer.reduce_dtype}, "
                f"flatten={buffer.flatten}, layout {buffer.layout.digest()}"
            )
        lines.append(
            f"{title}: over {unit.options.ranks.replicas.size} x {unit.options.ranks.shard.size} ranks, "
            f"reshard_after_forward={unit.options.reshard_after_forward}, "
            f"shares with {[lender.name for lender in unit.lenders]}"
        )
    return lines
