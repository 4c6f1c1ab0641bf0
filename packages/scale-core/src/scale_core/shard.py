"""Metadata of local shards: the parameter and the elements that a tensor holds, and the holders of the others.

Optimizer wrappers, gradient norms, checkpoints and tensor-parallel layers all ask this of tensors that `parameters()`
yields. The answer stands on the tensor itself; `sharded_tensor` makes it one that acts by it.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.live_objects import live_objects, register_live
from scale_core.records import ParamRecord

P = ParamSpec("P")
R = TypeVar("R")

Ranges: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension the indices that are taken of it, as ranges [first, one past the last) in their order."""


as_local = torch._C.DisableTorchFunctionSubclass
"""A context in which sharded tensors are plain ones of this rank's elements, for code that knows about shards."""


def on_local_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a function inside of `as_local`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with as_local():
            return function(*args, **kwargs)

    return run


def wait_for(*params: Tensor) -> None:
    """Returns when no all-gather writes to these parameters; inside of `as_local`, functions of torch don't wait."""
    for param in params:
        wait = getattr(type(param), "wait_gathered", None)
        if wait is not None:
            wait(param)


class Placement(enum.Enum):
    """How the ranks of one mesh axis hold a tensor.

    Examples:
        >>> from scale_core.shard import Placement
        >>> [placement.name for placement in Placement]
        ['SHARD', 'REPLICATE', 'PARTIAL']

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """

    SHARD = "each rank holds other elements"
    REPLICATE = "each rank holds the same elements with the same values"
    PARTIAL = "each rank holds a summand of the same elements"


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: its ranks, and how they hold the tensor.

    Attributes:
        group: Its ranks.
        placement: How they hold it.
        num_sources: The number of these ranks whose samples each rank computes with. Above 1, for example for experts,
            a gradient is the sum over these samples, and `scale_core.hooks.source_grads` reports the gradient of each
            rank's samples.

    Examples:
        >>> from scale_core import Group
        >>> from scale_core.shard import Axis, Placement
        >>> axis = Axis(Group(), Placement.SHARD)
        >>> axis.group.size, axis.num_sources
        (1, 1)

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """

    group: Group
    placement: Placement
    num_sources: int = 1


@dataclass(frozen=True)
class Shard:
    """The piece of a parameter that this rank holds.

    Attributes:
        name: The parameter's qualified name in the plain model; "" where only the model that lists it knows.
        shape: The shape of the full parameter.
        start: First element held, in the row-major order of the full parameter, or of the part in `ranges`.
        stop: One past the last element held; `start == stop` where this rank holds nothing.
        axes: How each mesh axis holds it.
        unit: The name of the unit that gathers it; "" is the root.
        ranges: The indices of the piece, if it is not a range of elements: some columns, or several groups of
            rows. Empty is all of them.
        counted: Whether no other rank of a `SHARD` axis that comes first holds the same elements as well. Of such
            copies, one counts in a norm.
        gathered: Whether a unit gathers the full parameter for the forward; otherwise the module computes with
            the piece itself, as a tensor parallel layer does.
        counted_over: The ranks of the model, if some ranks have different parameters in the same place, for example
            different experts. A norm counts all of these parameters. None if all ranks hold pieces or copies of this
            one.
        first_copy: Whether this is the first of the ranks of a layer that all hold the full parameter.

    Examples:
        >>> from scale_core.shard import Shard
        >>> shard = Shard("weight", (4, 3), 0, 6)  # the first two of four rows
        >>> shard.stop - shard.start
        6

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    axes: tuple[Axis, ...] = ()
    unit: str = ""
    ranges: Ranges = ()
    counted: bool = True
    gathered: bool = True
    counted_over: Group | None = None
    first_copy: bool = True

    @classmethod
    def of_ranges(
        cls, name: str, shape: Sequence[int], ranges: Ranges, axes: tuple[Axis, ...] = (), *, counted: bool = True
    ) -> Self:
        """Returns the piece of a parameter that has these indices of each dimension, in all combinations.

        If these are one range of elements, `start` and `stop` say so. Modules compute with the piece itself.
        """
        full_ranges = tuple(((0, size),) for size in shape)
        if shape and len(ranges[0]) == 1 and ranges[1:] == full_ranges[1:]:
            row = math.prod(shape[1:])
            first, last = ranges[0][0]
            return cls(name, tuple(shape), first * row, last * row, axes, counted=counted, gathered=False)
        numel = math.prod(sum(stop - start for start, stop in dim_ranges) for dim_ranges in ranges)
        return cls(name, tuple(shape), 0, numel, axes, ranges=ranges, counted=counted, gathered=False)

    def cut(self, name: str, start: int, stop: int, axes: tuple[Axis, ...], unit: str = "") -> Self:
        """Returns elements [start, stop) of this piece, as further axes shard it."""
        location = (name, self.shape, self.start + start, self.start + stop)
        return type(self)(*location, axes + self.axes, unit, self.ranges, self.counted, first_copy=self.first_copy)

    @property
    def written(self) -> bool:
        """Whether this rank saves it. Units along a different axis may cut a layer's copies elsewhere."""
        return self.counted and self.first_copy

    @property
    def title(self) -> str:
        """The name in errors."""
        return f"'{self.name}'" if self.name else f"a parameter of shape {self.shape}"

    @property
    def numel(self) -> int:
        """The number of elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def divided_groups(self) -> tuple[Group, ...]:
        """The groups between whose ranks the elements are divided."""
        return tuple(axis.group for axis in self.axes if axis.placement is Placement.SHARD and axis.group.size > 1)


class Stages(Protocol):
    """A pipeline: a model whose parameters are divided over the ranks of a group.

    Its stages may be wrapped at any time, so they are not registered as tensors.
    """

    @property
    def group(self) -> Group:
        """The ranks that hold stages."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's current parameters, by the names of the full model."""

    def counted_elsewhere(self) -> Collection[Tensor]:
        """Copies of shared parameters that another rank counts in a norm."""

    def shared_names(self) -> dict[Tensor, str]:
        """This rank's copies of parameters that other ranks hold as well, each with a name that all of them have."""


RECORD = "_shard_spec"
"""The attribute of a tensor that has its `Shard`."""

ALIASES = "_data_aliases"
"""The attribute of a parameter that has weak references to what `param.data` has given."""

NOT_COPIED = frozenset((RECORD, ALIASES, ParamRecord.attribute))
"""Attributes that neither a copy of a parameter nor a file takes over."""

_on_first_shard: Callable[[], None] | None = None


def record_shard(tensor: Tensor, shard: Shard) -> None:
    """Puts the record of a piece on the tensor; replaces an earlier one."""
    vars(tensor)[RECORD] = shard
    _call_on_first_shard()


def register_stages(model: Stages) -> None:
    """Records that the parameters of `model` belong to this rank's stages; held weakly."""
    register_live(Stages, model)
    _call_on_first_shard()


def on_first_shard(callback: Callable[[], None]) -> None:
    """Calls `callback` once, when this process gets its first shard or stage; there is one such callback."""
    global _on_first_shard
    _on_first_shard = callback


def _call_on_first_shard() -> None:
    global _on_first_shard
    callback, _on_first_shard = _on_first_shard, None
    if callback is not None:
        callback()


def stage_parameters() -> Iterator[Tensor]:
    """Yields the parameters of the stages of this process."""
    for model in live_objects(Stages):
        yield from names_of_stages(model)


def names_of_stages(model: Stages) -> dict[Tensor, str]:
    """Returns the parameters of this rank's stages, each with its name in the full model."""
    return {param: name for name, param in model.named_parameters()}


def stages_of(params: Iterable[Tensor]) -> list[Stages]:
    """Returns the pipelines over several ranks that have one of these parameters, in the order they were built."""
    # Of no parameters at all, one that has none of them on this rank, where others may have some: such a rank takes
    # part in a norm with nothing. Pipelines over the same ranks are met at once, so of these any one will do.
    several: list[Stages] = [model for model in live_objects(Stages) if model.group.size > 1]
    if not several:
        return []
    remaining = set(params)  # tensors are equal by identity alone to sets
    if remaining:
        return [model for model in several if not remaining.isdisjoint(names_of_stages(model))]
    if len({model.group for model in several}) == 1:
        return several[:1]
    idle = [model for model in several if not any(param.requires_grad for param in names_of_stages(model))]
    if len(idle) == 1:
        return idle
    raise ValueError(
        "got no parameters, and there are pipelines over several groups of ranks, "
        f"{', '.join(str(list(model.group.ranks)) for model in several)}: it can't be told which of them have some. "
        "Clip all gradients of a pipeline together, by pipe.clip_grad_norm_(max_norm); or delete a pipeline that is no "
        "longer used"
    )


def shard_of(param: Tensor) -> Shard | None:
    """Returns the shard metadata of `param`, or None if it is a full tensor.

    Examples:
        >>> import torch
        >>> from scale_core.shard import Shard, shard_of
        >>> from scale_core.sharded_tensor.tensor import set_shard
        >>> param = torch.nn.Parameter(torch.ones(2, 3))
        >>> shard_of(param) is None
        True
        >>> set_shard(param, Shard("weight", (4, 3), 0, 6))
        >>> shard_of(param).stop
        6

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """
    return vars(param).get(RECORD)


@on_local_tensors
def title_of(param: Tensor) -> str:
    """Returns a parameter's name in errors: its qualified name where that is known, or else its shape."""
    shard = shard_of(param)
    return f"a parameter of shape {tuple(param.shape)}" if shard is None else shard.title


def unit_shard_of(param: Tensor) -> Shard | None:
    """Returns the metadata of a shard that a unit gathers, or None if its module computes with the shard itself."""
    # A parameter of a tensor parallel layer is such: a piece to those who take norms or write files, and to those who
    # cut and gather parameters between other ranks a parameter like any.
    shard = shard_of(param)
    return shard if shard is not None and shard.gathered else None


def is_divided(param: Tensor) -> bool:
    """Whether other ranks hold other elements of the parameter that `param` is a piece of."""
    shard = shard_of(param)
    return shard is not None and is_divided_shard(shard)


def is_divided_shard(shard: Shard) -> bool:
    """Whether other ranks hold other elements."""
    return bool(shard.divided_groups)


@on_local_tensors
def check_undivided(params: Iterable[tuple[str, Tensor]], group: Group, what: str) -> None:
    """Refuses a group of replicas whose ranks hold different parts of a parameter: `what` would mix their values.

    Raises ValueError where a layer has divided one between ranks of the group, or these are stages of a pipeline.
    """
    named = list(params)
    for model in stages_of(param for _, param in named) if named else ():
        if len(set(model.group.ranks).intersection(group.ranks)) > 1:
            names = names_of_stages(model)
            name = next(names[param] for _, param in named if param in names)
            raise ValueError(
                f"{what}: '{name}' is a parameter of a pipeline's stage. Each of the ranks {list(model.group.ranks)} "
                f"holds other stages, and {what} was given {list(group.ranks)} as ranks that hold the same: give it "
                'the replicas of this stage, such as mesh["data"].get_group(), as process_group=; where the '
                f"pipeline has no replicas, leave {what} out"
            )
    for name, param in named:
        shard = shard_of(param)
        if shard is None or shard.gathered:
            continue
        for axis in shard.axes:
            if axis.placement is Placement.SHARD and len(set(axis.group.ranks).intersection(group.ranks)) > 1:
                raise ValueError(
                    f"{what}: '{name}' is a shard {list(param.shape)} of a parameter {list(shard.shape)} that its "
                    f"layer divides between the ranks {list(axis.group.ranks)}, and {what} was given "
                    f"{list(group.ranks)} as ranks that hold the same: give it those along the data axis, such as "
                    'mesh["data"].get_group() or scale_tp.megatron.get_data_parallel_group()'
                )


def full_shape(param: Tensor) -> torch.Size:
    """Returns the shape of the full parameter, for a shard or a full one.

    Examples:
        >>> import torch
        >>> from scale_core.shard import Shard, full_shape
        >>> from scale_core.sharded_tensor.tensor import set_shard
        >>> param = torch.nn.Parameter(torch.ones(2, 3))
        >>> set_shard(param, Shard("weight", (4, 3), 0, 6))
        >>> full_shape(param)
        torch.Size([4, 3])

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """
    shard = shard_of(param)
    return param.shape if shard is None else torch.Size(shard.shape)


def full_numel(param: Tensor) -> int:
    """Returns the number of elements of the full parameter, for a shard or a full one.

    Examples:
        >>> import torch
        >>> from scale_core.shard import Shard, full_numel
        >>> from scale_core.sharded_tensor.tensor import set_shard
        >>> param = torch.nn.Parameter(torch.ones(2, 3))
        >>> set_shard(param, Shard("weight", (4, 3), 0, 6))
        >>> full_numel(param)
        12

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """
    return full_shape(param).numel()


def elements_of(whole: Tensor, start: int, stop: int, ranges: Ranges = ()) -> Tensor:
    """Returns the elements `[start, stop)` of a full tensor, or of its `ranges`; 1-D."""
    for dim, dim_ranges in enumerate(ranges):
        if dim_ranges != ((0, whole.shape[dim]),):
            whole = torch.cat([whole.narrow(dim, first, last - first) for first, last in dim_ranges], dim)
    return whole.reshape(-1)[start:stop]
