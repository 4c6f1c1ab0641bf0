"""What the layers of this package have in common: parameters of which each rank has a part.

A layer says of each parameter what the whole one is, and along which dimension it is divided. From that follow what
memory it gets, what values, what `scale_core.shard_of` says of it, and that a state dict with whole tensors may be
loaded into it.
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
from scale_core.consistency.contract import ScaleDistributedError
from scale_core.optim.step_checks import watch_optimizers
from scale_core.shard import Axis, Held, Shard, mark, shard_of, unit_shard_of
from scale_core.state.torch_state_dict import Asked, asked_by_torch, saved_by_torch, view_all
from scale_tp.split import Split, check_size
from scale_tp.weight_init import Initialiser, WholeView, initialise_part


class Placement(NamedTuple):
    """How a parameter stands on the ranks.

    Attributes:
        shape: Of the whole parameter.
        dim: The dimension that is divided.
        split: How it is divided; None where each rank has all of it.
    """

    shape: tuple[int, ...]
    dim: int = 0
    split: Split | None = None

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        if self.split is None:
            return self.shape
        return (*self.shape[: self.dim], self.split.sizes[rank], *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole parameter."""
        return whole if self.split is None else self.split.take(whole, rank, self.dim)

    def whole(self, part: Tensor, group: Group, name: str) -> Tensor:
        """The whole parameter, of all ranks' parts, with memory of its own; all ranks of the group call it together.

        Raises:
            ScaleDistributedError: A rank did something else.
        """
        if self.split is None or group.size == 1:
            return part.detach().clone()
        if part.is_meta:
            return torch.empty(self.shape, dtype=part.dtype, device="meta")
        from scale_core.state.full_tensor import (
            whole_of_part,  # Loads torch's checkpoint package, which takes a second.
        )

        return whole_of_part(part, self.shard(group, name), group)

    def shard(self, group: Group, name: str = "") -> Shard:
        """What scale-core's norms, optimizers and checkpoints are told of a rank's part."""
        if self.split is None:
            numel = torch.Size(self.shape).numel()
            axes = (Axis(group, Held.REPLICATE),)
            return Shard(name, self.shape, 0, numel, axes, gathered=False, first_copy=group.rank == 0)
        ranges = tuple(
            self.split.ranges[group.rank] if dim == self.dim else ((0, size),) for dim, size in enumerate(self.shape)
        )
        axes = (Axis(group, Held.SHARD),)
        return Shard.of_ranges(name, self.shape, ranges, axes, counted=self.split.counts(group.rank))


class ParallelModule(nn.Module):
    """A module whose parameters are divided between ranks.

    Args:
        group: The ranks.

    Attributes:
        group: The ranks.
        placements: How each parameter stands on them, by its name.
    """

    group: Group
    placements: dict[str, Placement]

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.placements = group, {}

    def place(
        self, name: str, placement: Placement, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Gives the layer a parameter, without values: this rank's part.

        Raises:
            ValueError: The dtype is one that parameters can't have.
        """
        if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"{type(self).__name__}: expected dtype to be of floating point, in which {name} can be trained, got "
                f"{dtype}: pass one such as torch.bfloat16, or leave it out"
            )
        self.placements[name] = placement
        shape = placement.local_shape(self.group.rank)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def initialise(self, name: str, init_method: Initialiser, *, keep_whole: bool = False) -> Tensor | None:
        """Gives a parameter the values that it has in the layer that is not divided; see `initialise_part`."""
        if not callable(init_method):
            raise TypeError(
                "expected init_method to be a function that fills a tensor in place, such as "
                f"torch.nn.init.xavier_normal_, got {init_method!r}"
            )
        placement, param = self.placements[name], self.get_parameter(name)
        if isinstance(param, WholeView):  # It stands for the whole already.
            init_method(param)
            return None
        split = placement.split or Split.even(placement.shape[placement.dim], 1)
        rank = self.group.rank if placement.split is not None else 0
        return initialise_part(param, placement.shape, placement.dim, split, rank, init_method, keep_whole=keep_whole)

    def whole_parameter(self, name: str) -> Tensor:
        """Returns a parameter as a whole, on all ranks; all of them call it together. The result is not connected."""
        return self.placements[name].whole(self.get_parameter(name), self.group, name)

    # What is known of a parameter must outlive all that can be done to a module.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As any module's; a parameter that is put in the place of another one is a part of the same whole."""
        super().register_parameter(name, param)
        self._mark(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in self.placements:
            self._mark(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in self.placements:
            self._mark(name)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Takes this rank's part out of whole tensors, and out of what torch's checkpoint functions have read."""
        refused = []
        for name, placement in self.placements.items():
            value = state_dict.get(prefix + name)
            local = placement.local_shape(self.group.rank)
            held = _held_here(value) if isinstance(value, Tensor) else None
            if held is not None:
                state_dict[prefix + name] = held.view(local)
            elif isinstance(value, Tensor) and tuple(value.shape) == placement.shape != local:
                part = placement.take(value, self.group.rank)
                if local_metadata.get("assign_to_params_buffers"):  # Or the part would keep the whole in memory.
                    part = part.detach().clone(memory_format=torch.contiguous_format)
                state_dict[prefix + name] = part
            elif isinstance(value, Tensor) and tuple(value.shape) != local:
                refused.append(
                    f"{prefix}{name}: expected the whole tensor {placement.shape}, or the part {local} that rank "
                    f"{self.group.rank} of {self.group.size} has, got {tuple(value.shape)}"
                )
        *_, messages = args
        before = len(messages)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self.group.size > 1 and len(messages) > before:  # torch speaks of this rank's part alone.
            messages.extend(refused)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Gives whole tensors, as the plain model has them, for which all ranks call `state_dict()` together.

        With `keep_vars` it is this rank's own parts; and torch's checkpoint functions are told which part each one is.

        Raises:
            ScaleDistributedError: A rank did not take part.
        """
        is_filled_again = any(prefix + name in destination for name in self.placements)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.group.size == 1 or keep_vars:
            return
        if is_filled_again:  # What was given to an earlier call, `state_dict(destination=...)`.
            _wholes.forget()
        asked = asked_by_torch() or (Asked() if saved_by_torch() else None)
        for name, placement in self.placements.items():
            param = self._parameters.get(name)
            if param is None or placement.split is None or unit_shard_of(param) is not None:
                continue
            if asked is not None and not asked.whole:
                from scale_core.state.chunks import LocalShard  # Loads torch's checkpoint package, which has asked.

                part, shard = param.detach().contiguous(), placement.shard(self.group)
                destination[prefix + name] = LocalShard(part, shard.shape, shard.start, shard.stop, shard.ranges)
            else:
                made = partial(self._made_whole, placement, param, prefix + name)
                destination[prefix + name] = _wholes.of(destination, param, made)

    def _made_whole(self, placement: Placement, param: Tensor, name: str) -> Tensor:
        """A parameter as a whole; an error says what all ranks were to do."""
        try:
            return placement.whole(param, self.group, name)
        except ScaleDistributedError as error:
            raise ScaleDistributedError(
                f"state_dict: '{name}' is divided between the ranks {list(self.group.ranks)}, and not all of them have "
                "come to give their part: call model.state_dict() on all ranks, also where one of them writes it; or, "
                f"for what this rank has, model.state_dict(keep_vars=True)\n{error}"
            ) from error

    def _mark(self, name: str) -> None:
        """Records what a parameter is a part of, if it is one and nobody has said more of it."""
        placement, param = self.placements.get(name), self._parameters.get(name)
        if placement is None or param is None or self.group.size == 1 or shard_of(param) is not None:
            return
        if tuple(param.shape) == placement.local_shape(self.group.rank):
            mark(param, placement.shard(self.group))
            # Optimizers that need whole tensors are refused, and those that don't say what their state is a part of.
            watch_optimizers()
            view_all()


class _Wholes:
    """The whole tensors of the `state_dict()` that runs, so that of a tied parameter there is one."""

    def __init__(self) -> None:
        self._destination: weakref.ref[Any] | None = None
        self._found: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()

    def of(self, destination: Any, param: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """The whole of a parameter for this state, with the values that it has now."""
        if self._destination is None or self._destination() is not destination:
            self.forget()
            self._destination = _reference(destination)
        key = id(param), 0 if param.is_inference() else param._version
        whole = self._found.get(key)
        if whole is None:
            whole = self._found[key] = gather()
        return whole

    def forget(self) -> None:
        """Another call begins."""
        self._destination, self._found = None, WeakValueDictionary()


_wholes = _Wholes()


def _reference(destination: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(destination)
    except TypeError:  # A plain dict, which was given: a tied parameter is gathered twice.
        return None


def checked_split(what: str, total: int, group: Group, stride: int, split: Split | None) -> Split:
    """Returns how the features of a layer are divided: as it was given, or by its stride.

    Raises:
        TypeError: The stride is no integer, or the split is none.
        ValueError: Both were given, or what was given is of another number of features or ranks.
    """
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
    if not split.copies_are_whole:
        raise ValueError(
            f"expected ranks that share some of {what} to have all of theirs in common, got {split}: the gradients of "
            "what is a copy in part alone would not be summed"
        )
    return split


def ranks_described(group: Group) -> str:
    """What a printed layer says of its ranks."""
    return f", rank={group.rank} of {group.size}" if group.size > 1 else ""


def _held_here(value: Tensor) -> Tensor | None:
    """What this rank holds of a tensor that only says it is whole; None if it is."""
    boxes = sys.modules.get("scale_core.state.chunks")  # Without it nobody can have made such a thing.
    return value.tensor if boxes is not None and isinstance(value, boxes.LocalShard) else None
