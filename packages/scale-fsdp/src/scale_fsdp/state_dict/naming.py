"""Names of the plain model: which unit, buffer and elements each of its parameters is now.

State is saved under the plain model's names, in its order, whatever was wrapped, flattened or tied. The modules are
still where they were, so the names are read off the slots of the units, and the order off the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.layout import LayoutEntry, ShardSpan
from scale_core.shard import shard_of
from scale_core.state.param_ownership import ParamSlice, param_slices
from scale_fsdp.runtime.unit import ParamSlot, Unit, units_in


@dataclass(frozen=True, eq=False)
class ParamLocation:
    """Where one parameter of the plain model is."""

    name: str  # in the plain model; of a tied one the first
    unit: Unit  # the owner
    buffer: FlatBuffer
    index: int  # in the buffer

    @property
    def owner(self) -> nn.Parameter:
        """The tensor that an optimizer steps on: the local shard, or the flat parameter that holds it."""
        return self.buffer.sharded_param(self.index)

    @property
    def entry(self) -> LayoutEntry:
        """Its entry in the full buffer's layout."""
        return self.buffer.layout.entries[self.index]

    @property
    def is_divided(self) -> bool:
        """Whether the unit gathers a piece, and ranks along another axis have the others."""
        shard = None if self.buffer.flatten else shard_of(self.owner)
        return shard is not None and shard.shape != self.entry.shape

    @property
    def span(self) -> ShardSpan:
        """The elements that this rank holds."""
        return self.buffer.spans[self.index]


def param_names(module: nn.Module, unit: Unit, prefix: str = "") -> list[tuple[str, ParamSlot]]:
    """A unit's parameters by all their names in a state dict with `module` under `prefix`."""
    paths: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(child), []).append(f"{prefix}{path}." if path else prefix)
    slots = unit.slots
    if module in unit.modules:  # One of several, each with its own names.
        other = {
            id(child) for other_module in unit.modules if other_module is not module for child in other_module.modules()
        } - paths.keys()
        slots = [slot for slot in slots if id(slot.module) not in other]
    for slot in slots:
        if id(slot.module) not in paths:
            raise RuntimeError(
                f"a {type(slot.module).__name__}, whose '{slot.attribute}' belongs to {unit_title(unit.name)}, was "
                "taken out of the model since it was sharded, as merge_and_unload() of peft does: change the modules "
                "of a plain model, plain.load_state_dict(model.state_dict())"
            )
    return [(f"{path}{slot.attribute}", slot) for slot in slots for path in paths[id(slot.module)]]


def all_names(model: nn.Module) -> dict[str, ParamSlot]:
    """All names of all sharded parameters, in the order of the plain model; a tied one has several."""
    order = plain_order(model)
    named = dict(named for unit in units_in(model) for named in param_names(model, unit))
    return dict(sorted(named.items(), key=lambda item: order[item[0]]))


def param_locations(model: nn.Module) -> dict[str, ParamLocation]:
    """Where the sharded parameters of a model are, by first name and in the order of the plain model."""
    units = [*(owner for unit in units_in(model) for owner in unit.shared_owners), *units_in(model)]
    owners = {id(buffer): unit for unit in units for buffer in unit.buffers}
    locations: dict[tuple[int, int], ParamLocation] = {}
    for name, (_, _, buffer, index) in all_names(model).items():
        locations.setdefault((id(buffer), index), ParamLocation(name, owners[id(buffer)], buffer, index))
    return {location.name: location for location in locations.values()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """The first name of each tied parameter by its other names."""
    names, first = all_names(model), dict[tuple[int, int], str]()
    for name, slot in names.items():
        first.setdefault((id(slot.buffer), slot.number), name)
    originals = {name: first[id(slot.buffer), slot.number] for name, slot in names.items()}
    return {name: original for name, original in originals.items() if name != original}


def plain_order(model: nn.Module, prefix: str = "") -> dict[str, int]:
    """The position of names in the plain model's state dict; some of the names may be none of its own."""
    hidden: dict[int, list[str]] = {}
    for unit in units_in(model):
        for slot in unit.slots:
            hidden.setdefault(id(slot.module), []).append(slot.attribute)
    order: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        shown = list(module._parameters)
        flat = [name for name in hidden.get(id(module), ()) if name not in shown]  # hidden by a flat parameter
        for attribute in (*flat, *shown, *module._buffers, "_extra_state"):
            order.setdefault(f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}", len(order))
    return order


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The module's buffers that state dicts hold, by all their names."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, child in module.named_modules(remove_duplicate=False)
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    }


def model_group(model: nn.Module) -> Group:
    """All ranks that share a model; a world of one where nothing is sharded."""
    groups = [unit.options.mesh_info.whole for unit in units_in(model)]
    return max(groups, key=lambda group: group.size, default=Group())


def units_on_other_ranks(model: nn.Module) -> list[Unit]:
    """Units over other ranks than the model whose parameters are others there, for example an expert of each rank.

    Pieces of parameters that a layer has divided, as of all experts, say which elements of the same one they are.
    """
    ranks = model_group(model).ranks
    others = [unit for unit in units_in(model) if unit.buffers and unit.options.mesh_info.whole.ranks != ranks]
    return [unit for unit in others if not all(buffer.holds_pieces for buffer in unit.buffers)]


def check_same_ranks(model: nn.Module, what: str) -> None:
    """Raises RuntimeError where ranks have different parameters of one name, so that full tensors would lose some."""
    for unit in units_on_other_ranks(model):
        raise RuntimeError(
            f"{what}: {unit_title(unit.name)} is over ranks {list(unit.options.mesh_info.whole.ranks)} and the model "
            f"over {list(model_group(model).ranks)}, so other ranks have other parameters of these names, which would "
            "be lost: save scale_core.state.sharded_state_dict(model, optimizer)"
        )


def slices_in(model: nn.Module) -> dict[Tensor, list[ParamSlice]]:
    """The slices that each parameter of a model holds, in the order of `parameters()`, for its optimizer.

    The names are as in the model's state dict, also where the model is a plain module around sharded ones.
    """
    slices_by_param: dict[int, list[ParamSlice]] = {}
    for name, location in param_locations(model).items():
        if location.is_divided:
            slices = [replace(param_slice, name=name) for param_slice in param_slices(location.owner, name)]
        else:
            slices = [slice_in_unit(location)]
        slices_by_param.setdefault(id(location.owner), []).extend(slices)
    return {
        param: slices_by_param.get(id(param)) or list(param_slices(param, name))
        for name, param in model.named_parameters()
    }


def slice_in_unit(location: ParamLocation) -> ParamSlice:
    """This rank's slices of the tensors that its unit gathers: of a parameter, or of its layer's piece of one."""
    flat, span = location.buffer.flatten, location.span
    elements = (location.entry.shape, span.start, span.stop, span.shard_offset if flat else 0, span.shape)
    return ParamSlice(location.name, location.owner, *elements, shares_owner=flat)


def locations_by_buffer(model: nn.Module) -> Iterator[tuple[Unit, FlatBuffer, list[ParamLocation]]]:
    """Yields every flat buffer of a model with its unit, and where its parameters are."""
    locations = list(param_locations(model).values())
    for unit in units_in(model):
        for buffer in unit.buffers:
            yield unit, buffer, [location for location in locations if location.buffer is buffer]


def module_names(module: nn.Module) -> dict[int, str]:
    """Returns the qualified name of every module in `module`, by its id; the name of `module` itself is ""."""
    return {id(child): path for path, child in module.named_modules()}


def with_param_names(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns an optimizer's state with renamed parameters: names become numbers, or numbers become names.

    >>> state = {"state": {"weight": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["weight", "bias"]}]}
    >>> with_param_names(state, {"weight": 0, "bias": 1})
    {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    groups = [{**group, "params": [names[param] for param in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names[param]: slots for param, slots in state["state"].items()}, "param_groups": groups}
