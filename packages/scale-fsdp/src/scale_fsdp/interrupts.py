"""A forward pass that is cut off by what is no `Exception`: Ctrl-C, or a signal that ends the process.

torch calls the hooks after a module's forward where that raises an `Exception`, and goes past them where it is
interrupted. The model would keep whole parameters in its modules, and the memory of everything that is gathered, until
its next forward found out. So whatever runs in a pass is watched from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:  # unit.py stands on this file.
    from scale_fsdp.unit import Unit

P = ParamSpec("P")
T = TypeVar("T")


def ending_where_interrupted(part: Callable[Concatenate[Unit, P], T]) -> Callable[Concatenate[Unit, P], T]:
    """Makes a unit's part of a forward pass end the pass where it is interrupted."""

    @functools.wraps(part)
    def watched(unit: Unit, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return part(unit, *args, **kwargs)
        except Exception:
            raise  # torch calls the unit.
        except BaseException as error:
            end_where_interrupted(unit, error)
            raise

    return watched


def end_where_interrupted(unit: Unit, error: BaseException) -> None:
    """Gives the pass up that was entered by this unit, if one was; in a pass that others entered, they do that."""
    root: Any = unit.root
    if root is None or root.entry is not unit:
        return
    try:
        root.abort(error)
    except Exception as other:  # Whoever has interrupted wants to see that, and not what the others make of it.
        error.add_note(f"the other ranks could not be told: {other}")
