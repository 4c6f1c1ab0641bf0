"""What of a unit lasts: what deepcopy takes along, and what `torch.save` writes.

That is how it was made and set, and nothing of a pass that runs or of other ranks: these are found again where the unit
is read. Its hooks on gradients come back with the next forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:  # unit.py stands on this file.
    from scale_fsdp.unit import Unit

_LASTING = (
    "module",
    "slots",
    "buffers",
    "lenders",
    "options",
    "name",
    "lends",
    "reshard_after_forward",
    "reshard_after_backward",
    "synchronizes",
    "number",
    "buffer_dtypes",
    "of_ranks",
    "fetches",
)


def lasting_state(unit: Unit) -> dict[str, Any]:
    """Returns what lasts of a unit, by name."""
    # Numbers of hooks are counted in each process: those that are added later must not be given the same.
    return {name: getattr(unit, name) for name in _LASTING} | {"next hook": RemovableHandle.next_id}


def restore(unit: Unit, state: dict[str, Any]) -> None:
    """Makes a unit out of what lasts of one, and its module known as that of a unit."""
    unit.__init__(state["module"], (), state["buffers"], state["lenders"], state["options"])  # type: ignore[misc]
    for name in _LASTING:
        setattr(unit, name, state[name])
    if not any(buffer.is_meta for buffer in unit.buffers):
        groups = unit.options.ranks.with_part(unit.options.reshard_after_forward)
        for buffer in unit.buffers:
            buffer.groups = groups
    RemovableHandle.next_id = max(RemovableHandle.next_id, state["next hook"])
    cast(Any, unit.module)._make_known()


def is_whole(unit: Unit) -> bool:
    """Whether a unit has its state: a copy, or what is read from a file, is first made and then filled."""
    return "fetches" in vars(unit)
