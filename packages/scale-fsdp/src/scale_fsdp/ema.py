"""Exponential moving average (EMA) of a model's weights; each rank averages its own shards, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.shard import on_local_tensors, wait_for
from scale_core.state.optim_state_dict import local_chunk, part_of
from scale_core.state.param_ownership import named_param_slices
from scale_core.state.validation import StateMismatch
from scale_fsdp.runtime.checks import check_not_in_use, check_not_replaced
from scale_fsdp.runtime.unit import units_in

_PREFIX = "ema."
_UPDATES = f"{_PREFIX}num_updates"


class ShardedEMA:
    """An exponential moving average of a model's parameters: average = decay * average + (1 - decay) * parameter.

        >>> import torch
        >>> from scale_fsdp import ShardedEMA, fully_shard
        >>> model = fully_shard(torch.nn.Linear(2, 1, bias=False))
        >>> ema = ShardedEMA(model, decay=0.5)
        >>> for value in (0.0, 1.0):
        ...     with torch.no_grad():
        ...         _ = model.weight.fill_(value)
        ...     ema.update()
        >>> with ema.swapped():
        ...     model.state_dict()["weight"]
        tensor([[0.5000, 0.5000]])

    It equals torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first update takes the parameters as they
    are. A model that is not sharded, or only in part, is averaged as well.

    Args:
        model: The model, sharded already.
        decay: In [0, 1]: how much of the average stays at each update. The attribute may be changed.
        average_buffers: Also average the buffers. Otherwise their values at the last update are kept with the average,
            as the statistics of batch norms should be.
        dtype: Of the averages of floating-point tensors; None is the dtype of each tensor. Averages of half-precision
            parameters need a wider one: (1 - decay) of a step is less than their last digit.
        device: Of the averages; None is the device of the shards.

    Attributes:
        num_updates: Number of updates so far.

    Raises:
        ValueError: `decay` is below 0 or above 1.

    See also: [the guide to moving averages](../guides/tools.md).
    """

    @checked_arguments
    @on_local_tensors
    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        average_buffers: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"ShardedEMA: expected a decay from 0 to 1, got {decay}")
        self.model, self.decay, self.average_buffers = model, decay, average_buffers
        self.num_updates = 0
        self.device = device
        self._swapped_out: list[Tensor | None] | None = None

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, dtype if tensor.is_floating_point() else None, copy=True)

        self.averages: dict[Tensor, Tensor] = {param: copy(param) for param in model.parameters()}
        self.buffer_averages = {name: copy(buffer) for name, buffer in model.named_buffers()}

    @torch.no_grad()
    @on_local_tensors
    def update(self) -> None:
        """Averages the model's present parameters in; call it after each optimizer step.

        Raises:
            RuntimeError: Inside `swapped()`; or the model has other parameters than those that are averaged.
        """
        if self._swapped_out is not None:
            raise RuntimeError(
                "ShardedEMA.update() inside swapped(), where the model has the averages: call it outside"
            )
        self._check_same()
        params, buffers = list(self.averages.items()), self._buffer_pairs()
        averaged, copied = (params + buffers, []) if self.average_buffers else (params, buffers)
        if self.num_updates == 0:
            averaged, copied = [], averaged + copied
        _average(averaged, self.decay)
        _copy(copied)
        self.num_updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model has the averages in place of its parameters and buffers: for evaluation, or to save it.

        Shards and averages are exchanged in place, which takes no more memory. If the averages have a different dtype
        or device, a copy of the shards is kept. All ranks enter together if they run the model inside.

        Raises:
            RuntimeError: The parameters are in use, this is inside a `swapped()`, or they were changed inside.
        """
        check_not_in_use(units_in(self.model), "ShardedEMA.swapped()")
        check_not_replaced(units_in(self.model))
        if self._swapped_out is not None:
            raise RuntimeError("ShardedEMA.swapped() inside another one: the model has the averages already")
        self._check_same()
        pairs = [*self.averages.items(), *self._buffer_pairs()]
        changed = False
        self._swapped_out = []
        try:
            for pair in pairs:  # One by one: where memory runs out, those that were swapped are swapped back.
                self._swapped_out.append(_swap(*pair))
            versions = [param._version for param in self.averages]
            yield
            changed = versions != [param._version for param in self.averages]
        finally:
            for unit in units_in(self.model):
                for buffer in unit.buffers:
                    buffer.wait_sent()
            for (live, average), replaced in zip(pairs, self._swapped_out, strict=False):
                with torch.no_grad():
                    _swap(live, average) if replaced is None else live.copy_(replaced)
            self._swapped_out = None
        if changed:
            raise RuntimeError(
                "the parameters changed inside ShardedEMA.swapped(), for example by an optimizer step, and so the "
                "averages changed: train outside of it"
            )

    @on_local_tensors
    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by the plain model's names, without communication and without copies.

        Each is a `LocalShard`, or a tensor where all ranks hold all of it, under `ema.<name>`; so are buffers, and
        `ema.num_updates` is a number. Put it next to `sharded_state_dict(model, optimizer)` into a snapshot or a
        checkpoint of torch, which read it at any number of ranks.
        """
        state: dict[str, Any] = {_UPDATES: self.num_updates}
        for name, param_slice in named_param_slices(self.model).items():
            state[f"{_PREFIX}model.{name}"] = local_chunk(param_slice, self.averages[param_slice.owner])
        return state | {f"{_PREFIX}model.{name}": average for name, average in self.buffer_averages.items()}

    @torch.no_grad()
    @on_local_tensors
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads averages: this rank's shards as `state_dict` gives them, or full tensors.

        Args:
            state: May hold other entries, under names that do not begin with `ema.`.

        Raises:
            StateMismatch: A name, a shape or a range of elements differs; nothing has been written then.
            RuntimeError: Inside `swapped()`.
        """
        if self._swapped_out is not None:
            raise RuntimeError("ShardedEMA.load_state_dict() inside swapped(): call it outside")
        current, slices = self.state_dict(), named_param_slices(self.model)
        saved_keys = {key for key in state if key.startswith(_PREFIX)}
        if saved_keys != current.keys():
            first = sorted(current.keys() ^ saved_keys)[0]
            problem = "missing" if first in current else "unexpected"
            raise StateMismatch(f"the averages belong to another model: {first} is {problem} in the state")
        del current[_UPDATES]
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, average in current.items():
            param_slice, source = slices.get(key.removeprefix(f"{_PREFIX}model.")), state[key]
            if param_slice is not None and param_slice.is_shard:
                source, average = part_of(key, source, param_slice), average.tensor
            if source.shape != average.shape:
                raise StateMismatch(f"{key}: the saved shape is {tuple(source.shape)}, expected {tuple(average.shape)}")
            pairs.append((source, average))
        _copy([(source, average) for source, average in pairs if not average.is_set_to(source)])
        self.num_updates = int(state[_UPDATES])

    # For reshard_to.

    @property
    def is_swapped(self) -> bool:
        """Whether the model has the averages right now."""
        return self._swapped_out is not None

    def replace_param(self, old: Tensor, new: Tensor) -> None:
        """Averages `new` from now on in place of `old`, a parameter of the same shape and dtype."""
        self.averages = {new if param is old else param: average for param, average in self.averages.items()}

    def _buffer_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The model's present buffers, which it may have assigned again, and their averages."""
        now = dict(self.model.named_buffers())
        if now.keys() != self.buffer_averages.keys():
            other = sorted(now.keys() ^ self.buffer_averages.keys())[0]
            raise RuntimeError(f"the model has other buffers than when its average was begun: {other}")
        return [(now[name], average) for name, average in self.buffer_averages.items()]

    @on_local_tensors
    def _check_same(self) -> None:
        now = list(self.model.parameters())
        if any(param.is_meta for param in self.averages):
            raise RuntimeError(
                "the model is on the meta device and has no values to average: call model.to_empty(device=...), load a "
                "checkpoint and build ShardedEMA(model) then, or give the average to reshard_to(model, ..., ema=ema)"
            )
        same = len(now) == len(self.averages) and all(
            param is averaged and param.shape == average.shape
            for param, (averaged, average) in zip(now, self.averages.items(), strict=True)
        )
        if not same:
            raise RuntimeError(
                "the model's parameters are no longer those that are averaged: build ShardedEMA(model) after the model "
                "is sharded and has values, and give it to reshard_to(model, ..., ema=ema) if ranks change"
            )


@on_local_tensors
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for live, average in pairs:
        wait_for(live)
        average.copy_(live)


@on_local_tensors
def _average(pairs: list[tuple[Tensor, Tensor]], decay: float) -> None:
    for live, _ in pairs:
        wait_for(live)
    floating = [pair for pair in pairs if pair[0].is_floating_point() or pair[0].is_complex()]
    if floating:
        new = [live.detach().to(average) for live, average in floating]
        torch._foreach_lerp_([average for _, average in floating], new, 1 - decay)
    for live, average in pairs:
        if not (live.is_floating_point() or live.is_complex()):
            average.copy_(average * decay + live * (1 - decay))


@torch.no_grad()
@on_local_tensors
def _swap(live: Tensor, average: Tensor) -> Tensor | None:
    """Exchanges average and live tensor; returns a copy of the live one where its dtype or device differs."""
    wait_for(live)
    replaced = live.detach().clone()
    live.copy_(average)
    if live.dtype != average.dtype or live.device != average.device:
        return replaced
    average.copy_(replaced)
    return None
