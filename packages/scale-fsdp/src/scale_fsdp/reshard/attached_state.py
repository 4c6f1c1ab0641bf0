"""What is kept beside a model's parameters, element for element: gradients, an optimizer's state, an average.

Where the parameters are cut anew, all of it must be, in the same way. Here it is taken apart into layers: tensors of
one kind, each of the shape of one parameter of a flat buffer. What is a number for a whole parameter, such as the count
of its steps, stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.flat.buffer import FlatBuffer
from scale_core.state.optim_state_dict import owners_of
from scale_core.state.param_groups import as_json, fill_groups
from scale_core.state.param_ownership import is_number
from scale_fsdp.ema import ShardedEMA
from scale_fsdp.offload.optimizer import OffloadOptimizer

_NOT_OPTIONS = frozenset({"params", "param_names"})


@dataclass(frozen=True)
class Layer:
    """Tensors of one kind beside the parameters of one flat buffer.

    Attributes:
        keeper: Who keeps them: "grad", "ema", or the number of an optimizer.
        key: How an optimizer calls them.
        dtype: Of all of them.
        numbers: Which of the buffer's exposed parameters have one.
    """

    keeper: str | int
    key: str
    dtype: torch.dtype
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """The state that an optimizer has of one parameter.

    Attributes:
        keys: In the optimizer's order.
        values: Of those that are numbers: their value, and the dtype where it is a tensor.
    """

    keys: tuple[str, ...]
    values: Mapping[str, tuple[Any, torch.dtype | None]]


@dataclass(frozen=True)
class Inventory:
    """All that is kept beside the parameters of a model, in words.

    Attributes:
        layers: Of each flat buffer.
        orders: By the number of the flat buffer, of the optimizer, and of the parameter.
        groups: Of each optimizer, its parameter groups: their options.
        names: Of each optimizer, its parameter groups: the names of their parameters.
        num_updates: Of the average; -1 if there is none.
        averages: Of the average, what stands for the model's buffers: names, shapes and dtypes.
    """

    layers: list[list[Layer]] = field(default_factory=list)
    orders: dict[tuple[int, int, int], Order] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    names: list[list[list[str]]] = field(default_factory=list)
    num_updates: int = -1
    averages: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)


class Beside:
    """What is kept beside the parameters of one model.

    Args:
        model: The model.
        optimizers: Those that step on its parameters.
        ema: Its average.

    Raises:
        ValueError: An optimizer's state can't be told by element.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], ema: ShardedEMA | None) -> None:
        self._model, self._optimizers, self._ema = model, list(optimizers), ema

    def inventory(self, buffers: Sequence[FlatBuffer]) -> Inventory:
        """Returns in words what there is on this rank.

        Raises:
            ValueError: An optimizer has parameters that are none of the model's, or state that is neither element for
                element nor a number; or the average is in the model right now.
        """
        if self._ema is not None and self._ema.is_swapped:
            raise ValueError("the model has its averages right now: call this outside of ShardedEMA.swapped()")
        found = Inventory()
        if self._ema is not None:
            averages = [(name, tuple(t.shape), t.dtype) for name, t in self._ema.buffer_averages.items()]
            found = Inventory(num_updates=self._ema.num_updates, averages=averages)
        for optimizer in self._optimizers:
            if isinstance(optimizer, OffloadOptimizer):
                raise ValueError(
                    "OffloadOptimizer has divided its state by the present shards: take it by "
                    "full_optim_state_dict(...), build the optimizer anew afterwards, and load it"
                )
            owners = owners_of(self._model, optimizer)
            groups = optimizer.param_groups
            found.names.append([[h.name for p in group["params"] for h in owners[p]] for group in groups])
            found.groups.append(
                [{k: as_json(f"option {k}", v) for k, v in group.items() if k not in _NOT_OPTIONS} for group in groups]
            )
        for number, buffer in enumerate(buffers):
            members: dict[tuple[str | int, str, torch.dtype], list[int]] = {}
            for index, param in enumerate(buffer.exposed):
                for keeper, key, tensor in self._tensors_of(buffer, index, param):
                    members.setdefault((keeper, key, tensor.dtype), []).append(index)
                for which, optimizer in enumerate(self._optimizers):
                    if param in optimizer.state:
                        found.orders[number, which, index] = _order(buffer, index, optimizer.state[param])
            found.layers.append([Layer(*kind, tuple(indices)) for kind, indices in members.items()])
        return found

    def take(self, buffer: FlatBuffer, layer: Layer) -> dict[int, Tensor]:
        """Returns the tensors of a layer by the number of their parameter."""
        return {index: self._get(buffer.exposed[index], layer) for index in layer.numbers}

    def put(self, buffer: FlatBuffer, layer: Layer, shard: Tensor) -> None:
        """Gives the keeper of a layer new tensors, cut as the buffer is now: copies out of `shard` [S]."""
        for index in layer.numbers:
            span = buffer.spans[index]
            view = shard if buffer.flatten else shard.narrow(0, span.shard_offset, span.numel).view(span.shape)
            param = buffer.exposed[index]
            if layer.keeper == "ema":
                assert self._ema is not None
                self._ema.replace_average(param, view.clone())
            elif layer.keeper == "grad":
                param.grad = view.clone()
            else:
                self._optimizers[int(layer.keeper)].state[param][layer.key] = view.clone()

    def follow(self, old: Sequence[nn.Parameter], buffer: FlatBuffer) -> None:
        """Goes over to the buffer's present parameters, where they are other objects; on meta, drops their state."""
        for before, now in zip(old, buffer.exposed, strict=True):
            if self._ema is not None:
                self._ema.replace_param(before, now)
                if buffer.is_meta:
                    self._ema.replace_average(now, torch.empty_like(now, requires_grad=False))
            for optimizer in self._optimizers:
                if now is not before:
                    for group in optimizer.param_groups:
                        group["params"] = [now if param is before else param for param in group["params"]]
                    if before in optimizer.state:
                        optimizer.state[now] = optimizer.state.pop(before)
                if buffer.is_meta:
                    optimizer.state.pop(now, None)

    def of_module_buffers(self) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
        """Yields what an average has for each of the model's buffers, and what takes another tensor for it."""
        ema = self._ema
        for name, average in ema.buffer_averages.items() if ema is not None else ():
            assert ema is not None
            yield average, functools.partial(ema.replace_buffer_average, name)

    def begin(self, buffers: Sequence[FlatBuffer], theirs: Inventory) -> None:
        """On a rank that has joined: takes over the numbers and options of those that were there before."""
        if self._ema is not None:
            self._ema.num_updates = theirs.num_updates
        for optimizer, groups in zip(self._optimizers, theirs.groups, strict=True):
            fill_groups(optimizer, groups)
        for (number, which, index), order in theirs.orders.items():
            optimizer, param = self._optimizers[which], buffers[number].exposed[index]
            group = next(group for group in optimizer.param_groups if any(param is p for p in group["params"]))
            # torch keeps counts on the host, unless it is to look at them on the device.
            on_device = bool(group.get("capturable") or group.get("fused"))
            state = optimizer.state[param]
            for key, (value, dtype) in order.values.items():
                device = param.device if on_device or key != "step" else torch.device("cpu")
                state[key] = value if dtype is None else torch.tensor(value, dtype=dtype, device=device)
            optimizer.state[param] = {key: state[key] for key in order.keys}

    def _tensors_of(
        self, buffer: FlatBuffer, index: int, param: nn.Parameter
    ) -> Iterator[tuple[str | int, str, Tensor]]:
        """Yields each tensor that is kept beside a parameter, with its keeper and its key."""
        if param.grad is not None:
            yield "grad", "", param.grad
        if self._ema is not None:
            yield "ema", "", self._ema.average_of(param)
        for which, optimizer in enumerate(self._optimizers):
            for key, value in optimizer.state.get(param, {}).items():
                if _is_layer(buffer, index, key, value):
                    yield which, key, value

    def _get(self, param: nn.Parameter, layer: Layer) -> Tensor:
        if layer.keeper == "grad":
            assert param.grad is not None
            return param.grad
        if layer.keeper == "ema":
            assert self._ema is not None
            return self._ema.average_of(param)
        found: Tensor = self._optimizers[int(layer.keeper)].state[param][layer.key]
        return found


def _order(buffer: FlatBuffer, index: int, state: Mapping[str, Any]) -> Order:
    values: dict[str, tuple[Any, torch.dtype | None]] = {}
    for key, value in state.items():
        if not _is_layer(buffer, index, key, value):
            values[key] = as_json(key, value), value.dtype if isinstance(value, Tensor) else None
    return Order(tuple(state), values)


def _is_layer(buffer: FlatBuffer, index: int, key: str, value: Any) -> bool:
    """Whether an optimizer's state is one of tensors of the parameter's shape, and not a number.

    Raises:
        ValueError: It is neither.
    """
    param = buffer.exposed[index]
    shape = tuple(param.shape) if buffer.flatten else buffer.layout.entries[index].shape
    if not isinstance(value, Tensor) or is_number(key, value.shape, shape):
        return False
    if value.shape != param.shape:
        raise ValueError(
            f"the optimizer keeps a {key} of shape {tuple(value.shape)} for its part {tuple(param.shape)} of "
            f"'{buffer.names[index]}', not element for element, and so it can't be cut anew"
        )
    return True
