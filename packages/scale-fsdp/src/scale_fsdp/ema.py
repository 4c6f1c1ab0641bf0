"""The moving average of a model's weights, of which each rank keeps the part that it trains.

An average is taken element by element, so the average of a shard is the shard of the average: nothing is sent, and it
costs what one more copy of the shards does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_core.state.optim_state_dict import part_of, piece
from scale_core.state.param_ownership import named_holdings
from scale_core.state.validation import StateMismatch
from scale_fsdp.guards import refuse_in_use
from scale_fsdp.unit import units_in

_PREFIX = "ema."
_UPDATES = f"{_PREFIX}num_updates"


class _Pair(NamedTuple):
    """A tensor of the model, and its average."""

    live: Tensor
    average: Tensor


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
        model: The model, sharded already; kept.
        decay: In [0, 1]: how much of the average stays at each update.
        average_buffers: Average the buffers, too. Otherwise their values at the last update go with the average, as
            the statistics of batch norms should: those of the weights that they were seen with.
        dtype: Of the averages of floating-point tensors; None is that of each. Averages of half-precision parameters
            stand still, unless they are wider: a thousandth of a step is less than their last digit.
        device: Where the averages live; None is where the shards are.

    Attributes:
        decay: As given; may be changed.
        num_updates: How many there were.

    Raises:
        ValueError: The decay is none.
    """

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
        self._device = device
        self._params = [_pair(param, dtype, device) for param in model.parameters()]
        self._buffers = {name: _pair(buffer, dtype, device) for name, buffer in model.named_buffers()}
        self._held: list[Tensor | None] | None = None

    @torch.no_grad()
    def update(self) -> None:
        """Takes the model's present parameters into the average; call it after each optimizer step.

        Raises:
            RuntimeError: Inside `swapped()`; or the model's parameters are others than those that are averaged.
        """
        if self._held is not None:
            raise RuntimeError(
                "ShardedEMA.update() inside swapped(), where the model has the averages: call it outside"
            )
        self._check_same()
        buffers = list(self._current_buffers().values())
        averaged = [*self._params, *buffers] if self.average_buffers else self._params
        if self.num_updates == 0:
            _copy(averaged)
        else:
            _average(averaged, self.decay)
        if not self.average_buffers:
            _copy(buffers)
        self.num_updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model has the averages in place of its parameters and buffers: for evaluation, or to save it.

        Shards and averages change places, so that this takes no more memory; where the averages have another dtype or
        device, the shards are kept aside. All ranks enter together if they run the model inside.

        Raises:
            RuntimeError: The parameters are in use, or this is inside another `swapped()`; or they were changed inside.
        """
        refuse_in_use(units_in(self.model), "ShardedEMA.swapped()")
        if self._held is not None:
            raise RuntimeError("ShardedEMA.swapped() inside another one: the model has the averages already")
        self._check_same()
        pairs = [*self._params, *self._current_buffers().values()]
        changed = False
        self._held = []
        try:
            for pair in pairs:  # One by one: where memory runs out, those that were swapped are swapped back.
                self._held.append(_swap(pair))
            versions = [pair.live._version for pair in self._params]
            yield
            changed = versions != [pair.live._version for pair in self._params]
        finally:
            for unit in units_in(self.model):
                for buffer in unit.buffers:
                    buffer.wait_sent()
            for pair, held in zip(pairs, self._held, strict=False):
                _swap_back(pair, held)
            self._held = None
        if changed:
            raise RuntimeError(
                "the parameters were written to inside ShardedEMA.swapped(), by an optimizer step or otherwise, and so "
                "the averages were: train outside of it"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by the plain model's names, without communication and without copies.

        Each is a `LocalShard`, or a tensor where the ranks hold all of it, under `ema.<name>`; buffers stand beside
        them, and `ema.num_updates` is a number. Put it beside `sharded_state_dict(model, optimizer)` into a snapshot or
        a checkpoint of torch, which read it at any number of ranks.
        """
        averages = {id(pair.live): pair.average for pair in self._params}
        state: dict[str, Any] = {_UPDATES: self.num_updates}
        for name, holding in named_holdings(self.model).items():
            state[f"{_PREFIX}model.{name}"] = piece(holding, averages[id(holding.owner)])
        for name, pair in self._buffers.items():
            state[f"{_PREFIX}model.{name}"] = pair.average
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the averages out of a state: this rank's shards, as `state_dict` gives them, or full tensors.

        Args:
            state: May hold other things, under names that do not begin with `ema.`.

        Raises:
            StateMismatch: A name, a shape or a range of elements differs; nothing has been written then.
            RuntimeError: Inside `swapped()`.
        """
        if self._held is not None:
            raise RuntimeError("ShardedEMA.load_state_dict() inside swapped(): call it outside")
        own, holdings = self.state_dict(), named_holdings(self.model)
        given = {key for key in state if key.startswith(_PREFIX)}
        if given != own.keys():
            first = sorted(own.keys() ^ given)[0]
            there = "missing" if first in own else "unexpected"
            raise StateMismatch(f"the averages are those of another model: {first} is {there} in the state")
        targets: list[_Pair] = []
        for key, mine in own.items():
            holding = holdings.get(key.removeprefix(f"{_PREFIX}model."))
            if key == _UPDATES:
                continue
            if holding is not None and holding.is_shard:
                source = part_of(key, state[key], holding)
                mine = mine.tensor
            else:
                source = state[key]
            if source.shape != mine.shape:
                raise StateMismatch(f"{key}: the saved shape is {tuple(source.shape)}, expected {tuple(mine.shape)}")
            targets.append(_Pair(source, mine))
        _copy([pair for pair in targets if not pair.average.is_set_to(pair.live)])
        self.num_updates = int(state[_UPDATES])

    # For those who cut the parameters anew.

    @property
    def is_swapped(self) -> bool:
        """Whether the model has the averages right now."""
        return self._held is not None

    def average_of(self, param: Tensor) -> Tensor:
        """Returns the average of a parameter."""
        return next(pair.average for pair in self._params if pair.live is param)

    def replace_param(self, old: Tensor, new: Tensor) -> None:
        """Goes over to another object in the place of a parameter."""
        self._params = [pair._replace(live=new) if pair.live is old else pair for pair in self._params]

    def replace_average(self, param: Tensor, average: Tensor) -> None:
        """Takes another tensor for the average of a parameter."""
        average = average if average.is_meta else average.to(self._device)
        self._params = [pair._replace(average=average) if pair.live is param else pair for pair in self._params]

    @property
    def buffer_averages(self) -> dict[str, Tensor]:
        """What stands for each of the model's buffers."""
        return {name: pair.average for name, pair in self._buffers.items()}

    def replace_buffer_average(self, name: str, average: Tensor) -> None:
        """Takes another tensor for that of a buffer."""
        self._buffers[name] = self._buffers[name]._replace(average=average.to(self._device))

    def _current_buffers(self) -> dict[str, _Pair]:
        """A module may assign its buffers anew, so they are looked up by name."""
        now = dict(self.model.named_buffers())
        if now.keys() != self._buffers.keys():
            other = sorted(now.keys() ^ self._buffers.keys())[0]
            raise RuntimeError(f"the model has other buffers than when its average was begun: {other}")
        self._buffers = {name: _Pair(now[name], pair.average) for name, pair in self._buffers.items()}
        return self._buffers

    def _check_same(self) -> None:
        now = list(self.model.parameters())
        if any(pair.live.is_meta for pair in self._params):
            raise RuntimeError(
                "the model is on the meta device and has no values to average: call model.to_empty(device=...), load a "
                "checkpoint and build ShardedEMA(model) then, or give the average to reshard_to(model, ..., ema=ema)"
            )
        same = len(now) == len(self._params) and all(
            param is pair.live and param.shape == pair.average.shape
            for param, pair in zip(now, self._params, strict=True)
        )
        if not same:
            raise RuntimeError(
                "the model's parameters are no longer those that are averaged: build ShardedEMA(model) after the model "
                "is sharded and has values, and give it to reshard_to(model, ..., ema=ema) if ranks change"
            )


def _pair(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> _Pair:
    dtype = dtype if tensor.is_floating_point() else None
    return _Pair(tensor, tensor.detach().to(device, dtype, copy=True))


def _copy(pairs: list[_Pair]) -> None:
    for live, average in pairs:
        average.copy_(live)


def _average(pairs: list[_Pair], decay: float) -> None:
    floating = [pair for pair in pairs if pair.live.is_floating_point() or pair.live.is_complex()]
    if floating:
        news = [live.detach().to(average) for live, average in floating]
        torch._foreach_lerp_([average for _, average in floating], news, 1 - decay)
    for live, average in pairs:
        if not (live.is_floating_point() or live.is_complex()):
            average.copy_(average * decay + live * (1 - decay))


@torch.no_grad()
def _swap(pair: _Pair) -> Tensor | None:
    """Puts the average into the model, and what was there into its place; returns it where it does not fit there."""
    live, average = pair
    held = live.detach().clone()
    live.copy_(average)
    if live.dtype != average.dtype or live.device != average.device:
        return held
    average.copy_(held)
    return None


@torch.no_grad()
def _swap_back(pair: _Pair, held: Tensor | None) -> None:
    if held is None:
        _swap(pair)
    else:
        pair.live.copy_(held)
