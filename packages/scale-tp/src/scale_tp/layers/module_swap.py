"""Modules that exist already, divided in place: they keep their class, their names and their hooks.

A module becomes one of a class made of its own and one that is derived from `Divided`, which says what its forward does
between the ranks. Its parameters become this rank's parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_tp.layers.base import ParallelModule, Placement
from scale_tp.layers.whole_init import initialise_whole

_classes: dict[tuple[type[Divided], type[nn.Module]], type[nn.Module]] = {}


class Divided(ParallelModule):
    """What is added to a module's own class."""

    own_class: type[nn.Module]

    def check_weight(self) -> None:
        """Refuses a weight of another size than this rank's part, which others have put there.

        Raises:
            ValueError: It is such.
        """
        shape, dim, split = self.placements["weight"]
        weight = weight_of(self)
        if split is not None and weight.shape[dim] != split.sizes[self.group.rank]:
            expected = self.placements["weight"].local_shape(self.group.rank)
            raise ValueError(
                f"{type(self).__name__}: expected the part {list(expected)} of the weight {list(shape)} that rank "
                f"{self.group.rank} of {self.group.size} has, got {list(weight.shape)}: change the size of a layer, as "
                "by resize_token_embeddings(...), before parallelize(model), which takes a part for the whole"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, one of {self.group.size} parts"


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear layer or an embedding."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def divide(
    module: nn.Module, kind: type[Divided], group: Group, placements: dict[str, Placement], **facts: object
) -> None:
    """Makes a module one of a divided kind, in place; its parameters are left as they are.

    Of those that all ranks hold as a whole, that is known from now on.

    Args:
        module: The module.
        kind: What is added to its class.
        group: The ranks.
        placements: How its parameters are to stand on them, by name.
        **facts: The attributes that `kind` declares.
    """
    assert facts.keys() <= declared(kind), f"{kind.__name__} declares none of {facts.keys() - declared(kind)}"
    module.__class__ = _class_of(kind, type(module))
    for name, value in {"group": group, "placements": placements, **facts}.items():
        object.__setattr__(module, name, value)
    for name, placement in placements.items():
        if placement.split is None:
            module.register_parameter(name, module._parameters[name])


def declared(kind: type[Divided]) -> frozenset[str]:
    """The names of the attributes that a kind declares, whoever of its bases does."""
    return frozenset(name for base in kind.__mro__ for name in inspect.get_annotations(base))


def part_of(param: nn.Parameter, placement: Placement, group: Group) -> nn.Parameter:
    """Returns this rank's part of a whole parameter, with memory of its own."""
    part = placement.take(param.detach(), group.rank).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=param.requires_grad)


def _class_of(kind: type[Divided], own: type[nn.Module]) -> type[nn.Module]:
    """A class that is both; one for each pair, under the name of the module's own."""
    if (kind, own) not in _classes:
        known: dict[str, Any] = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        if callable(getattr(own, "reset_parameters", None)):
            known["reset_parameters"] = _reset
        _classes[kind, own] = type(own.__name__, (kind, own), {**known, "own_class": own, "__reduce_ex__": _reduce})
    return _classes[kind, own]


def _reset(self: Any) -> None:
    """Gives the parameters the values that the module's own class gives the whole ones; on all ranks from one seed."""
    initialise_whole(self, type(self).own_class.reset_parameters)


def _reduce(self: Any, protocol: Any) -> Any:
    """A class that is made while a program runs is made again where it is read."""
    kind = type(self).__mro__[1]
    return _blank, (kind, type(self).own_class), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__


def _blank(kind: type[Divided], own: type[nn.Module]) -> nn.Module:
    made = _class_of(kind, own)
    return cast(nn.Module, cast(Callable[[type], object], made.__new__)(made))
