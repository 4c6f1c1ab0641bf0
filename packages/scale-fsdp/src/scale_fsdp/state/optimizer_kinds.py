"""What kinds of state the ranks' optimizers keep, agreed on before anything is gathered.

Each entry of an optimizer's state is one number for a parameter, the same on all ranks, or a tensor of the shard's
shape. A rank that holds nothing of a parameter may have no entry, so what there is to gather is said by all together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scale_core.contract import Contract
from scale_core.events import Event, identity
from scale_core.exchange import exchange, exchange_text
from scale_core.group import Group
from scale_core.holdings import Holding, is_number


@dataclass(frozen=True)
class Kind:
    """What one entry of a parameter's state is.

    Attributes:
        dtype: Of the tensor; "" where it is none.
        is_elements: It has one element for each of the parameter's; else it is a number.
        value: The number.
    """

    dtype: str
    is_elements: bool
    value: Any = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return dtype

    def number(self) -> Any:
        """The number as the optimizer has it: a 0-dim tensor, or a value of Python's."""
        return torch.tensor(self.value, dtype=self.torch_dtype) if self.dtype else self.value


Kinds = dict[str, dict[str, Kind]]
"""The kinds of state by the parameter's name and the optimizer's key."""


def kinds_of(holdings: Sequence[Holding], state: Mapping[str, Any]) -> Kinds:
    """Returns the kinds of state that an optimizer keeps for a tensor that holds these.

    Raises:
        ValueError: An entry is neither a number nor a tensor of the shard's shape.
    """
    return {
        holding.name: {key: _kind(holding, key, value) for key, value in state.items()}
        for holding in holdings
        if state or holding.stop > holding.start
    }


def agree_on_kinds(describe: Callable[[], Kinds], group: Group, contract: Contract) -> Kinds:
    """Returns what all ranks together have, where each describes its own.

    Raises:
        ValueError: On all ranks alike: one could not describe its state, or they differ.
    """
    try:
        error, mine = "", describe()
    except ValueError as problem:
        error, mine = str(problem), {}
    if group.size == 1:
        if error:
            raise ValueError(error)
        return mine
    told = {
        name: {key: [kind.dtype, kind.is_elements, kind.value] for key, kind in kinds.items()}
        for name, kinds in mine.items()
    }
    text = json.dumps([error, told], sort_keys=True)
    with contract.waiting(Event("optimizer state", "")):
        digests = [row[0] for row in exchange([identity(text)], group, limit_seconds=contract.limit_seconds)]
        if len(set(digests)) == 1 and not error:
            return mine
        texts = exchange_text(text, group, limit_seconds=contract.limit_seconds)
    return _merged([json.loads(each) for each in texts])


def _kind(holding: Holding, key: str, value: Any) -> Kind:
    if not isinstance(value, Tensor):
        if _is_plain(value):
            return Kind("", False, value)
        raise ValueError(
            f"optimizer state {holding.name}.{key} is a {type(value).__name__}, expected a tensor or a number: what "
            "such an optimizer keeps can't be gathered"
        )
    if is_number(key, value.shape, holding.shape):
        return Kind(str(value.dtype), False, value.item())
    if value.shape != holding.owner.shape:
        raise ValueError(
            f"optimizer state {holding.name}.{key} has shape {tuple(value.shape)}, expected the shard's "
            f"{tuple(holding.owner.shape)} or a number: this optimizer needs whole parameters, so it can't step on "
            "shards"
        )
    return Kind(str(value.dtype), True)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _merged(told: Sequence[tuple[str, Mapping[str, Mapping[str, Sequence[Any]]]]]) -> Kinds:
    failed = [(rank, error) for rank, (error, _) in enumerate(told) if error]
    if failed:
        raise ValueError(f"{failed[0][1]} (on rank {failed[0][0]})")
    merged: dict[str, dict[str, tuple[int, Kind]]] = {}
    for rank, (_, kinds) in enumerate(told):
        for name, entries in kinds.items():
            for key, (dtype, is_elements, value) in entries.items():
                kind = Kind(dtype, is_elements, value)
                first, known = merged.setdefault(name, {}).setdefault(key, (rank, kind))
                if not _are_same(known, kind):
                    raise ValueError(
                        f"optimizer state {name}.{key} differs between the ranks: {_in_words(known)} on rank {first}, "
                        f"{_in_words(kind)} on rank {rank}: all ranks must step together"
                    )
    for rank, (_, kinds) in enumerate(told):
        for name in sorted(kinds.keys() & merged.keys()):  # In an order that is the same on all ranks.
            for key in sorted(merged[name].keys() - kinds[name].keys()):
                raise ValueError(
                    f"optimizer state {name}.{key} is there on rank {merged[name][key][0]}, but not on rank {rank}, "
                    "which holds a part of the parameter, too: all ranks must step together"
                )
    return {name: {key: kind for key, (_, kind) in entries.items()} for name, entries in merged.items()}


def _are_same(one: Kind, other: Kind) -> bool:
    both_nan = all(isinstance(kind.value, float) and math.isnan(kind.value) for kind in (one, other))
    return one == other or (both_nan and one.dtype == other.dtype)


def _in_words(kind: Kind) -> str:
    return f"a tensor of {kind.dtype}" if kind.is_elements else repr(kind.value)
