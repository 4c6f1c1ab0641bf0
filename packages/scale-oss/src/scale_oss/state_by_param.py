"""The optimizer's state by the user's own parameters, of which the optimizer steps on pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from scale_oss.state_placement import StatePlacement


class StateByParam(MutableMapping[Tensor, Any]):
    """What `optimizer.state` is: found by a parameter, or by the piece of it that this rank steps on.

    Args:
        optim: The optimizer that has the state.
        placements: Where the state of each parameter is kept, by the parameter's `id`; more may be added.
    """

    def __init__(self, optim: Optimizer, placements: Mapping[int, StatePlacement]) -> None:
        self._optim, self._placements = optim, placements

    def __getitem__(self, key: Tensor) -> Any:
        stepped = self._stepped(key)
        return {} if stepped is None else self._optim.state[stepped]

    def __setitem__(self, key: Tensor, value: Any) -> None:
        stepped = self._stepped(key)
        if stepped is not None:
            self._optim.state[stepped] = value

    def __delitem__(self, key: Tensor) -> None:
        stepped = self._stepped(key)
        if stepped is None:
            raise KeyError(key)
        del self._optim.state[stepped]

    def __contains__(self, key: object) -> bool:
        return self._stepped(key) in self._optim.state

    def __iter__(self) -> Iterator[Tensor]:
        params = {id(placement.optimizer_param): placement.param for placement in self._placements.values()}
        return (params.get(id(key), key) for key in list(self._optim.state))

    def __len__(self) -> int:
        return len(self._optim.state)

    def get(self, key: Tensor, default: Any = None) -> Any:
        """As of any mapping; what is looked up like this gets no entry."""
        stepped = self._stepped(key)
        return default if stepped is None else self._optim.state.get(stepped, default)

    def clear(self) -> None:
        """Forgets all of it."""
        self._optim.state.clear()

    def _stepped(self, key: Any) -> Any:
        """What has the state of a parameter; None where other ranks have all of it."""
        placement = self._placements.get(id(key))
        return key if placement is None else placement.optimizer_param
