"""Turns modules into sharded ones in place: they keep their object, their class's name, their names and their hooks.

The class of such a module is made of its own and of a `ShardedMixin`, whose forward communicates. Its parameters become
this rank's shards.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.parameters import copy_attributes
from scale_core.sharded_module import mixed_class
from scale_tp.layers.base import ParallelModule, ParamSharding
from scale_tp.layers.full_init import init_as_full
from scale_tp.split import Split


class ShardedMixin(ParallelModule):
    """Base of the classes that are added to a module's own class."""

    original_class: type[nn.Module]
    # How the weight is divided: its split, along which dimension, and this rank's size of that; set by `swap_class`.
    split: Split
    weight_dim: int
    weight_size: int

    @staticmethod
    def mixed_attributes(own: type[nn.Module]) -> dict[str, Any]:
        """Further attributes of the class made of this one and a module's own."""
        return {"reset_parameters": _reset_parameters} if callable(getattr(own, "reset_parameters", None)) else {}

    def weight_error(self) -> ValueError:
        """Says that the weight has another size than this rank's shard, as after `resize_token_embeddings`."""
        sharding = self.shardings["weight"]
        return ValueError(
            f"{type(self).__name__}: expected the shard {list(sharding.local_shape(self.group.rank))} of the weight "
            f"{list(sharding.shape)} that rank {self.group.rank} of {self.group.size} has, got "
            f"{list(weight_of(self).shape)}: change the size of a layer, as by resize_token_embeddings(...), before "
            "parallelize(model), which takes a shard for the full weight"
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, one of {self.group.size} shards"


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear layer or an embedding."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def swap_class(
    module: nn.Module, mixin: type[ShardedMixin], group: Group, shardings: dict[str, ParamSharding], **facts: object
) -> None:
    """Makes a module a sharded one, in place; its parameters are left as they are.

    `facts` are the attributes that the mixin declares. Parameters that all ranks replicate are marked as such.
    """
    unknown = facts.keys() - {name for base in mixin.__mro__ for name in inspect.get_annotations(base)}
    assert not unknown, f"{mixin.__name__} declares none of {unknown}"
    module.__class__ = mixed_class(mixin, type(module))
    weight = shardings.get("weight")
    if weight is not None and weight.split is not None:
        facts |= {"split": weight.split, "weight_dim": weight.dim, "weight_size": weight.split.sizes[group.rank]}
    for name, value in {"group": group, "shardings": shardings, **facts}.items():
        object.__setattr__(module, name, value)
    for name, sharding in shardings.items():
        if sharding.split is None:
            module.register_parameter(name, module._parameters[name])


def local_parameter(param: nn.Parameter, sharding: ParamSharding, group: Group) -> nn.Parameter:
    """Returns this rank's shard of a full parameter, with memory of its own and the attributes that users set."""
    part = sharding.local_part(param.detach(), group.rank).clone(memory_format=torch.contiguous_format)
    shard = nn.Parameter(part, requires_grad=param.requires_grad)
    copy_attributes(param, shard)
    return shard


def _reset_parameters(self: Any) -> None:
    """Gives the parameters the values that the module's own class gives the full ones; on all ranks from one seed."""
    init_as_full(self, type(self).original_class.reset_parameters)
