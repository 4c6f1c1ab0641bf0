"""Modules that compute with parts of parameters: the parts that outlive any change of a module, in one place.

A tensor parallel layer has some rows or columns of a weight, experts are divided between ranks. Such a module says of
each parameter how it is divided (`Sharding`). From that follow what `shard_of` says of it, also after `deepcopy`, `to`
or unpickling, and that state dicts hold full tensors under the plain model's names and take them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.dtensor import full_value
from scale_core.errors import ScaleDistributedError
from scale_core.optim.step_hooks import watch_optimizers
from scale_core.shard import Shard, on_local_tensors, shard_of, unit_shard_of, wait_for
from scale_core.sharded_tensor.full_tensor import gather_full_param
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.state.gathered_tensor import Gather, GatheredTensor, plain_tensor, version_of
from scale_core.state.torch_state_dict import StateDictRequest, saved_by_torch, torch_request


class Sharding(Protocol):
    """How a parameter is divided between the ranks of a group."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full parameter."""

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different elements; otherwise each has all of them."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""

    def local_part(self, full: Tensor, rank: int) -> Tensor:
        """A rank's shard of the full parameter."""

    def shard_spec(self, group: Group, name: str = "") -> Shard:
        """The description of a rank's shard for norms, optimizers and checkpoints."""


def full_tensor(sharding: Sharding, part: Tensor, group: Group, name: str) -> Tensor:
    """Returns the full parameter, in memory of its own; all ranks of the group call it together."""
    if not sharding.is_divided or group.size == 1:
        return part.detach().clone()
    if part.is_meta:
        return torch.empty(sharding.shape, dtype=part.dtype, device="meta")
    return gather_full_param(part, sharding.shard_spec(group, name), group)


class ShardedModule(nn.Module):
    """A module whose parameters are divided between the ranks of a group; `shardings` says how, by name."""

    group: Group
    shardings: Mapping[str, Sharding]

    def __init_subclass__(cls, **options: Any) -> None:
        """A forward computes with this rank's elements; the module's own class is not told of the mixed class."""
        if "forward" in vars(cls):
            cls.forward = on_local_tensors(cls.forward)

    _saves_whole = True  # False: `state_dict()` has this rank's shard, as FairScale's layers have it.

    @on_local_tensors
    def full_parameter(self, name: str) -> Tensor:
        """Returns a full parameter without gradients, on all ranks; all of them call it together."""
        param = self.get_parameter(name)
        wait_for(param)
        return full_tensor(self.shardings[name], param, self.group, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of any module; a parameter in the place of another one is a part of the same full one."""
        super().register_parameter(name, param)
        self._set_shard_spec(name)

    @on_local_tensors
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in self.shardings:
            self._set_shard_spec(name)

    @on_local_tensors
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        wait_for(*self.parameters(recurse))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in self.shardings:
            self._set_shard_spec(name)
        return self

    @on_local_tensors
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Takes this rank's shard out of full tensors, and out of the results of torch's checkpoint functions."""
        wait_for(*self.parameters(recurse=False))
        refused = []
        for name, sharding in self.shardings.items():
            value = state_dict.get(prefix + name)
            value = full_value(plain_tensor(value)) if isinstance(value, Tensor) else value
            local = sharding.local_shape(self.group.rank)
            saved_tensor = _local_tensor(value) if isinstance(value, Tensor) else None
            if saved_tensor is not None:
                state_dict[prefix + name] = saved_tensor.view(local)
            elif isinstance(value, Tensor) and tuple(value.shape) == sharding.shape != local:
                part = sharding.local_part(value, self.group.rank)
                if local_metadata.get("assign_to_params_buffers"):  # Or the part would keep the full one in memory.
                    part = part.detach().clone(memory_format=torch.contiguous_format)
                state_dict[prefix + name] = part
            elif isinstance(value, Tensor) and tuple(value.shape) != local:
                refused.append(
                    f"{prefix}{name}: expected the full tensor {sharding.shape}, or the shard {local} that rank "
                    f"{self.group.rank} of {self.group.size} has, got {tuple(value.shape)}"
                )
        *_, messages = args
        before = len(messages)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self.group.size > 1 and len(messages) > before:  # torch speaks of this rank's shard alone.
            messages.extend(refused)

    @on_local_tensors
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Gives full tensors under the plain model's names, for which all ranks call `state_dict()` together.

        With `keep_vars` it is this rank's shards; torch's checkpoint functions get parts that say where they belong.
        """
        wait_for(*self.parameters(recurse=False))
        is_filled_again = any(prefix + name in destination for name in self.shardings)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.group.size == 1 or keep_vars:
            return
        request = torch_request() or (StateDictRequest() if saved_by_torch() else None)
        if request is None and not self._saves_whole:
            return
        # The other names of a tied parameter get the same tensor, unless it was given to an earlier call of
        # `state_dict(destination=...)`.
        gathered = _GatheredParams() if is_filled_again else _gathered_params_in(destination)
        for name, sharding in self.shardings.items():
            param = self._parameters.get(name)
            if param is None or not sharding.is_divided or unit_shard_of(param) is not None:
                continue
            if request is not None and not request.whole:
                from scale_core.state.local_shard import LocalShard  # Loads torch's checkpoint package.

                part, shard = param.detach().contiguous(), sharding.shard_spec(self.group)
                destination[prefix + name] = LocalShard(part, shard.shape, shard.start, shard.stop, shard.ranges)
            else:
                full = gathered.get(id(param))
                if full is None or not full.source.gather.is_of(param):
                    gather = _ParamGather(param, sharding, self.group.rank, gathered, is_copy=request is not None)
                    values = self._gather_full(sharding, param, prefix + name)
                    full = gathered[id(param)] = GatheredTensor.of(values, gather, 0, prefix + name)
                destination[prefix + name] = full

    def _gather_full(self, sharding: Sharding, param: Tensor, name: str) -> Tensor:
        """A full parameter; an error names the call for all ranks."""
        try:
            return full_tensor(sharding, param, self.group, name)
        except ScaleDistributedError as error:
            raise ScaleDistributedError(
                f"state_dict: '{name}' is divided between the ranks {list(self.group.ranks)}, and not all of them have "
                "come to give their shards: call model.state_dict() on all ranks, also where one writes it; or, "
                f"for what this rank has, model.state_dict(keep_vars=True)\n{error}"
            ) from error

    @on_local_tensors
    def _set_shard_spec(self, name: str) -> None:
        """Marks a parameter as a part, unless another package has said more of it."""
        sharding, param = self.shardings.get(name), self._parameters.get(name)
        if sharding is None or param is None or self.group.size == 1 or shard_of(param) is not None:
            return
        if tuple(param.shape) == sharding.local_shape(self.group.rank):
            set_shard(param, sharding.shard_spec(self.group))
            # Optimizers that need full tensors are refused, and the state of others knows its full tensor.
            watch_optimizers()


class _ParamGather(Gather[nn.Parameter]):
    """The gather of a divided parameter, whose tensor writes to this rank's shard, unless it is a copy."""

    def __init__(
        self, param: nn.Parameter, sharding: Sharding, rank: int, gathered: _GatheredParams, *, is_copy: bool
    ) -> None:
        super().__init__(param)
        self._sharding, self._rank, self._is_copy = sharding, rank, is_copy
        self.gathered = gathered

    def write(self, number: int, full: Tensor, name: str, *, was_current: bool) -> None:
        if not self._is_copy:
            super().write(number, full, name, was_current=was_current)

    def version(self, owner: nn.Parameter) -> int:
        return version_of(owner)

    def local_part(self, owner: nn.Parameter, number: int, full: Tensor) -> tuple[Tensor, Tensor]:
        return self._sharding.local_part(full, self._rank), owner

    def load(self, owner: nn.Parameter, number: int, full: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # The parameter is this rank's elements alone.
            super().load(owner, number, full)


class _GatheredParams(WeakValueDictionary[int, GatheredTensor]):
    """The full tensors of one state dict, by the identity of their parameters."""


def _gathered_params_in(destination: Mapping[str, Any]) -> _GatheredParams:
    for value in reversed(list(destination.values())):
        if isinstance(value, GatheredTensor) and isinstance(value.source.gather, _ParamGather):
            return value.source.gather.gathered
    return _GatheredParams()


def _local_tensor(value: Tensor) -> Tensor | None:
    """This rank's shard, where a tensor is torch's placeholder of a full one; else None."""
    local_shard = sys.modules.get("scale_core.state.local_shard")  # Without it nothing can have made such a tensor.
    return value.tensor if local_shard is not None and isinstance(value, local_shard.LocalShard) else None


def mixed_class(mixin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Returns a class that is both a mixin and a module's own class; one for each pair, under the own class's name.

    Its `original_class` is the own one. Where the mixin has a `mixed_attributes(own)`, its result is the class's, too.
    """
    for subclass in mixin.__subclasses__():
        if vars(subclass).get("original_class") is own:
            return subclass
    members: dict[str, Any] = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    attributes = getattr(mixin, "mixed_attributes", None)
    members |= {} if attributes is None else attributes(own)
    members |= {"original_class": own, "__reduce_ex__": _reduce}
    return type(own.__name__, (mixin, own), members)


def _reduce(self: Any, protocol: Any) -> Any:
    """A class that is made while a program runs is made again where it is unpickled."""
    mixin = type(self).__mro__[1]
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _new_instance, (mixin, type(self).original_class), state


def _new_instance(mixin: type[nn.Module], own: type[nn.Module]) -> nn.Module:
    new_class = mixed_class(mixin, own)
    return cast(nn.Module, cast(Callable[[type], object], new_class.__new__)(new_class))
