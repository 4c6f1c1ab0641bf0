"""Where each parameter of the plain model is now, by its name there.

State is known by the plain model's names, in its order, whatever was wrapped, flattened or tied since. The modules
still stand where they stood, so the names can be read off the slots of the units, and the order off the modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.layout import Entry, Span
from scale_core.state.param_ownership import Holding, holdings_of
from scale_fsdp.unit import Slot, Unit, units_in


@dataclass(frozen=True, eq=False)
class Place:
    """Where one parameter of the plain model is.

    Attributes:
        name: Its name in the plain model; of a tied one the first.
        unit: The unit that owns it.
        buffer: The unit's buffer that it is in.
        number: Its number there.
    """

    name: str
    unit: Unit
    buffer: FlatBuffer
    number: int

    @property
    def owner(self) -> nn.Parameter:
        """What an optimizer steps on: its local shard, or the flat parameter that holds it."""
        return self.buffer.exposed_of(self.number)

    @property
    def entry(self) -> Entry:
        """Its place in the full buffer."""
        return self.buffer.layout.entries[self.number]

    @property
    def span(self) -> Span:
        """The part of it that this rank holds."""
        return self.buffer.spans[self.number]


def names_in(module: nn.Module, unit: Unit, prefix: str = "") -> list[tuple[str, Slot]]:
    """Returns a unit's parameters by their names in a state dict in which `module` stands under `prefix`.

    One that is tied, or in a module that stands in several places, has several names.

    Raises:
        RuntimeError: A module of the unit stands nowhere in `module` any more.
    """
    paths: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(child), []).append(f"{prefix}{path}." if path else prefix)
    for slot in unit.slots:
        if id(slot.module) not in paths:
            raise RuntimeError(
                f"a {type(slot.module).__name__}, whose '{slot.attribute}' belongs to {unit_title(unit.name)}, was "
                "taken out of the model since it was sharded, as merge_and_unload() of peft does: change the modules "
                "of a plain model, plain.load_state_dict(model.state_dict()); what changes values alone, as "
                "merge_adapter(), works inside model.summon_full_params()"
            )
    return [(f"{path}{slot.attribute}", slot) for slot in unit.slots for path in paths[id(slot.module)]]


def all_names(model: nn.Module) -> dict[str, Slot]:
    """Returns all names of all sharded parameters, in the order of the plain model; a tied one has several."""
    order = plain_order(model)
    named = dict(named for unit in units_in(model) for named in names_in(model, unit))
    return dict(sorted(named.items(), key=lambda item: order[item[0]]))


def places_in(model: nn.Module) -> dict[str, Place]:
    """Returns where the sharded parameters of a model are, by name and in the order of the plain model.

    One that is tied stands once, under its first name.
    """
    units = {id(buffer): unit for unit in units_in(model) for buffer in unit.buffers}
    lent = {id(buffer): unit for owner in units_in(model) for unit in owner.shared_owners for buffer in unit.buffers}
    places: dict[tuple[int, int], Place] = {}
    for name, (_, _, buffer, number) in all_names(model).items():
        unit = units.get(id(buffer)) or lent[id(buffer)]
        places.setdefault((id(buffer), number), Place(name, unit, buffer, number))
    return {place.name: place for place in places.values()}


def tied_in(model: nn.Module) -> dict[str, str]:
    """Returns, for each further name of a tied parameter, its first."""
    first: dict[tuple[int, int], str] = {}
    tied = {}
    for name, slot in all_names(model).items():
        original = first.setdefault((id(slot.buffer), slot.number), name)
        if original != name:
            tied[name] = original
    return tied


def plain_order(model: nn.Module, prefix: str = "") -> dict[str, int]:
    """Returns the places that names have in the plain model's state dict; some of the names may be none of its own."""
    hidden: dict[int, list[str]] = {}
    for unit in units_in(model):
        for slot in unit.slots:
            hidden.setdefault(id(slot.module), []).append(slot.attribute)
    order: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute in _attributes(module, hidden.get(id(module), [])):
            order.setdefault(f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}", len(order))
    return order


def ranks_in(model: nn.Module) -> Group:
    """Returns all ranks that share a model; a world of one where nothing is sharded."""
    groups = [unit.options.ranks.whole for unit in units_in(model)]
    return max(groups, key=lambda group: group.size, default=Group())


def units_apart(model: nn.Module) -> list[Unit]:
    """Returns the units over other ranks than the whole model, as experts that each rank has for itself."""
    ranks = ranks_in(model).ranks
    return [unit for unit in units_in(model) if unit.buffers and unit.options.ranks.whole.ranks != ranks]


def check_none_apart(model: nn.Module, what: str) -> None:
    """Refuses to give one rank's parameters out as those of all.

    Raises:
        RuntimeError: A unit is over other ranks than the model, so that others have other parameters of its names.
    """
    for unit in units_apart(model):
        raise RuntimeError(
            f"{what}: {unit_title(unit.name)} is over ranks {list(unit.options.ranks.whole.ranks)} and the model over "
            f"{list(ranks_in(model).ranks)}, so that others have other parameters of the same names, which would be "
            "lost: save scale_core.state.sharded_state_dict(model, optimizer), which names them by their ranks"
        )


def holdings_in(model: nn.Module) -> dict[Tensor, list[Holding]]:
    """Returns what an optimizer of a model may step on, in the order of `parameters()`, each with what it holds.

    The names are those of the model's state dict, also where the model is a plain module around sharded ones.
    """
    held: dict[int, list[Holding]] = {}
    for place in places_in(model).values():
        entry, span = place.entry, place.span
        held.setdefault(id(place.owner), []).append(
            Holding(
                place.name,
                place.owner,
                entry.shape,
                span.start,
                span.stop,
                span.shard_offset if place.buffer.flatten else 0,
                span.shape,
                shares_owner=place.buffer.flatten,
            )
        )
    return {param: held.get(id(param)) or list(holdings_of(param, name)) for name, param in model.named_parameters()}


def _attributes(module: nn.Module, hidden: list[str]) -> list[str]:
    """A module's own names in the order of its state dict; those that a flat parameter hides come first."""
    shown = list(module._parameters)
    return [*(name for name in hidden if name not in shown), *shown, *module._buffers, "_extra_state"]


def names_by_buffer(model: nn.Module) -> Iterator[tuple[Unit, FlatBuffer, dict[str, int]]]:
    """Yields every flat buffer of a model with its unit, and the numbers that its parameters have there by name."""
    places = list(places_in(model).values())
    for unit in units_in(model):
        for buffer in unit.buffers:
            yield unit, buffer, {place.name: place.number for place in places if place.buffer is buffer}
