"""Description of a sharded model: its units, their memory on this rank and padding, `print(describe(model))`.

All of it follows from the layout, so every rank computes it without communication and before any pass. Passes that have
run add the order in which units are gathered.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from scale_core.arguments import checked_arguments
from scale_core.consistency.execution_order import PassKind
from scale_core.flat.buffer import FlatBuffer
from scale_core.shard import on_local_tensors
from scale_fsdp.runtime.unit import GATHERING_PHASES, Unit, units_in
from scale_fsdp.state_dict.naming import module_names
from scale_fsdp.transports.policy import wire_formats
from scale_fsdp.transports.quantized import WireFormats

_HEAD = ("unit", "class", "parameters", "elements", "shard", "padding", "shards in", "computes", "reduces", "lives on")
_SHARDS = (
    "parameters() yields this rank's shards of them; scale_core.shard.full_shape(param), full_numel(param) and",
    "num_parameters(model) count full parameters",
)
_SIDES = "<<>>>><<<<"


def format_table(description: Description) -> str:
    """The description as lines: units, memory on this rank, cuts, and the order of gathers."""
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
    """The name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def size_text(num_bytes: int) -> str:
    """A size in the unit that leaves one to four digits before the point."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _rows(unit: DescribedUnit) -> list[tuple[str, ...]]:
    """A line for each buffer of a unit; the first has the unit's name and class."""
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
    if buffer is not None and buffer.wire is not None:
        wire = buffer.wire
        named = ("gathered", wire.gather), ("reduced", wire.reduce), ("replicated", wire.replicate)
        notes.append(", ".join(f"{purpose} in {dtype.dtype}" for purpose, dtype in named if dtype is not None))
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
        ("", size_text(description.flat_gradients_at_most), "at most in addition, of one unit before it is reduced"),
        ("optimizer", size_text(state), f"for each state of an elementwise one: {size_text(2 * state)} with Adam"),
    ]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    sides = _SIDES if len(rows[0]) == len(_HEAD) else "<><"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _wrapped(names: Sequence[str]) -> list[str]:
    return textwrap.wrap(
        ", ".join(names),
        102,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class DescribedBuffer:
    """Parameters of one unit that share a dtype, a device, and whether they train.

        >>> import torch
        >>> from scale_fsdp import describe, fully_shard
        >>> [buffer] = describe(fully_shard(torch.nn.Linear(4, 3))).units[0].buffers
        >>> buffer.names, buffer.num_elements, buffer.dtype
        (('weight', 'bias'), 15, torch.float32)

    Attributes:
        names: Qualified names.
        num_elements: Of all of them, on all ranks together.
        shard_numel: Elements of every rank's shard, padding included.
        padding: Elements of all shards together that belong to no parameter.
        num_ranks: Ranks that they are sharded over.
        num_copies: Replicas of these, more than one with hybrid sharding.
        dtype: Of the shards, their gradients and the optimizer's states.
        compute_dtype: Of the gathered parameters.
        reduce_dtype: Of the gradients when they are reduced.
        device: Of the shards.
        compute_device: Of the gathered parameters.
        trains: Any of them wants a gradient.
        shard_bytes: Of this rank's shard.
        gathered_bytes: Of the gathered parameters in addition to it; 0 where the shard is all of them.
        kept_bytes: The part of them that stays between forward and backward.
        flat_gradient_bytes: Of the gradients before they are reduced.
        trained_bytes: Of this rank's elements that train, and so of their gradients and each optimizer state.
        cut_at_elements: Names of those that were to be cut between rows, and are cut at any element.
        wire: In which formats they are sent; None sends them unquantized.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    names: tuple[str, ...]
    num_elements: int
    shard_numel: int
    padding: int
    num_ranks: int
    num_copies: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    device: torch.device
    compute_device: torch.device
    trains: bool
    shard_bytes: int
    gathered_bytes: int
    kept_bytes: int
    flat_gradient_bytes: int
    trained_bytes: int
    cut_at_elements: tuple[str, ...]
    wire: WireFormats | None = None


@dataclass(frozen=True)
class DescribedUnit:
    """One unit, as `fully_shard` made it.

        >>> import torch
        >>> from scale_fsdp import describe, fully_shard
        >>> [unit] = describe(fully_shard(torch.nn.Linear(4, 3))).units
        >>> unit.name, unit.module_class
        ('', 'Linear')

    Attributes:
        name: Its module's qualified name; "" is the module that was described.
        module_class: The name of its module's class.
        buffers: Its parameters by dtype, device and whether they train; empty where other units own all that it uses.
        reshard_after_forward: It is released between forward and backward, all of it or all but a part.
        shares_with: Names of the units that own parameters which this one uses as well.
        around: Names of the units around it, the outermost first.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    name: str
    module_class: str
    buffers: tuple[DescribedBuffer, ...]
    reshard_after_forward: bool
    shares_with: tuple[str, ...]
    around: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Number of parameters that it owns."""
        return sum(len(buffer.names) for buffer in self.buffers)

    @property
    def num_elements(self) -> int:
        """Elements of the parameters that it owns, on all ranks together."""
        return sum(buffer.num_elements for buffer in self.buffers)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of its gathered parameters."""
        return sum(buffer.gathered_bytes for buffer in self.buffers)

    @property
    def kept_bytes(self) -> int:
        """Bytes of them that stay between forward and backward."""
        return sum(buffer.kept_bytes for buffer in self.buffers)

    @property
    def flat_gradient_bytes(self) -> int:
        """Bytes of its gradients before they are reduced."""
        return sum(buffer.flat_gradient_bytes for buffer in self.buffers if buffer.trains)


@dataclass(frozen=True)
class Description:
    """A sharded model: its units, and their memory on this rank, in bytes. `str` of it is a table.

    Activations are not counted, nor are temporary copies of a collective.

        >>> import torch
        >>> from scale_fsdp import describe, fully_shard
        >>> description = describe(fully_shard(torch.nn.Linear(4, 3)))
        >>> description.shards, description.gradients  # bytes of 15 parameters in fp32, with padding and without
        (96, 60)

    Attributes:
        model_class: The name of the class of the module that was described.
        units: In the order of `named_modules`.
        shards: Bytes of the parameters' shards, which are always in memory.
        gathered_at_most: The most bytes of full parameters at one time. These are a unit, the units around it, the
            units that it shares parameters with, the parts that other units keep after their forward, and the largest
            other unit, prefetched.
        gradients: Bytes of the reduced gradients of the shards that train.
        flat_gradients_at_most: Bytes of one unit's gradients before they are reduced; under `no_sync`, of all units.
        state_of_elementwise_optimizer: Bytes of each state of an optimizer with one number per element, in the dtype of
            the shards. Adam has two such states, SGD with momentum one.
        gather_order: For each kind of pass that has run, the names of the units in the order in which they were used.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    model_class: str
    units: tuple[DescribedUnit, ...]
    shards: int
    gathered_at_most: int
    gradients: int
    flat_gradients_at_most: int
    state_of_elementwise_optimizer: int
    gather_order: Mapping[str, tuple[str, ...]]

    @property
    def num_elements(self) -> int:
        """Elements of all parameters on all ranks; `sum(p.numel() for p in model.parameters())` counts this rank's."""
        return sum(unit.num_elements for unit in self.units)

    @property
    def cut_at_elements(self) -> tuple[str, ...]:
        """Names of the parameters that are cut at any element, since cuts between rows would have padded too much."""
        return tuple(name for unit in self.units for buffer in unit.buffers for name in buffer.cut_at_elements)

    def __str__(self) -> str:
        return format_table(self)


@checked_arguments
@on_local_tensors
def describe(model: nn.Module) -> Description:
    """Describes the units of a model and their memory on this rank; sends nothing.

    Args:
        model: A module that `fully_shard` was called on, or that holds such modules.

    Raises:
        ValueError: It has no unit.

    Examples:
        >>> import torch
        >>> from scale_fsdp import describe, fully_shard
        >>> description = describe(fully_shard(torch.nn.Linear(4, 3)))
        >>> len(description.units), description.num_elements
        (1, 15)

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    units = units_in(model)
    if not units:
        raise ValueError(
            f"describe: no module in this {type(model).__name__} is sharded: call fully_shard(model) first; "
            "to see the units of a policy before, call plan_units(model, policy)"
        )
    paths = module_names(model)
    described = tuple(_describe_unit(unit, units, paths) for unit in units)
    buffers = [buffer for unit in described for buffer in unit.buffers]
    trained = sum(buffer.trained_bytes for buffer in buffers)
    return Description(
        model_class=type(model).__name__,
        units=described,
        shards=sum(buffer.shard_bytes for buffer in buffers),
        gathered_at_most=_gathered_at_most(described),
        gradients=trained,
        flat_gradients_at_most=max((unit.flat_gradient_bytes for unit in described), default=0),
        state_of_elementwise_optimizer=trained,
        gather_order=_gather_orders(units, paths),
    )


def unit_summary(unit: Unit) -> str:
    """The text of `print(model)` next to the module of a unit."""
    parts = []
    for buffer in unit.buffers:
        frozen = "" if buffer.trains else ", frozen"
        parts.append(f"1/{buffer.group.size} of {buffer.layout.numel:,} elements, {short_dtype(buffer.dtype)}{frozen}")
    return f"sharded: parameters() yields {' and '.join(parts)}" if parts else "sharded: no parameters of its own"


def _describe_unit(unit: Unit, units: Sequence[Unit], paths: Mapping[int, str]) -> DescribedUnit:
    around = [other for other in units if other is not unit and unit.module in other.module.modules()]
    return DescribedUnit(
        name=paths[id(unit.module)],
        module_class=type(unit.module).__name__,
        buffers=tuple(_describe_buffer(buffer, unit.reshard_after_forward) for buffer in unit.buffers),
        reshard_after_forward=unit.reshard_after_forward,
        shares_with=tuple(paths.get(id(owner.module), owner.name) for owner in unit.shared_owners),
        around=tuple(paths[id(other.module)] for other in around),
    )


def _describe_buffer(buffer: FlatBuffer, reshard_after_forward: bool) -> DescribedBuffer:
    layout, part = buffer.layout, buffer.groups.part
    gathered = 0 if buffer.is_aliased else layout.full_numel * buffer.full.dtype.itemsize
    shard_bytes = gathered // part.size if part is not None else 0
    trained = [buffer.sharded_param(i).requires_grad for i in range(len(layout.entries))]
    trained_numel = (
        layout.shard_numel * any(trained)
        if buffer.flatten
        else sum(span.numel for span, trains in zip(buffer.spans, trained, strict=True) if trains)
    )
    return DescribedBuffer(
        names=tuple(buffer.names),
        num_elements=layout.numel,
        shard_numel=layout.shard_numel,
        padding=layout.padding,
        num_ranks=buffer.group.size,
        num_copies=buffer.groups.replicas.size,
        dtype=buffer.dtype,
        compute_dtype=buffer.compute_dtype,
        reduce_dtype=buffer.reduce_dtype,
        device=buffer.shard.device,
        compute_device=buffer.compute_device,
        trains=buffer.trains,
        shard_bytes=layout.shard_numel * buffer.dtype.itemsize,
        gathered_bytes=gathered,
        kept_bytes=shard_bytes if reshard_after_forward else gathered,
        flat_gradient_bytes=layout.full_numel * buffer.reduce_dtype.itemsize,
        trained_bytes=trained_numel * buffer.dtype.itemsize,
        cut_at_elements=tuple(name for name, entry in zip(buffer.names, layout.entries, strict=True) if entry.note),
        wire=wire_formats(buffer),
    )


def _gathered_at_most(units: Sequence[DescribedUnit]) -> int:
    """The largest sum of gathered units in any order of a pass."""
    sizes = {unit.name: (unit.gathered_bytes, unit.kept_bytes) for unit in units}
    most = 0
    for unit in units:
        running = {unit.name, *unit.around}
        running |= {owner for other in units if other.name in running for owner in other.shares_with}
        remaining = [size for name, size in sizes.items() if name not in running]
        prefetched = max((gathered - shard_bytes for gathered, shard_bytes in remaining), default=0)
        gathered_now = sum(sizes.get(name, (0, 0))[0] for name in running)
        most = max(most, gathered_now + sum(shard_bytes for _, shard_bytes in remaining) + prefetched)
    return most


def _gather_orders(units: Sequence[Unit], paths: Mapping[int, str]) -> dict[str, tuple[str, ...]]:
    """The recorded passes of the models that the units belong to, restricted to these units."""
    names = {id(unit): paths[id(unit.module)] for unit in units}
    orders: dict[str, tuple[str, ...]] = {}
    for root in {id(unit.root): unit.root for unit in units if unit.root is not None}.values():
        for kind, events in root.contract.history.orders.items():
            used = [root.by_name[event.unit] for event in events if event.phase in GATHERING_PHASES]
            orders[_pass_title(kind)] = tuple(names[id(unit)] for unit in used if id(unit) in names)
    return orders


def _pass_title(kind: PassKind) -> str:
    if kind.phase.startswith("backward"):
        return kind.phase
    phase = "forward of root" if kind.phase == "forward of " else kind.phase.replace("of  by", "of root by")
    mode = "training" if kind.training else "evaluation"
    return f"{phase}, {mode}{'' if kind.grad else ', without gradients'}"
