"""Which named parameters, or which of their elements, are in each tensor that an optimizer steps on.

Mostly it is one: the parameter itself, or this rank's shard of it. A flat parameter holds many, one after the other,
and is itself none of the plain model. State is saved by the names of the plain model.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.flat.buffer import FlatBuffer
from scale_core.records import ParamRecord
from scale_core.shard import Placement, Ranges, on_local_tensors, shard_of, wait_for


class HasGroups(Protocol):
    """An optimizer, or a wrapper around one."""

    @property
    def param_groups(self) -> Any: ...


@runtime_checkable
class PartOfModel(Protocol):
    """A module with some parts of a model under the names of the full one; other ranks have the others."""

    def names_of_model(self) -> Mapping[str, str]:
        """All names in the state of the full model, each with the first name of the same tensor."""
        ...

    def is_first_holder(self, name: str) -> bool:
        """Whether this rank is the first that holds the tensor of this first name."""
        ...


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """One parameter of the plain model, as this rank holds it."""

    name: str  # Its qualified name in the plain model
    owner: Tensor  # The tensor that an optimizer steps on: the parameter, a shard of it, or a flat parameter
    shape: tuple[int, ...]  # The shape of the full parameter
    start: int  # The first element held, in the row-major order of the parameter, or of the part in `ranges`
    stop: int  # One past the last element held
    offset: int = 0  # Where the held elements begin in the flattened `owner`
    local_shape: tuple[int, ...] = ()  # The shape of these elements
    is_shard: bool = True  # Other ranks may hold other elements
    shares_owner: bool = False  # The owner is a flat parameter, which holds others, too
    # This rank's part of the optimizer's state: the state of the elements held; all of it, of any shape, where one
    # rank steps on the full parameter; or nothing, where others do.
    state: Literal["elements", "all", "nothing"] = "elements"
    ranges: Ranges = ()  # The indices of the full parameter; see `scale_core.shard.Shard`
    written: bool = True  # This rank saves its elements; otherwise another one that holds the same does

    def view(self, tensor: Tensor) -> Tensor:
        """Its elements in a tensor of the owner's shape: the owner, or a state of it."""
        if not self.shares_owner:
            return tensor.detach()
        return tensor.detach().view(-1).narrow(0, self.offset, self.stop - self.start).view(self.local_shape)


def register_flat_param(buffer: FlatBuffer) -> None:
    """Records the parameters in the flat parameter of `buffer`; later changes of their names count."""
    assert buffer.flatten, "a buffer that exposes its parameters one by one has no flat one"
    ParamRecord.get_or_create(buffer.sharded_params[0]).flat_buffer = weakref.ref(buffer)


def flat_buffer_of(param: Tensor) -> FlatBuffer | None:
    """The buffer of a flat parameter; None for any other tensor, and where the buffer is gone."""
    record = ParamRecord.get(param)
    buffer: FlatBuffer | None = None if record is None or record.flat_buffer is None else record.flat_buffer()
    return buffer


@on_local_tensors
def param_slices(param: Tensor, listed: str) -> Iterator[ParamSlice]:
    """Yields the slices in `param`, listed under this name, when its values are there."""
    wait_for(param)
    buffer, shard = flat_buffer_of(param), shard_of(param)
    if shard is not None and any(axis.placement is Placement.PARTIAL for axis in shard.axes):
        raise ValueError(f"{shard.name} is a partial sum on each rank: reduce it before you take its state")
    if buffer is not None:
        for name, entry, span in zip(buffer.names, buffer.layout.entries, buffer.spans, strict=True):
            location = (entry.shape, span.start, span.stop, span.shard_offset, span.shape)
            yield ParamSlice(name, param, *location, shares_owner=True)
    elif shard is not None:
        location = (shard.shape, shard.start, shard.stop, 0, tuple(param.shape))
        yield ParamSlice(shard.name or listed, param, *location, ranges=shard.ranges, written=shard.written)
    else:
        shape = tuple(param.shape)
        yield ParamSlice(listed, param, shape, 0, param.numel(), 0, shape, is_shard=False)


@on_local_tensors
def named_param_slices(model: nn.Module) -> dict[str, ParamSlice]:
    """Returns a model's slices by the names of the plain model; a tied parameter is listed once."""
    slices: dict[str, ParamSlice] = {}
    part = model if isinstance(model, PartOfModel) else None
    for listed, param in model.named_parameters():
        for holding in param_slices(param, listed):
            if part is not None:
                name = holding.name if holding.shares_owner else listed  # A unit knows the names within its stage.
                first = part.names_of_model().get(name, name)
                holding = replace(holding, name=first, written=holding.written and part.is_first_holder(first))
            if holding.name in slices:
                raise ValueError(f"two parameters are named {holding.name}: the second is listed as {listed}")
            slices[holding.name] = holding
    return slices


def of_this_rank(saved: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Drops from a saved state the units that each rank has for itself, if they belong to other ranks."""
    # Such parameters have names that end in their ranks, `expert.weight@1`. What has been saved by ranks that are not
    # among the ranks of the model stays, and is unexpected.
    names = named_param_slices(model)
    stems = {name.partition("@")[0] for name in names if "@" in name}
    if not stems:
        return saved
    shards = [shard for param in model.parameters() if (shard := shard_of(param)) is not None]
    local_ranks = {rank for shard in shards for axis in shard.axes for rank in axis.group.ranks}

    def is_of_others(key: str) -> bool:
        stem, separator, suffix = key.partition(".")[2].partition("@")
        ranks = suffix.partition(".")[0]
        if not separator or stem not in stems or f"{stem}@{ranks}" in names:
            return False
        return local_ranks.issuperset(int(rank) for rank in ranks.split("-") if rank.isdigit())

    return {key: value for key, value in saved.items() if not is_of_others(key)}


@checked_arguments
@on_local_tensors
def num_parameters(model: nn.Module, *, only_trainable: bool = False) -> int:
    """Returns the number of elements of a model's full parameters; a tied one counts once. Sends nothing.

    `sum(p.numel() for p in model.parameters())` counts this rank's elements. Of a pipeline, the stages of this
    rank are counted in full.

        >>> from torch import nn
        >>> num_parameters(nn.Linear(3, 2))
        8

    Args:
        model: A model, sharded or not, or a part of one.
        only_trainable: Leave out parameters without a gradient.

    Raises:
        ValueError: The ranks hold summands of a parameter.

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    slices = named_param_slices(model).values()
    return sum(math.prod(holding.shape) for holding in slices if holding.owner.requires_grad or not only_trainable)


def check_known(optimizer: HasGroups, known: Container[Tensor]) -> None:
    """Checks that an optimizer steps on parameters of the model only."""
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in known:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {number}, of shape {tuple(param.shape)}, is none "
                    "of the model's: build the optimizer after the model is sharded, from model.parameters()"
                )


def not_elementwise(name: str, shape: Sequence[int], shard_shape: Sequence[int]) -> ValueError:
    """The error of an optimizer state `name` that is neither a number nor has the shard's shape."""
    return ValueError(
        f"optimizer state {name} has shape {tuple(shape)}, expected the shard's {tuple(shard_shape)} or a number: this "
        "optimizer needs full parameters, so it can't step on shards; around it, write OSS(..., "
        "options=OSSOptions(elementwise=False))"
    )
