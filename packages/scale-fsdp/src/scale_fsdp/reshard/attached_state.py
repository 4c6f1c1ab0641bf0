"""Attached state: tensors with an element for each element of a parameter (gradients, optimizer state, averages).

They are resharded as the parameters are, one kind of one flat buffer at a time. A number for a
parameter, for example its step count, stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.flat.buffer import FlatBuffer
from scale_core.optim.traits import is_per_param_number
from scale_core.state.optim_state_dict import owners_of
from scale_core.state.param_groups import as_json, fill_groups
from scale_fsdp.ema import ShardedEMA
from scale_fsdp.offload.optimizer import OffloadOptimizer

_NOT_OPTIONS = frozenset({"params", "param_names"})


@dataclass(frozen=True)
class StateTensors:
    """One kind of attached tensors of one flat buffer's parameters."""

    owner: str | int  # "grad", "ema", or the number of an optimizer
    key: str  # of the optimizer's state
    dtype: torch.dtype
    indices: tuple[int, ...]  # of the parameters that have one


@dataclass(frozen=True)
class StateKeys:
    """The keys of an optimizer's state of one parameter, and the values of those that are numbers."""

    keys: tuple[str, ...]  # in the optimizer's order
    values: Mapping[str, tuple[Any, torch.dtype | None]]  # with the dtype of those that are tensors


@dataclass(frozen=True)
class AttachedStateSpec:
    """All attached state of a model, without its tensors: ranks compare it, and ranks that join load it."""

    tensors: list[list[StateTensors]] = field(default_factory=list)  # by flat buffer
    keys: dict[tuple[int, int, int], StateKeys] = field(default_factory=dict)  # by flat buffer, optimizer, parameter
    groups: list[list[dict[str, Any]]] = field(default_factory=list)  # options, by optimizer
    names: list[list[list[str]]] = field(default_factory=list)  # of parameters, by optimizer and group
    has_ema: bool = False
    num_updates: int = 0  # of the average
    buffer_averages: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)


class AttachedState:
    """Gradients, optimizer states and averages of one model's parameters."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], ema: ShardedEMA | None) -> None:
        self._model, self._optimizers, self._ema = model, list(optimizers), ema

    def spec(self, buffers: Sequence[FlatBuffer]) -> AttachedStateSpec:
        """Describes this rank's state; raises ValueError where it can't be resharded."""
        if self._ema is not None and self._ema.is_swapped:
            raise ValueError("the model has its averages right now: call this outside of ShardedEMA.swapped()")
        attached = AttachedStateSpec()
        if self._ema is not None:
            averages = [(name, tuple(t.shape), t.dtype) for name, t in self._ema.buffer_averages.items()]
            attached = AttachedStateSpec(has_ema=True, num_updates=self._ema.num_updates, buffer_averages=averages)
        for optimizer in self._optimizers:
            if isinstance(optimizer, OffloadOptimizer):
                raise ValueError(
                    "OffloadOptimizer has divided its state by the present shards: take it by "
                    "full_optim_state_dict(...), build the optimizer again afterwards, and load it"
                )
            owners = owners_of(self._model, optimizer)
            groups = optimizer.param_groups
            attached.names.append([[h.name for p in group["params"] for h in owners[p]] for group in groups])
            attached.groups.append(
                [{k: as_json(f"option {k}", v) for k, v in group.items() if k not in _NOT_OPTIONS} for group in groups]
            )
        for number, buffer in enumerate(buffers):
            members: dict[tuple[str | int, str, torch.dtype], list[int]] = {}
            for index, param in enumerate(buffer.sharded_params):
                for owner, key, tensor in self._tensors_of(buffer, index, param):
                    members.setdefault((owner, key, tensor.dtype), []).append(index)
                for optimizer_index, optimizer in enumerate(self._optimizers):
                    if param in optimizer.state:
                        attached.keys[number, optimizer_index, index] = _state_keys(
                            buffer, index, optimizer.state[param]
                        )
            attached.tensors.append([StateTensors(*kind, tuple(indices)) for kind, indices in members.items()])
        return attached

    def tensors_of(self, buffer: FlatBuffer, kind: StateTensors) -> dict[int, Tensor]:
        """The tensors of one kind by the index of their parameter."""
        return {
            index: tensor
            for index in kind.indices
            for owner, key, tensor in self._tensors_of(buffer, index, buffer.sharded_params[index])
            if (owner, key) == (kind.owner, kind.key)
        }

    def set_tensors(self, buffer: FlatBuffer, kind: StateTensors, shard: Tensor) -> None:
        """Replaces the tensors of one kind by copies out of `shard` [S], in the buffer's present layout."""
        for index in kind.indices:
            span = buffer.spans[index]
            view = shard if buffer.flatten else shard.narrow(0, span.shard_offset, span.numel).view(span.shape)
            param = buffer.sharded_params[index]
            if kind.owner == "ema":
                assert self._ema is not None
                self._ema.averages[param] = view.to(device=self._ema.device, copy=True)
            elif kind.owner == "grad":
                param.grad = view.clone()
            else:
                self._optimizers[int(kind.owner)].state[param][kind.key] = view.clone()

    def rebind_params(self, old: Sequence[nn.Parameter], buffer: FlatBuffer) -> None:
        """Attaches the state to the buffer's present parameters, where they are new objects; on meta, drops it."""
        for before, now in zip(old, buffer.sharded_params, strict=True):
            if self._ema is not None:
                self._ema.replace_param(before, now)
                if buffer.is_meta:
                    self._ema.averages[now] = torch.empty_like(now, requires_grad=False)
            for optimizer in self._optimizers:
                if now is not before:
                    for group in optimizer.param_groups:
                        group["params"] = [now if param is before else param for param in group["params"]]
                    if before in optimizer.state:
                        optimizer.state[now] = optimizer.state.pop(before)
                if buffer.is_meta:
                    optimizer.state.pop(now, None)

    def load_spec(self, buffers: Sequence[FlatBuffer], spec: AttachedStateSpec) -> None:
        """On a rank that has joined, sets the numbers and options that the others have."""
        if self._ema is not None:
            self._ema.num_updates = spec.num_updates
        for optimizer, groups in zip(self._optimizers, spec.groups, strict=True):
            fill_groups(optimizer, groups)
        for (number, optimizer_index, index), state_keys in spec.keys.items():
            optimizer, param = self._optimizers[optimizer_index], buffers[number].sharded_params[index]
            group = next(group for group in optimizer.param_groups if any(param is p for p in group["params"]))
            # torch keeps counts on the host, but for kernels that read them on the device.
            on_device = bool(group.get("capturable") or group.get("fused"))
            state = optimizer.state[param]
            for key, (value, dtype) in state_keys.values.items():
                device = param.device if on_device or key != "step" else torch.device("cpu")
                state[key] = value if dtype is None else torch.tensor(value, dtype=dtype, device=device)
            optimizer.state[param] = {key: state[key] for key in state_keys.keys}

    def _tensors_of(
        self, buffer: FlatBuffer, index: int, param: nn.Parameter
    ) -> Iterator[tuple[str | int, str, Tensor]]:
        """Yields each tensor attached to a parameter, with its owner and key."""
        if param.grad is not None:
            yield "grad", "", param.grad
        if self._ema is not None:
            yield "ema", "", self._ema.averages[param]
        for optimizer_index, optimizer in enumerate(self._optimizers):
            for key, value in optimizer.state.get(param, {}).items():
                if _is_elementwise(buffer, index, key, value):
                    yield optimizer_index, key, value


def _state_keys(buffer: FlatBuffer, index: int, state: Mapping[str, Any]) -> StateKeys:
    values: dict[str, tuple[Any, torch.dtype | None]] = {}
    for key, value in state.items():
        if not _is_elementwise(buffer, index, key, value):
            values[key] = as_json(key, value), value.dtype if isinstance(value, Tensor) else None
    return StateKeys(tuple(state), values)


def _is_elementwise(buffer: FlatBuffer, index: int, key: str, value: Any) -> bool:
    """Whether an optimizer's state is a tensor of the parameter's shape, and not a number."""
    param = buffer.sharded_params[index]
    shape = tuple(param.shape) if buffer.flatten else buffer.layout.entries[index].shape
    if not isinstance(value, Tensor) or is_per_param_number(key, value.shape, shape):
        return False
    if value.shape != param.shape:
        raise ValueError(
            f"the optimizer state '{key}' of '{buffer.names[index]}' has shape {tuple(value.shape)}, expected its "
            f"shard's {tuple(param.shape)}, so it can't be resharded: build the optimizer again after resharding"
        )
    return True
