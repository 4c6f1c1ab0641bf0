"""Base of the layers of this package: modules of whose parameters each rank has a part.

A layer says of each parameter what the full one is, and along which dimension it is divided (`ParamSharding`). From
that follow its local shape, its initial values, what `scale_core.shard_of` says of it, and how state dicts are loaded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.errors import ScaleDistributedError
from scale_core.optim.step_checks import watch_optimizers
from scale_core.shard import Axis, Placement, Shard, set_shard, shard_of, unit_shard_of
from scale_core.state.torch_state_dict import StateDictRequest, saved_by_torch, torch_request
from scale_tp.split import Split, check_size
from scale_tp.weight_init import FullWeightProxy, Initializer, init_shard


class ParamSharding(NamedTuple):
    """How a parameter is divided between the ranks."""

    shape: tuple[int, ...]  # of the full parameter
    dim: int = 0  # the dimension that is divided
    split: Split | None = None  # None where each rank has all of it

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        if self.split is None:
            return self.shape
        return (*self.shape[: self.dim], self.split.sizes[rank], *self.shape[self.dim + 1 :])

    def local_part(self, full: Tensor, rank: int) -> Tensor:
        """A rank's part of the full parameter."""
        return full if self.split is None else self.split.take(full, rank, self.dim)

    def full_tensor(self, part: Tensor, group: Group, name: str) -> Tensor:
        """The full parameter, in memory of its own; all ranks of the group call it together."""
        if self.split is None or group.size == 1:
            return part.detach().clone()
        if part.is_meta:
            return torch.empty(self.shape, dtype=part.dtype, device="meta")
        # It loads torch's checkpoint package, which takes a second.
        from scale_core.state.full_tensor import gather_full_param

        return gather_full_param(part, self.shard_spec(group, name), group)

    def shard_spec(self, group: Group, name: str = "") -> Shard:
        """What norms, optimizers and checkpoints of scale-core read of a rank's part."""
        if self.split is None:
            axes, numel = (Axis(group, Placement.REPLICATE),), torch.Size(self.shape).numel()
            return Shard(name, self.shape, 0, numel, axes, gathered=False, first_copy=group.rank == 0)
        ranges = tuple(
            self.split.ranges[group.rank] if dim == self.dim else ((0, size),) for dim, size in enumerate(self.shape)
        )
        counted = self.split.is_first_copy(group.rank)
        return Shard.of_ranges(name, self.shape, ranges, (Axis(group, Placement.SHARD),), counted=counted)


class ParallelModule(nn.Module):
    """A module whose parameters are divided between the ranks of a group; `shardings` says how, by name."""

    group: Group
    shardings: dict[str, ParamSharding]
    _saves_whole = True  # False: `state_dict()` has this rank's part, as FairScale's layers have it.

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.shardings = group, {}

    def add_parameter(
        self, name: str, sharding: ParamSharding, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Registers this rank's part of a parameter, without values."""
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
        return init_shard(param, sharding.shape, sharding.dim, split, rank, init_method, keep_full=keep_full)

    def full_parameter(self, name: str) -> Tensor:
        """Returns a full parameter without gradients, on all ranks; all of them call it together."""
        return self.shardings[name].full_tensor(self.get_parameter(name), self.group, name)

    # What is known of a parameter must outlive all that can be done to a module.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As any module's; a parameter in the place of another one is a part of the same full one."""
        super().register_parameter(name, param)
        self._set_shard_spec(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in self.shardings:
            self._set_shard_spec(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in self.shardings:
            self._set_shard_spec(name)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Takes this rank's part out of full tensors, and out of what torch's checkpoint functions have read."""
        refused = []
        for name, sharding in self.shardings.items():
            value = state_dict.get(prefix + name)
            local = sharding.local_shape(self.group.rank)
            held = _local_tensor(value) if isinstance(value, Tensor) else None
            if held is not None:
                state_dict[prefix + name] = held.view(local)
            elif isinstance(value, Tensor) and tuple(value.shape) == sharding.shape != local:
                part = sharding.local_part(value, self.group.rank)
                if local_metadata.get("assign_to_params_buffers"):  # Or the part would keep the full one in memory.
                    part = part.detach().clone(memory_format=torch.contiguous_format)
                state_dict[prefix + name] = part
            elif isinstance(value, Tensor) and tuple(value.shape) != local:
                refused.append(
                    f"{prefix}{name}: expected the whole tensor {sharding.shape}, or the part {local} that rank "
                    f"{self.group.rank} of {self.group.size} has, got {tuple(value.shape)}"
                )
        *_, messages = args
        before = len(messages)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self.group.size > 1 and len(messages) > before:  # torch speaks of this rank's part alone.
            messages.extend(refused)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Gives full tensors under the plain model's names, for which all ranks call `state_dict()` together.

        With `keep_vars` it is this rank's parts; torch's checkpoint functions get parts that say where they belong.
        """
        is_filled_again = any(prefix + name in destination for name in self.shardings)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.group.size == 1 or keep_vars:
            return
        if is_filled_again:  # What was given to an earlier call, `state_dict(destination=...)`.
            _full_tensors.clear()
        asked = torch_request() or (StateDictRequest() if saved_by_torch() else None)
        if asked is None and not self._saves_whole:
            return
        for name, sharding in self.shardings.items():
            param = self._parameters.get(name)
            if param is None or sharding.split is None or unit_shard_of(param) is not None:
                continue
            if asked is not None and not asked.whole:
                from scale_core.state.chunks import LocalShard  # Loads torch's checkpoint package, which has asked.

                part, shard = param.detach().contiguous(), sharding.shard_spec(self.group)
                destination[prefix + name] = LocalShard(part, shard.shape, shard.start, shard.stop, shard.ranges)
            else:
                gather = partial(self._gather_full, sharding, param, prefix + name)
                destination[prefix + name] = _full_tensors.get(destination, param, gather)

    def _gather_full(self, sharding: ParamSharding, param: Tensor, name: str) -> Tensor:
        """A full parameter; an error says what all ranks have to call."""
        try:
            return sharding.full_tensor(param, self.group, name)
        except ScaleDistributedError as error:
            raise ScaleDistributedError(
                f"state_dict: '{name}' is divided between the ranks {list(self.group.ranks)}, and not all of them have "
                "come to give their part: call model.state_dict() on all ranks, also where one of them writes it; or, "
                f"for what this rank has, model.state_dict(keep_vars=True)\n{error}"
            ) from error

    def _set_shard_spec(self, name: str) -> None:
        """Marks a parameter as a part, unless another package has said more of it."""
        sharding, param = self.shardings.get(name), self._parameters.get(name)
        if sharding is None or param is None or self.group.size == 1 or shard_of(param) is not None:
            return
        if tuple(param.shape) == sharding.local_shape(self.group.rank):
            set_shard(param, sharding.shard_spec(self.group))
            # Optimizers that need full tensors are refused, and others say what their state is a part of.
            watch_optimizers()


class _FullTensorCache:
    """The full tensors of the `state_dict()` that runs, so that a tied parameter is gathered once."""

    def __init__(self) -> None:
        self._destination: weakref.ref[Any] | None = None
        self._found: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()

    def get(self, destination: Any, param: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """The full tensor of a parameter for this state dict, with the values that it has now."""
        if self._destination is None or self._destination() is not destination:
            self.clear()
            try:
                self._destination = weakref.ref(destination)
            except TypeError:  # A plain dict, which was given: a tied parameter is gathered twice.
                self._destination = None
        key = id(param), 0 if param.is_inference() else param._version
        full = self._found.get(key)
        if full is None:
            full = self._found[key] = gather()
        return full

    def clear(self) -> None:
        """Begins another call."""
        self._destination, self._found = None, WeakValueDictionary()


_full_tensors = _FullTensorCache()


def resolve_split(what: str, total: int, group: Group, stride: int, split: Split | None) -> Split:
    """Returns how the features of a layer are divided: by `split`, or by FairScale's `stride`."""
    check_size("stride", stride, 1)
    if split is not None and not isinstance(split, Split):
        raise TypeError(
            f"expected split to be a scale_tp.Split or None, got {type(split).__name__}: write Split.of_sizes([...]) "
            "with how many of them each rank has"
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
    """What a printed layer says of its ranks."""
    return f", rank={group.rank} of {group.size}" if group.size > 1 else ""


def _local_tensor(value: Tensor) -> Tensor | None:
    """This rank's part, where a tensor is torch's placeholder of a full one; else None."""
    chunks = sys.modules.get("scale_core.state.chunks")  # Without it nothing can have made such a tensor.
    return value.tensor if chunks is not None and isinstance(value, chunks.LocalShard) else None
