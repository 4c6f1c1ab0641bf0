"""The two dispatch modes of selective checkpointing: `SaveResults` in the forward, `ReuseResults` in the recomputation.

torch has such a pair, `create_selective_checkpoint_contexts`, which takes about the same time. This one draws random
numbers as the plain module does, lets kept results be offloaded, computes again results that were changed in place,
and can go backward twice through a graph that is retained: used results are computed again. And it learns: a result
that no recomputation has asked for, such as the output of a block's last product, is not kept by later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SelectiveCheckpointContext

from scale_checkpoint.offload.store import PackedTensor, alias_of, version_counter
from scale_checkpoint.recompute.policy import (
    NamedOperators,
    OperatorPolicy,
    can_be_saved,
    draws_random_numbers,
    results_of,
    saves,
    updated_statistics,
)
from scale_checkpoint.state import STATE

Key = tuple[int, int]
"""An operator, by its identity, which is quicker than its hash, and how many times it had run before."""

_aten = torch.ops.aten
# Their results share the memory of their argument, but count changes in place for themselves: of a linear layer
# without bias on [..., n], and of the gates of recurrent layers.
_OWN_VERSION_COUNTERS = frozenset(
    map(
        id,
        (_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default),
    )
)

Send = Callable[[Tensor], PackedTensor | None]
"""Starts to offload a kept tensor; None where it stays."""


class SavedResults:
    """The results that one call has kept."""

    def __init__(self, policy: OperatorPolicy, unused: set[Key], send: Send | None) -> None:
        self.policy, self.unused, self._send = policy, unused, send
        self.results: dict[Key, Any] = {}
        self.operators: set[int] = set()
        self._statistics: dict[Key, list[Tensor]] = {}
        self._by_storage: dict[int, list[_SavedResult]] = {}

    def save(self, key: Key, result: Any, statistics: list[Tensor]) -> None:
        """Keeps a result, a tensor or a tuple or list of such, and the values of statistics that its operator wrote."""
        self.operators.add(key[0])
        if statistics:
            self._statistics[key] = [statistic.clone() for statistic in statistics]
        self.results[key] = stored = _map(self._save_tensor, result)
        for saved in _saved_in(stored):
            self._by_storage.setdefault(saved.storage, []).append(saved)

    def watch(self, result: Any) -> None:
        """Watches results with version counters of their own that share the memory of kept ones."""
        for tensor in results_of(result):
            for saved in self._by_storage.get(tensor.untyped_storage()._cdata, ()):
                saved.watch(version_counter(tensor))

    def has(self, key: Key) -> bool:
        """Whether a result is there as it was: not used up, nor changed in place since."""
        return key in self.results and all(saved.is_intact for saved in _saved_in(self.results[key]))

    def pop(self, key: Key, statistics: list[Tensor]) -> Any:
        """Returns a result for the last time, and writes the statistics that its operator wrote."""
        for tensor, value in zip(statistics, self._statistics.pop(key, ()), strict=False):
            tensor.data.copy_(value)  # The operator counts no versions, either.
        return _map(lambda saved: saved.unpack() if isinstance(saved, _SavedResult) else saved, self.results.pop(key))

    def fetch(self) -> None:
        """Starts to bring back offloaded results."""
        for result in self.results.values():
            for saved in _saved_in(result):
                saved.fetch()

    def note_unused(self) -> None:
        """After a recomputation: remembers the results that it has not asked for."""
        self.unused.update(self.results)

    def _save_tensor(self, value: Any) -> Any:
        return _SavedResult(value, self._send) if isinstance(value, Tensor) else value


class _SavedResult:
    """A kept tensor, on the device or offloaded."""

    def __init__(self, tensor: Tensor, send: Send | None) -> None:
        tensor = alias_of(tensor)
        self._packed = None if send is None else send(tensor)
        # Offloaded results are unchanged; others may be changed in place, and are then computed again.
        self._tensor = tensor if self._packed is None else None
        self._counters = [(tensor, tensor._version)] if self._packed is None else []

    def fetch(self) -> None:
        if self._packed is not None:
            self._packed.fetch()

    @property
    def storage(self) -> int:
        """The identity of its memory on the device; 0 if it was offloaded."""
        tensor = self._tensor
        return 0 if tensor is None or tensor.layout is not torch.strided else tensor.untyped_storage()._cdata

    def watch(self, counter: Tensor) -> None:
        """Counts its changes by another version counter as well."""
        self._counters.append((counter, counter._version))

    @property
    def is_intact(self) -> bool:
        return all(counter._version == version for counter, version in self._counters)

    def unpack(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        assert self._packed is not None
        return self._packed.unpack(alone=True)  # The module may write into it, and others may have kept the same.


def _saved_in(result: Any) -> list[_SavedResult]:
    return [part for part in results_of(result) if isinstance(part, _SavedResult)]


def _map(function: Callable[[Any], Any], result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)([function(part) for part in result])
    return function(result)


class SaveResults(TorchDispatchMode):
    """Around the forward: keeps the results that the policy names."""

    def __init__(self, kept: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._counts, self._depth = kept, dict[int, int](), STATE.recompute_depth
        self._named = kept.policy if isinstance(kept.policy, NamedOperators) else None
        self._may_save = can_be_saved if self._named is None else self._named.matches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        result = func(*args, **kwargs)
        if STATE.internal or STATE.recompute_depth != self._depth:
            return result
        if id(func) in _OWN_VERSION_COUNTERS:
            self._kept.watch(result)
        if not self._may_save(func):
            return result
        count = self._counts.get(id(func), 0)
        self._counts[id(func)] = count + 1
        key = id(func), count
        if (
            key not in self._kept.unused
            and self._is_saved(result, func, args, kwargs)
            and not draws_random_numbers(func, args, kwargs)
        ):
            self._kept.save(key, result, updated_statistics(func, args, kwargs))
        return result

    def _is_saved(self, result: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if self._named is not None:
            return self._named.saves_result(func, args, result)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result  # torch 2.8 takes no such argument.
        return saves(self._kept.policy(context, func, *args, **kwargs), self._kept.policy, func)


class ReuseResults(TorchDispatchMode):
    """Around a recomputation: an operator whose result was kept does not run."""

    def __init__(self, kept: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._counts, self._depth = kept, dict[int, int](), STATE.recompute_depth

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        is_own = STATE.recompute_depth == self._depth and not STATE.internal
        if is_own and id(func) in self._kept.operators:
            key = id(func), self._counts.get(id(func), 0)
            self._counts[id(func)] = key[1] + 1
            if self._kept.has(key):
                return self._kept.pop(key, updated_statistics(func, args, kwargs))
        return func(*args, **kwargs)
