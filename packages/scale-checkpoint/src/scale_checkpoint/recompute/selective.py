"""The two dispatch modes of selective checkpointing: one keeps results in the forward, one gives them back.

torch has such a pair, `create_selective_checkpoint_contexts`, which takes about the same time. This one draws random
numbers as the plain module does, lets kept results be offloaded, computes again what was changed in place, and can go
backward twice through a graph that is retained: what was used up is computed. And it learns: a result that no
recomputation has asked for, such as that of a block's last product, is not kept by later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SelectiveCheckpointContext

from scale_checkpoint.offload.store import Packed
from scale_checkpoint.recompute.policy import NamedOperators, OperatorPolicy, can_be_kept, draws, is_kept, statistics
from scale_checkpoint.saved_tensors import alias_of, counter_of
from scale_checkpoint.state import is_aside, recomputations

Key = tuple[int, int]
"""An operator, by its identity, which is quicker than its hash, and how many times it had run before."""

_OWN_COUNTERS = frozenset(
    map(
        id,
        (
            torch.ops.aten._unsafe_view.default,
            torch.ops.aten.unsafe_split.Tensor,
            torch.ops.aten.unsafe_split_with_sizes.default,
        ),
    )
)
"""Operators whose results share the memory of their argument, but count changes in place for themselves: of a linear
layer without bias on [..., n], and of the gates of recurrent layers."""

Send = Callable[[Tensor], Packed | None]
"""Moves a kept tensor away; None where it stays."""


class Kept:
    """The results that one call has kept.

    Args:
        policy: Which results are kept.
        unused: Keys of results that no recomputation of the module has asked for; shared by all its calls.
        send: Moves them away, if they are to leave.
    """

    def __init__(self, policy: OperatorPolicy, unused: set[Key], send: Send | None) -> None:
        self.policy, self.unused, self._send = policy, unused, send
        self.results: dict[Key, Any] = {}
        self.operators: set[int] = set()
        self._written: dict[Key, list[Tensor]] = {}
        self._by_storage: dict[int, list[_Held]] = {}

    def keep(self, key: Key, result: Any, written: list[Tensor]) -> None:
        """Keeps a result: a tensor, or a tuple or list of tensors and other things; and what was `written`."""
        self.operators.add(key[0])
        if written:
            self._written[key] = [each.clone() for each in written]
        self.results[key] = kept = _map(self._hold, result)
        for held in _held(kept):
            self._by_storage.setdefault(held.storage, []).append(held)

    def watch(self, result: Any) -> None:
        """Watches what shares the memory of kept results, and counts its own versions."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            for held in self._by_storage.get(tensor.untyped_storage()._cdata, ()):
                held.watch(counter_of(tensor))

    def has(self, key: Key) -> bool:
        """Whether a result is there as it was; not so what was used up, or changed in place since."""
        return key in self.results and all(held.is_intact for held in _held(self.results[key]))

    def use(self, key: Key, written: list[Tensor]) -> Any:
        """Returns a result, for the last time, and writes again what its operator had written."""
        for tensor, value in zip(written, self._written.pop(key, ()), strict=False):
            tensor.data.copy_(value)  # The operator counts no versions, either.
        return _map(lambda held: held.use() if isinstance(held, _Held) else held, self.results.pop(key))

    def fetch(self) -> None:
        """Starts to bring back what has left."""
        for result in self.results.values():
            for held in _held(result):
                held.fetch()

    def note_unused(self) -> None:
        """After a recomputation: what is still there was not asked for."""
        self.unused.update(self.results)

    def _hold(self, value: Any) -> Any:
        return _Held(value, self._send) if isinstance(value, Tensor) else value


class _Held:
    """A kept tensor, where it is or away.

    Args:
        tensor: The result of an operator.
        send: Moves it away, if it is to leave.
    """

    def __init__(self, tensor: Tensor, send: Send | None) -> None:
        tensor = alias_of(tensor)
        self._sent = None if send is None else send(tensor)
        # What has left is as it was; what has stayed may be changed by whoever has it, and is then computed again.
        self._stayed = tensor if self._sent is None else None
        self._counters = [(tensor, tensor._version)] if self._sent is None else []

    def fetch(self) -> None:
        if self._sent is not None:
            self._sent.fetch()

    @property
    def storage(self) -> int:
        """The identity of its memory, if it has stayed; 0 otherwise."""
        stayed = self._stayed
        return 0 if stayed is None or stayed.layout is not torch.strided else stayed.untyped_storage()._cdata

    def watch(self, counter: Tensor) -> None:
        """Counts its changes by another version counter as well."""
        self._counters.append((counter, counter._version))

    @property
    def is_intact(self) -> bool:
        return all(counter._version == version for counter, version in self._counters)

    def use(self) -> Tensor:
        if self._stayed is not None:
            return self._stayed
        assert self._sent is not None
        return self._sent.unpack(alone=True)  # The module may write into it, and others may have kept the same.


def _held(result: Any) -> list[_Held]:
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part for part in parts if isinstance(part, _Held)]


def _map(function: Callable[[Any], Any], result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)([function(part) for part in result])
    return function(result)


class Keeping(TorchDispatchMode):
    """Around the forward: keeps what the policy says.

    Args:
        kept: Takes it.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._counts, self._recomputations = kept, dict[int, int](), recomputations()
        self._named = kept.policy if isinstance(kept.policy, NamedOperators) else None
        self._may_keep = can_be_kept if self._named is None else self._named.names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`, and keeps its result where that is wanted."""
        kwargs = {} if kwargs is None else kwargs
        result = func(*args, **kwargs)
        if is_aside() or recomputations() != self._recomputations:
            return result
        if id(func) in _OWN_COUNTERS:
            self._kept.watch(result)
        if not self._may_keep(func):
            return result
        count = self._counts.get(id(func), 0)
        self._counts[id(func)] = count + 1
        key = id(func), count
        if (
            key not in self._kept.unused
            and self._is_wanted(result, func, args, kwargs)
            and not draws(func, args, kwargs)
        ):
            self._kept.keep(key, result, statistics(func, args, kwargs))
        return result

    def _is_wanted(self, result: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if self._named is not None:
            return self._named.wants(func, args, result)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result  # torch 2.8 takes no such argument.
        return is_kept(self._kept.policy(context, func, *args, **kwargs), self._kept.policy, func)


class GivingBack(TorchDispatchMode):
    """Around a recomputation: an operator whose result was kept does not run.

    Args:
        kept: Has it.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._counts, self._recomputations = kept, dict[int, int](), recomputations()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns the kept result of `func`, or runs it."""
        kwargs = {} if kwargs is None else kwargs
        is_own = recomputations() == self._recomputations and not is_aside()
        if is_own and id(func) in self._kept.operators:
            key = id(func), self._counts.get(id(func), 0)
            self._counts[id(func)] = key[1] + 1
            if self._kept.has(key):
                return self._kept.use(key, statistics(func, args, kwargs))
        return func(*args, **kwargs)
