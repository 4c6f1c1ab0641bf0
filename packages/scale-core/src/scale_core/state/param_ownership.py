"""Which named parameters, or which of their elements, stand in each tensor that an optimizer steps on.

Mostly it is one: the parameter itself, or this rank's shard of it. A flat parameter holds many, one behind the other,
and is itself none that the plain model has. State is saved by the names of the plain model, so it is asked here, for
parameters and for all state of their shape, which name's elements stand where.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.flat.buffer import FlatBuffer
from scale_core.optim.traits import NUMBERS
from scale_core.shard import Held, Ranges, shard_of

_flat: WeakIdKeyDictionary = WeakIdKeyDictionary()  # each flat parameter, to a weak reference to its buffer


class HasGroups(Protocol):
    """An optimizer, or a wrapper around one."""

    @property
    def param_groups(self) -> Any: ...


@runtime_checkable
class PartOfModel(Protocol):
    """A module that has some parts of a model, under the names of the whole one, while other ranks have the others."""

    def names_of_model(self) -> Mapping[str, str]:
        """All names in the state of the whole model, each with the first name of the same tensor."""
        ...

    def is_first_holder(self, name: str) -> bool:
        """Whether, of the parts that hold the tensor of this first name, the first one is on this rank."""
        ...


@dataclass(frozen=True, eq=False)
class Holding:
    """One parameter of the plain model, as this rank holds it.

    Attributes:
        name: Its qualified name in the plain model.
        owner: What an optimizer steps on: the parameter, a shard of it, or a flat parameter.
        shape: The shape of the whole parameter.
        start: The first element held, in row-major order, or in that of what `ranges` leave.
        stop: One past the last element held.
        offset: Where the held elements begin in the flattened `owner`.
        local_shape: The shape of what is held.
        is_shard: Other ranks may hold other elements.
        shares_owner: The owner is a flat parameter, which holds others, too.
        state: What this rank has of the optimizer's state: that of the elements held; all of it, of any shape, where
            one rank steps on the whole parameter; or nothing, where others do.
        ranges: Of which indices of the whole parameter the elements are; see `scale_core.Shard`.
        written: This rank saves what it holds; otherwise another one that holds the same does.
    """

    name: str
    owner: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int = 0
    local_shape: tuple[int, ...] = ()
    is_shard: bool = True
    shares_owner: bool = False
    state: Literal["elements", "all", "nothing"] = "elements"
    ranges: Ranges = ()
    written: bool = True

    def view(self, tensor: Tensor) -> Tensor:
        """What belongs to it of a tensor of the owner's shape: the owner, or a state of it."""
        if not self.shares_owner:
            return tensor.detach()
        return tensor.detach().view(-1).narrow(0, self.offset, self.stop - self.start).view(self.local_shape)


def tell_flat(buffer: FlatBuffer) -> None:
    """Records which parameters the flat parameter of `buffer` holds; later changes of their names count."""
    assert buffer.flatten, "a buffer that exposes its parameters one by one has no flat one"
    _flat[buffer.exposed[0]] = weakref.ref(buffer)


def flat_buffer_of(param: Tensor) -> FlatBuffer | None:
    """The buffer of a flat parameter; None for any other tensor, and where the buffer is gone."""
    reference = _flat.get(param)
    buffer: FlatBuffer | None = None if reference is None else reference()
    return buffer


def holdings_of(param: Tensor, listed: str) -> Iterator[Holding]:
    """Yields what `param`, listed under this name, holds.

    Raises:
        ValueError: The ranks hold summands of it.
    """
    buffer, shard = flat_buffer_of(param), shard_of(param)
    if shard is not None and any(axis.held is Held.PARTIAL for axis in shard.axes):
        raise ValueError(f"{shard.name}: each rank holds a summand of it: reduce it before its state is taken")
    if buffer is not None:
        for name, entry, span in zip(buffer.names, buffer.layout.entries, buffer.spans, strict=True):
            place = (entry.shape, span.start, span.stop, span.shard_offset, span.shape)
            yield Holding(name, param, *place, shares_owner=True)
    elif shard is not None:
        place = (shard.shape, shard.start, shard.stop, 0, tuple(param.shape))
        yield Holding(shard.name or listed, param, *place, ranges=shard.ranges, written=shard.written)
    else:
        shape = tuple(param.shape)
        yield Holding(listed, param, shape, 0, param.numel(), 0, shape, is_shard=False)


def named_holdings(model: nn.Module) -> dict[str, Holding]:
    """Returns what a model holds, by the names of the plain model; a tied parameter stands once.

    Raises:
        ValueError: Two parameters claim one name, or the ranks hold summands of one.
    """
    found: dict[str, Holding] = {}
    part = model if isinstance(model, PartOfModel) else None
    for listed, param in model.named_parameters():
        for holding in holdings_of(param, listed):
            if part is not None:
                name = holding.name if holding.shares_owner else listed  # A unit knows the names within its stage.
                first = part.names_of_model().get(name, name)
                holding = replace(holding, name=first, written=holding.written and part.is_first_holder(first))
            if holding.name in found:
                raise ValueError(f"two parameters are named {holding.name}: the second is listed as {listed}")
            found[holding.name] = holding
    return found


def of_this_rank(saved: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Leaves out of a saved state what other ranks have saved of units that each of them has for itself.

    Such parameters have names that end in their ranks, `expert.weight@1`. What ranks have saved that are not among
    those of the model stays, and is unexpected.

    Args:
        saved: Values by the keys of a state: `model.<name>`, `optim.<name>.<key>`.
        model: The model that is to load it.
    """
    names = named_holdings(model)
    stems = {name.partition("@")[0] for name in names if "@" in name}
    if not stems:
        return saved
    shards = [shard for param in model.parameters() if (shard := shard_of(param)) is not None]
    here = {rank for shard in shards for axis in shard.axes for rank in axis.group.ranks}

    def is_of_others(key: str) -> bool:
        stem, at, rest = key.partition(".")[2].partition("@")
        ranks = rest.partition(".")[0]
        if not at or stem not in stems or f"{stem}@{ranks}" in names:
            return False
        return here.issuperset(int(rank) for rank in ranks.split("-") if rank.isdigit())

    return {key: value for key, value in saved.items() if not is_of_others(key)}


def num_parameters(model: nn.Module, *, only_trainable: bool = False) -> int:
    """Returns the number of elements of a model's whole parameters; a tied one counts once. Sends nothing.

    `sum(p.numel() for p in model.parameters())` counts what this rank holds of them. Of a pipeline, the stages of this
    rank are counted, whole.

        >>> from torch import nn
        >>> num_parameters(nn.Linear(3, 2))
        8

    Args:
        model: A model, sharded or not, or a part of one.
        only_trainable: Leave out what wants no gradient.

    Raises:
        ValueError: The ranks hold summands of a parameter.
    """
    held = named_holdings(model).values()
    return sum(math.prod(holding.shape) for holding in held if holding.owner.requires_grad or not only_trainable)


def check_known(optimizer: HasGroups, known: Container[Tensor]) -> None:
    """Checks that an optimizer steps on parameters of the model alone.

    Raises:
        ValueError: A parameter of it is none of those that are known.
    """
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in known:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {number}, of shape {tuple(param.shape)}, is none "
                    "of the model's: build the optimizer after the model is sharded, from model.parameters()"
                )


def is_number(key: str, shape: Sequence[int], param_shape: Sequence[int]) -> bool:
    """Whether a state is one number for the whole parameter, and not the state of its one element."""
    return len(shape) == 0 and (key in NUMBERS or len(param_shape) > 0)
