"""Base of the layers of this package: modules of whose parameters each rank has a part.

A layer gives the full shape of each parameter, and the dimension along which it is divided (`ParamSharding`). From
that follow its local shape, its initial values, its `scale_core.shard.shard_of`, and how state dicts are loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_module import ShardedModule, full_tensor
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.layers.layer_checks import before_forward
from scale_tp.split import Split, check_size
from scale_tp.weight_init import FullWeightProxy, Initializer, init_shard


class ParamSharding(NamedTuple):
    """How a parameter is divided between the ranks."""

    shape: tuple[int, ...]  # of the full parameter
    dim: int = 0  # the dimension that is divided
    split: Split | None = None  # None where each rank has all of it

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        if self.split is None:
            return self.shape
        return (*self.shape[: self.dim], self.split.sizes[rank], *self.shape[self.dim + 1 :])

    def local_part(self, full: Tensor, rank: int) -> Tensor:
        """A rank's shard of the full parameter."""
        return full if self.split is None else self.split.take(full, rank, self.dim)

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different elements."""
        return self.split is not None

    def full_tensor(self, part: Tensor, group: Group, name: str) -> Tensor:
        """The full parameter, in memory of its own; all ranks of the group call it together."""
        return full_tensor(self, part, group, name)

    def shard_spec(self, group: Group, name: str = "") -> Shard:
        """The description of a rank's shard for norms, optimizers and checkpoints of scale-core."""
        if self.split is None:
            axes, numel = (Axis(group, Placement.REPLICATE),), torch.Size(self.shape).numel()
            return Shard(name, self.shape, 0, numel, axes, gathered=False, first_copy=group.rank == 0)
        ranges = tuple(
            self.split.ranges[group.rank] if dim == self.dim else ((0, size),) for dim, size in enumerate(self.shape)
        )
        counted = self.split.is_first_copy(group.rank)
        return Shard.of_ranges(name, self.shape, ranges, (Axis(group, Placement.SHARD),), counted=counted)


class ParallelModule(ShardedModule):
    """A module whose parameters are divided between the ranks of a group; `shardings` says how, by name."""

    shardings: dict[str, ParamSharding]

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.shardings = group, {}
        self.register_forward_pre_hook(before_forward)

    def add_parameter(
        self, name: str, sharding: ParamSharding, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Registers this rank's shard of a parameter, without values."""
        if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"{type(self).__name__}: expected dtype to be of floating point, in which {name} can be trained, got "
                f"{dtype}: pass one such as torch.bfloat16, or leave it out"
            )
        self.shardings[name] = sharding
        shape = sharding.local_shape(self.group.rank)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def init_parameter(self, name: str, init_method: Initializer, *, keep_full: bool = False) -> Tensor | None:
        """Gives a parameter the values that it has in the layer that is not divided; see `init_shard`."""
        if not callable(init_method):
            raise TypeError(
                "expected init_method to be a function that fills a tensor in place, such as "
                f"torch.nn.init.xavier_normal_, got {init_method!r}"
            )
        sharding, param = self.shardings[name], self.get_parameter(name)
        if isinstance(param, FullWeightProxy):  # It stands for the full parameter already.
            init_method(param)
            return None
        split = sharding.split or Split.even(sharding.shape[sharding.dim], 1)
        rank = self.group.rank if sharding.split is not None else 0
        part = local_tensor(param)
        return init_shard(part, sharding.shape, sharding.dim, split, rank, init_method, keep_full=keep_full)


def resolve_split(what: str, total: int, group: Group, stride: int, split: Split | None) -> Split:
    """Returns how the features of a layer are divided: by `split`, or by FairScale's `stride`."""
    check_size("stride", stride, 1)
    if split is not None and not isinstance(split, Split):
        raise TypeError(
            f"expected split to be a scale_tp.split.Split or None, got {type(split).__name__}: write "
            "Split.of_sizes([...]) with how many of them each rank has"
        )
    if split is None:
        return Split.strided(total, group.size, stride)
    if stride != 1:
        raise ValueError("expected stride or split, got both: split says all that stride would")
    if split.total != total or split.num_ranks != group.size:
        raise ValueError(
            f"expected a split of {what}={total} between {group.size} ranks, got one of {split.total} between "
            f"{split.num_ranks}"
        )
    if not split.has_only_full_copies:
        raise ValueError(
            f"expected ranks that share some of {what} to have all of theirs in common, got {split}: the gradients of "
            "what is a copy in part alone would not be summed"
        )
    return split


def rank_repr(group: Group) -> str:
    """The text about its ranks in a printed layer."""
    return f", rank={group.rank} of {group.size}" if group.size > 1 else ""
