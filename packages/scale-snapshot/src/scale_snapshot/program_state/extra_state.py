"""The extra state of modules: `get_extra_state` and `set_extra_state` of `torch.nn.Module`.

It stands under the module's name in the plain model, `<model>@extra_state[<module>]`, once where all ranks that have
the module agree, so that it loads at any number of ranks; otherwise for each rank, and then at the same number alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from scale_core.state.param_ownership import PartOfModel
from scale_core.state.validation import Misfit
from scale_snapshot.program_state.stateful import StatefulPart, unread

KIND = "extra state"
"""What an index says of such an entry."""

_INNER = {"CheckpointWrapper": "_checkpoint_wrapped_module", "OptimizedModule": "_orig_mod"}


@dataclass(frozen=True)
class ExtraState:
    """The extra state of one module, as an object with a state."""

    module: nn.Module

    def state_dict(self) -> Any:
        """Returns the result of `get_extra_state`."""
        return self.module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        """Hands it to `set_extra_state`."""
        self.module.set_extra_state(state)


def extra_states(name: str, model: nn.Module) -> dict[str, StatefulPart]:
    """Returns the extra states of this rank's modules of a model, which has this name, by their keys."""
    parts: dict[str, StatefulPart] = {}
    seen: set[nn.Module] = set()
    for path, module in _named_modules(model, ""):
        if type(module).get_extra_state is not nn.Module.get_extra_state and module not in seen:
            seen.add(module)
            key = f"{name}@extra_state[{path}]"
            parts[key] = StatefulPart(key, ExtraState(module))
    return parts


def extra_state_target(
    part: StatefulPart, saved: Mapping[str, Any], entry: Mapping[str, Any] | None, rank: int, size: int
) -> dict[str, Any]:
    """The destination of an extra state with this entry in an index; a `Misfit` if it is not for this rank."""
    if entry is None:
        return {part.name: None}  # It is missing.
    if entry.get("ranks") in (None, size) and (entry.get("layouts") or [""] * size)[rank] != "nothing":
        return part.target(saved, entry, rank, size)
    reason = (
        f"{part.name} was saved by {entry['ranks']} ranks, each of which had another one, and there are {size} now, or "
        "others have the module: load at that number of ranks, or leave it out with strict=False"
    )
    of_all = {key: unread(value) for key, value in saved.items() if key.startswith(f"{part.name}.")}
    return {part.name: Misfit(reason), **of_all}


def _named_modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model by their names in the plain one; a wrapper has the name of its module."""
    yield name, module
    inner = "module" if callable(getattr(module, "no_sync", None)) else _INNER.get(type(module).__name__)
    is_part = isinstance(module, PartOfModel)  # Its children are stages.
    for attribute, child in module._modules.items():
        if child is not None:
            is_inside = attribute == inner or is_part
            yield from _named_modules(child, name if is_inside else f"{name}.{attribute}".removeprefix("."))
