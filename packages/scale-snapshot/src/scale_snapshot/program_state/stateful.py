"""Objects that save and load a state: schedulers, scalers, data loaders, random states, and one's own classes.

The result of `state_dict()` stands under the name of its object, entry by entry: tensors in the tensor files, the rest
as JSON. Ranks that all have the same state save it once. If they differ, each rank saves its own under
`<name>.ranks[<rank>]`, and a different number of ranks needs a choice for each of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from scale_core.arguments import checked_arguments
from scale_core.state.local_shard import LocalShard
from scale_core.state.validation import SavedTensor, StateMismatch
from scale_snapshot.format.state_codec import TYPE, decode, encode, tensor_keys
from scale_snapshot.program_state.rng_state import RandomState

_WHOLE = "state"  # The entry of a state that is no dict with names.

Resize = Callable[[list[Any], int, int], Any]


@checked_arguments
@dataclass(frozen=True)
class PerRank:
    """Marks an object with a state for each rank, as its position in its part of the data.

    Without it that is found out by comparing the ranks' states. It is needed where they may be equal by chance, and to
    load at another number of ranks. Random states, torch's data loaders, datasets and samplers with a `state_dict`, and
    objects with an attribute `is_per_rank = True` always count as such objects. One that also has `starts_over = True`
    is given an empty dict at another number of ranks, and nothing of it is read.

        PerRank(loader, resize=lambda states, rank, size: states[rank % len(states)])

    Attributes:
        obj: The object, or a tensor or a value.
        resize: Returns a rank's state where other ranks than these have saved it, from the states of all of them, this
            rank and the number of ranks. None refuses to load then.

    Examples:
        >>> import tempfile
        >>> from scale_snapshot import PerRank, load, save
        >>> class Position:
        ...     batch = 3
        ...     def state_dict(self):
        ...         return {"batch": self.batch}
        ...     def load_state_dict(self, state):
        ...         self.batch = state["batch"]
        >>> folder = tempfile.mkdtemp()
        >>> marked = PerRank(Position(), resize=lambda states, rank, size: states[0])  # on other numbers of ranks
        >>> save(folder, 1, {"position": marked}).name
        'step-00000001'
        >>> load(folder, {"position": marked}).step
        1

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    obj: Any
    resize: Resize | None = None


@dataclass(frozen=True)
class FromRank0:
    """Marks an object whose state differs between ranks, and is saved as rank 0 has it and loaded by all ranks.

    Attributes:
        obj: The object, or a tensor or a value.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import FromRank0, save
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)  # its state differs between ranks
        >>> save(tempfile.mkdtemp(), 1, {"scheduler": FromRank0(scheduler)}).name
        'step-00000001'

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    obj: Any


@dataclass(frozen=True)
class Captured:
    """The state of an object on this rank."""

    layout: Literal["entries", "prefixed", "whole", "nothing"]
    # By key: a tensor, or JSON with the tensors whose keys stand in it.
    items: Mapping[str, tuple[Any, Mapping[str, Tensor]]]

    @property
    def is_sharded(self) -> bool:
        return any(isinstance(value, LocalShard) for value, _ in self.items.values())

    def flat(self, scope: str) -> dict[str, Any]:
        """The entries of a flat state, under keys that begin with `scope`."""
        state: dict[str, Any] = {}
        for key, (value, tensors) in self.items.items():
            state[f"{scope}.{key}"] = value
            state.update({f"{scope}.{inner}": tensor for inner, tensor in tensors.items()})
        return state

    def digest(self) -> str:
        """A hash that is equal on ranks whose states are."""
        hasher = hashlib.blake2b(digest_size=16)
        for key, value in sorted(self.flat(self.layout).items()):
            hasher.update(f"{key}\n".encode())
            if isinstance(value, Tensor):
                host = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
                hasher.update(f"{host.dtype} {tuple(host.shape)}\n".encode())
                hasher.update((ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b"")
            else:
                hasher.update(json.dumps(value, sort_keys=True).encode())
        return hasher.hexdigest()


@dataclass(frozen=True)
class StatefulPart:
    """An object with a state of its own, or a value that is marked, under its name."""

    name: str
    obj: Any
    mode: Literal["compared", "per rank", "rank 0"] = "compared"
    resize: Resize | None = None

    @staticmethod
    def of(name: str, obj: Any) -> StatefulPart | None:
        """The object as a part of a snapshot; None if it is neither marked nor has a state."""
        if isinstance(obj, FromRank0):
            return StatefulPart(name, obj.obj, "rank 0")
        if isinstance(obj, PerRank):
            return StatefulPart(name, obj.obj, "per rank", obj.resize or _resize_of(obj.obj))
        if not is_stateful(obj):
            return None
        is_of_rank = isinstance(obj, DataLoader | Dataset | Sampler) or getattr(obj, "is_per_rank", False) is True
        return StatefulPart(name, obj, "per rank" if is_of_rank else "compared", _resize_of(obj))

    def capture(self, rank: int) -> Captured:
        """The present state; its tensors are the live ones."""
        if self.mode == "rank 0" and rank > 0:
            return Captured("nothing", {})
        state = self.obj.state_dict() if is_stateful(self.obj) else self.obj
        layout: Literal["entries", "prefixed", "whole"] = "entries"
        if type(state) is not dict or not all(type(key) is str for key in state):
            layout, state = "whole", {_WHOLE: state}
        elif state and all(key.startswith(f"{self.name}.") for key in state):  # As ShardedEMA names its entries.
            layout, state = "prefixed", {key.removeprefix(f"{self.name}."): value for key, value in state.items()}
        captured = Captured(layout, {key: self._item(key, value) for key, value in state.items()})
        names = [name for key, (_, tensors) in captured.items.items() for name in (key, *tensors)]
        if doubled := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
            raise ValueError(
                f"the state of '{self.name}' has two entries that would be named {self.name}.{doubled[0]}: name one of "
                "them otherwise"
            )
        return captured

    def _item(self, key: str, value: Any) -> tuple[Any, Mapping[str, Tensor]]:
        if isinstance(value, LocalShard):
            return value, {}
        encoded = encode(value, key, f"{self.name}[{key!r}]")
        if isinstance(value, Tensor) and encoded.value == {TYPE: "tensor", "key": next(iter(encoded.tensors))}:
            return value, {}  # It needs no description.
        return encoded

    def target(self, saved: Mapping[str, Any], entry: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        """The destinations of all that was saved of it and this rank needs."""
        if entry.get("kind") == "sharded":
            live = self.capture(rank).flat(self.name)
            values = [saved[key] for key in live if key in saved and not isinstance(saved[key], SavedTensor)]
            live.update({f"{self.name}.{inner}": None for value in values for inner in tensor_keys(value)})
            read = places({key: saved[key] for key in live if key in saved})
            return {key: value if isinstance(value, LocalShard) else read.get(key) for key, value in live.items()}
        scopes = tuple(f"{scope}." for scope in self._scopes(entry, rank, size))
        if not scopes:
            return {key: unread(value) for key, value in saved.items() if key.startswith(f"{self.name}.")}
        return places({key: value for key, value in saved.items() if key.startswith(scopes)})

    def decoded(self, state: Mapping[str, Any], entry: Mapping[str, Any], rank: int, size: int) -> Any:
        """The state for this rank, from the values that were read."""
        scopes = self._scopes(entry, rank, size)
        if not scopes:
            return {}
        layouts = entry.get("layouts") or [entry.get("layout")]
        if entry.get("ranks") == size:
            layouts = [layouts[rank]]
        states = [self._decoded(f"{scope}.", state, layout) for scope, layout in zip(scopes, layouts, strict=True)]
        if entry.get("ranks") in (None, size):
            return states[0]
        assert self.resize is not None
        return self.resize(states, rank, size)

    def load(self, state: Any) -> Any:
        """Gives the object its state; returns the object, or the value."""
        if is_stateful(self.obj):
            try:
                self.obj.load_state_dict(state)
            except Exception as error:
                raise StateMismatch(
                    f"'{self.name}' did not take the state that was saved of it: {type(self.obj).__qualname__}."
                    f"load_state_dict raised {type(error).__name__}: {error}"
                ) from error
            return self.obj
        if isinstance(self.obj, Tensor):
            if not isinstance(state, Tensor) or (state.shape, state.dtype) != (self.obj.shape, self.obj.dtype):
                description = (
                    f"{state.dtype} {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
                )
                raise StateMismatch(
                    f"{self.name}: {description} was saved, expected {self.obj.dtype} {tuple(self.obj.shape)}: "
                    f"pass a tensor like the saved one"
                )
            return self.obj.detach().copy_(state)
        return state

    def _scopes(self, entry: Mapping[str, Any], rank: int, size: int) -> list[str]:
        """Where the states that this rank needs begin; none for an object that starts over."""
        ranks = entry.get("ranks")
        if ranks is None:
            return [self.name]
        if ranks == size:
            return [f"{self.name}.ranks[{rank}]"]
        if self.resize is None:
            if getattr(self.obj, "starts_over", False) is True:
                return []
            mend = (
                "RandomState(reseed=True)" if isinstance(self.obj, RandomState) else f"PerRank({self.name}, resize=...)"
            )
            raise StateMismatch(
                f"'{self.name}' was saved by {ranks} ranks, each of which had a state of its own, and there are {size} "
                f"ranks now: pass '{self.name}': {mend}, which says what each rank gets, or leave it out with "
                "strict=False"
            )
        return [f"{self.name}.ranks[{number}]" for number in range(int(ranks))]

    def _decoded(self, scope: str, state: Mapping[str, Any], layout: Any) -> Any:
        local_state = {key.removeprefix(scope): value for key, value in state.items() if key.startswith(scope)}
        inner = {name for value in local_state.values() if not isinstance(value, Tensor) for name in tensor_keys(value)}

        def tensor_of(key: str) -> Tensor:
            tensor: Tensor = local_state[key]
            return tensor

        items = {
            key: value if isinstance(value, Tensor) else decode(value, tensor_of)
            for key, value in local_state.items()
            if key not in inner
        }
        if layout == "whole":
            return items[_WHOLE]
        return {f"{self.name}.{key}": value for key, value in items.items()} if layout == "prefixed" else items


def is_stateful(obj: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def unread(saved: Any) -> Any:
    """A place for saved values that are not read: no element of a tensor, or the value itself."""
    if isinstance(saved, SavedTensor):
        return LocalShard(torch.empty(0, dtype=saved.dtype), saved.shape, 0, 0)
    return saved


def places(saved: Mapping[str, Any]) -> dict[str, Any]:
    """New tensors to read the saved ones into, and the values themselves."""
    return {
        key: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, SavedTensor) else value
        for key, value in saved.items()
    }


def _resize_of(obj: Any) -> Resize | None:
    return obj.resized if isinstance(obj, RandomState) and obj.reseed else None
