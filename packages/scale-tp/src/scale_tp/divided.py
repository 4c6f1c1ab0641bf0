"""Modules that exist already, divided in place: they keep their class, their names and their hooks.

A module becomes one of a class made of its own and one from here. Its parameters become this rank's parts, and its
forward goes into the divided region and comes back out of it. Modules that read the same input, such as the projections
to queries, keys and values, go into it together: so their gradients are summed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.group import Group
from scale_tp.copies import has_copies, sum_gradients_of_copies
from scale_tp.divided_randomness import DividedRandomness
from scale_tp.features import gather_features, scatter_features
from scale_tp.layer import ParallelModule, Placement
from scale_tp.regions import (
    copy_all_to_model_parallel_region,
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from scale_tp.sequence_parts import parts_held
from scale_tp.split_sizes import Split

_classes: dict[tuple[type[Divided], type[nn.Module]], type[nn.Module]] = {}

SEQUENCE_DIM = 1
"""The dimension of the sequence in what the modules of transformers hand on: [batch, sequence, width]."""


class Entrance:
    """The way into the divided region, which modules that read the same tensor take together.

    Args:
        group: The ranks.
        num_readers: How many modules read it.
        way: "copy" what all ranks have; "gather" the sequence, of which each has a part; or "inside", where what comes
            is in the region already.
    """

    def __init__(self, group: Group, num_readers: int, way: Literal["copy", "gather", "inside"]) -> None:
        self.group, self.num_readers, self.way = group, num_readers, way
        self._inside: tuple[object, Tensor, Tensor] | None = None
        self._num_left = 0

    def enter(self, input: Tensor) -> Tensor:
        """Returns the input inside of the region; the same tensor for each module that brings the same input."""
        if self.way == "inside":
            return input
        # A tensor that was changed, or is used for another purpose, is another one.
        state = (input._version if not input.is_inference() else 0, torch.is_grad_enabled())
        known, self._inside = self._inside, None
        if known is not None and known[0] == state and known[1] is input:
            inside = known[2]
        else:
            inside, self._num_left = self._entered(input), self.num_readers
        self._num_left -= 1
        if self._num_left > 0:  # The last one leaves nothing behind.
            self._inside = (state, input, inside)
        return inside

    def forget(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the module that holds the readers: some of them may not have read."""
        self._inside = None

    def _entered(self, input: Tensor) -> Tensor:
        if self.way == "copy":
            return copy_to_model_parallel_region(input, self.group)
        return gather_sequence(input, self.group)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_inside": None, "_num_left": 0}


class Divided(ParallelModule):
    """What the classes below add to a module's own."""

    own_class: type[nn.Module]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, one of {self.group.size} parts"


class Columns(Divided):
    """A linear layer of whose outputs each rank computes a part."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    entrance: Entrance
    split: Split
    gathers: bool
    randomness: DividedRandomness | None

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., outputs of this rank], or all outputs, for [..., inputs]."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if has_copies(self.split):
            weight = sum_gradients_of_copies(weight, self.group, self.split)
            bias = None if bias is None else sum_gradients_of_copies(bias, self.group, self.split)
        output = linear(self, self.entrance.enter(input), weight, bias)
        if self.randomness is not None:
            self.randomness.enter_if_wanted()
        if not self.gathers:
            return output
        return gather_features(output, self.group, self.split)


class Rows(Divided):
    """A linear layer of whose inputs each rank has a part; the results are summed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    split: Split
    splits_input: bool
    sums: bool
    sequence_parallel: bool
    path: str
    randomness: DividedRandomness | None

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., outputs] for [..., inputs of this rank], or all inputs."""
        if self.randomness is not None:
            self.randomness.leave()
        if self.splits_input:
            input = scatter_features(input, self.group, self.split)
        if input.shape[-1] != self.split.sizes[self.group.rank]:
            raise ValueError(
                f"'{self.path}': expected the {self.split.sizes[self.group.rank]} of {self.split.total} inputs that "
                f"rank {self.group.rank} of {self.group.size} has, got {input.shape[-1]}: the layer before it is "
                "divided in another way, or hands on all of its outputs, where the style is 'rowwise_split_input'"
            )
        output = linear(self, input, self.weight, None)
        bias: Tensor | None = self.bias
        if not self.sums:  # Of the summands, one brings the bias; its gradient is the same on all ranks.
            return output if bias is None else output + (bias - bias.detach() if self.group.rank else bias)
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, self.group, dim=SEQUENCE_DIM)
            bias = None if bias is None else copy_to_model_parallel_region(bias, self.group)
        else:
            output = reduce_from_model_parallel_region(output, self.group)
        return output if bias is None else output + bias


class Words(Divided):
    """An embedding of whose words each rank has a part; the others' words are zeros, and the results are summed."""

    weight: nn.Parameter
    padding_idx: int | None
    split: Split

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., width] for [...] integers."""
        ((start, stop),) = self.split.ranges[self.group.rank]
        outside = (input < start) | (input >= stop)
        # A word that no rank has gets a row that there is not: torch says so, on this device as on any.
        unknown = (input < 0) | (input >= self.split.total)
        local = (input - start).masked_fill(outside, 0).masked_fill(unknown, max(stop - start, 1))
        if start == stop:
            nothing = F.embedding(local, self.weight.new_zeros(1, self.weight.shape[1]))
            found = nothing + self.weight.sum()
        else:
            found = self._own_words(local, start, stop).masked_fill(outside[..., None], 0)
        return reduce_from_model_parallel_region(found, self.group)

    def _own_words(self, local: Tensor, start: int, stop: int) -> Tensor:
        """What the module's own forward gives for words of this rank, counted from its first one."""
        padding = self.padding_idx
        self.padding_idx = None if padding is None or not start <= padding < stop else padding - start
        try:
            found: Tensor = super().forward(local)
        finally:
            self.padding_idx = padding
        return found


class Width(Divided):
    """An embedding of whose width each rank has a part; the parts are put together."""

    split: Split

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., width] for [...] integers."""
        return gather_from_model_parallel_region(super().forward(input), self.group, sizes=self.split.sizes)


class Alike(Divided):
    """A module whose parameters all ranks have, but with which each computes on other data: gradients are summed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        names = list(self._parameters)
        params = [self._parameters[name] for name in names]
        given = [(name, param) for name, param in zip(names, params, strict=True) if param is not None]
        copied = copy_all_to_model_parallel_region(*(param for _, param in given), group=self.group)
        # What stands in the instance is found before its parameters.
        self.__dict__.update(zip((name for name, _ in given), copied, strict=True))
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name, _ in given:
                self.__dict__.pop(name, None)


class Summed(Divided):
    """A module that returns a summand on each rank: a tensor, or a tuple that begins with one."""

    sequence_parallel: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, summed."""
        output = super().forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return self._sum(output)
        return (self._sum(output[0]), *output[1:])

    def _sum(self, summand: Tensor) -> Tensor:
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(summand, self.group, dim=SEQUENCE_DIM)
        return reduce_from_model_parallel_region(summand, self.group)


def gather_sequence(part: Tensor, group: Group) -> Tensor:
    """Returns [batch, sequence, width] for a rank's part of the sequence, to go on with in the divided region."""
    sizes = parts_held(group, part.shape[SEQUENCE_DIM])
    return gather_from_sequence_parallel_region(part, group, dim=SEQUENCE_DIM, sizes=sizes)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer with torch's own forward, or the transposed one of transformers."""
    return type(module).forward is nn.Linear.forward or _is_transposed(module)


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding; one with a forward of its own may scale what it finds."""
    return isinstance(module, nn.Embedding)


def linear(module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes a linear layer of either kind with this weight and bias."""
    if not _is_transposed(module):
        return F.linear(input, weight, bias)
    flat = input.reshape(-1, input.shape[-1])
    output = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return output.view(*input.shape[:-1], weight.shape[1])


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear layer or an embedding."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def outputs_dim(module: nn.Module) -> int:
    """The dimension of the outputs in a linear layer's weight; the other one is that of the inputs."""
    return 1 if _is_transposed(module) else 0


def divide(
    module: nn.Module, kind: type[Divided], group: Group, placements: dict[str, Placement], **facts: Any
) -> None:
    """Makes a module one of those above, in place; its parameters are left as they are.

    Args:
        module: The module.
        kind: What is added to its class.
        group: The ranks.
        placements: How its parameters are to stand on them, by name.
        **facts: The attributes that `kind` declares.
    """
    module.__class__ = _class_of(kind, type(module))
    for name, value in {"group": group, "placements": placements, **facts}.items():
        object.__setattr__(module, name, value)


def part_of(param: nn.Parameter, placement: Placement, group: Group) -> nn.Parameter:
    """Returns this rank's part of a whole parameter, with memory of its own."""
    part = placement.take(param.detach(), group.rank).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=param.requires_grad)


def _is_transposed(module: nn.Module) -> bool:
    own = getattr(module, "own_class", type(module))
    return bool(own.__name__ == "Conv1D" and hasattr(module, "nf"))


def _class_of(kind: type[Divided], own: type[nn.Module]) -> type[nn.Module]:
    """A class that is both; one for each pair, under the name of the module's own."""
    if (kind, own) not in _classes:
        facts = {"own_class": own, "__module__": own.__module__, "__reduce_ex__": _reduce}
        _classes[kind, own] = type(own.__name__, (kind, own), facts)
    return _classes[kind, own]


def _reduce(self: Any, protocol: Any) -> Any:
    """A class that is made while a program runs is made again where it is read."""
    kind = type(self).__mro__[1]
    return _blank, (kind, type(self).own_class), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__


def _blank(kind: type[Divided], own: type[nn.Module]) -> nn.Module:
    made = _class_of(kind, own)
    return cast(nn.Module, cast(Callable[[type], object], made.__new__)(made))
