"""State placement: which elements of each parameter have their optimizer state on the host, and the state itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core.device.streams import on_host
from scale_core.optim.traits import KINDS
from scale_core.shard import title_of
from scale_fsdp.offload.host_kernel import with_strides_of

_HOST = torch.device("cpu")


class StatePart:
    """The elements [start, stop) of a parameter, in row-major order, whose state is in one place."""

    def __init__(
        self, param: Tensor, group: dict[str, Any], start: int, stop: int, *, on_host: bool, divisible: bool
    ) -> None:
        self.param, self.group = param, group
        self.start, self.stop = start, stop
        self.on_host, self.divisible = on_host, divisible
        self.numel = stop - start
        self.is_whole = self.numel == param.numel()
        self.shape = tuple(param.shape) if self.is_whole else (self.numel,)
        self.state: dict[str, Any] = {}
        self.cast_target: Tensor | None = None
        self._new_state: dict[str, Any] = {}  # published after the last chunk

    @property
    def grad(self) -> Tensor:
        assert self.param.grad is not None
        return self.param.grad

    def has_gradient(self) -> bool:
        """Whether there is a gradient to step on."""
        grad = self.param.grad
        if grad is not None and grad.is_sparse and (self.on_host or not self.is_whole):
            raise RuntimeError(
                f"the gradient of {title_of(self.param)} is sparse, and only dense ones go to the host: build the "
                "embedding with sparse=False, or give its parameters an optimizer of their own"
            )
        return grad is not None

    def param_on_host(self) -> bool:
        """Whether the parameter, and its cast, can be used on the host as they are."""
        return on_host(self.param) and is_dense(self.param) and (self.cast_target is None or on_host(self.cast_target))

    def slice(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor of the parameter's shape; the tensor itself if they are all of it."""
        return tensor if self.is_whole else tensor.detach().reshape(-1)[self.start : self.stop]

    def state_slice(self, start: int, stop: int) -> dict[str, Any]:
        """State of the chunk [start, stop), counted from the part's start: the live state if it is all of the part."""
        if stop - start == self.numel:
            return self.state
        return {
            key: value.view(-1)[start:stop] if self._is_elementwise(value) else _clone(value)
            for key, value in self.state.items()
        }

    def store_state(self, start: int, stop: int, state: dict[str, Any]) -> None:
        """Stores a chunk's state after its step; chunks come in order."""
        if state is self.state:
            return
        for key, value in state.items():
            if not (isinstance(value, Tensor) and value.dim() == 1 and value.numel() == stop - start):
                self._new_state[key] = value
                continue
            stored = self.state.get(key, self._new_state.get(key))
            if stored is None:
                stored = self._new_state[key] = torch.empty(self.shape, dtype=value.dtype, device=value.device)
            if not stored.view(-1)[start:stop].is_set_to(value):
                stored.view(-1)[start:stop].copy_(value)
        if stop == self.numel:
            self.state.update(self._new_state)
            self._new_state = {}

    def load_state(self, values: dict[str, Any]) -> None:
        """Loads state of the parameter's shape, and numbers."""
        self.state = {key: self._on_device_of(key, value) for key, value in values.items()}

    def _on_device_of(self, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        device = _HOST if self.on_host else self.param.device
        if not self.is_whole and value.shape == self.param.shape:
            return self.slice(value).to(device, copy=True)
        if not self.is_whole:
            value = value.clone()  # each part has its own step count
        if key == "step" and not self.on_host and not (self.group.get("fused") or self.group.get("capturable")):
            return value  # where torch keeps it
        value = value.to(device)
        return with_strides_of(self.param, value) if self.on_host and value.shape == self.param.shape else value

    def _is_elementwise(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self.shape


class OffloadPlacement(NamedTuple):
    """How much optimizer state is where: elements of parameters, and bytes of the state that exists by now."""

    host_elements: int
    device_elements: int
    host_bytes: int
    device_bytes: int


class PlacedState(MutableMapping[Tensor, dict[str, Any]]):
    """An optimizer's `state` by parameter: live where it is in one place, else a merged copy on the host."""

    def __init__(self) -> None:
        self._parts: dict[Tensor, tuple[StatePart, ...]] = {}
        self._others: dict[Any, Any] = {}

    def add(self, param: Tensor, parts: Sequence[StatePart]) -> None:
        """Registers a parameter's parts."""
        self._parts[param] = tuple(parts)

    def parts(self) -> Iterator[StatePart]:
        """Yields all parts in the order of the parameters."""
        for parts in self._parts.values():
            yield from parts

    def parts_of(self, param: Tensor) -> tuple[StatePart, ...]:
        """Parts of a parameter; none if the optimizer does not have it."""
        return self._parts.get(param, ())

    def placement(self) -> OffloadPlacement:
        """How much state is where."""
        counts = {True: [0, 0], False: [0, 0]}
        for part in self.parts():
            counts[part.on_host][0] += part.numel
            counts[part.on_host][1] += sum(v.nbytes for v in part.state.values() if isinstance(v, Tensor))
        return OffloadPlacement(counts[True][0], counts[False][0], counts[True][1], counts[False][1])

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        parts = self._parts.get(param)
        if parts is None:
            return cast(dict[str, Any], self._others[param])
        return parts[0].state if len(parts) == 1 else _merge_parts(parts)

    def __setitem__(self, param: Tensor, values: dict[str, Any]) -> None:
        if param not in self._parts:
            self._others[param] = values
        for part in self.parts_of(param):
            part.load_state(values)

    def __delitem__(self, param: Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        self._others.pop(param, None)
        for part in self.parts_of(param):
            part.state = {}

    def __iter__(self) -> Iterator[Tensor]:
        yield from (param for param, parts in self._parts.items() if any(part.state for part in parts))
        yield from self._others

    def __contains__(self, param: object) -> bool:
        return param in self._others or any(part.state for part in self._parts.get(param, ()))  # type: ignore[call-overload]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Drops all state and keeps its placement."""
        self._others.clear()
        for part in self.parts():
            part.state = {}


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a tensor if it is one range of memory, in its order of dimensions."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one range of memory, in any order of dimensions."""
    return tensor.stride() == dense_strides(tensor)


def _merge_parts(parts: Iterable[StatePart]) -> dict[str, Any]:
    first, *_ = parts = list(parts)
    joined = {}
    for key, value in first.state.items():
        if isinstance(value, Tensor) and value.shape == first.shape:
            value = torch.cat([part.state[key].to(_HOST) for part in parts]).view(first.param.shape)
        joined[key] = value
    return joined


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


Split = Literal["element", "parameter"]


def resolve_split(optim_cls: type[Optimizer], split: Split | None) -> Split:
    """How the state of an optimizer may be split: by element or by parameter."""
    argument: object = optim_cls
    if not (isinstance(argument, type) and issubclass(argument, Optimizer)):
        got = (
            f"an {type(argument).__name__} that is built already" if isinstance(argument, Optimizer) else repr(argument)
        )
        raise TypeError(
            f"expected a class of optimizers, got {got}: pass the class first, and its arguments after the "
            "parameters, OffloadOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)"
        )
    name = optim_cls.__name__
    kind = KINDS.get(optim_cls)
    if kind is not None and (kind.scope == "all" or kind.sparse):
        why = "its gradients are sparse, and only dense ones are copied"
        why = why if kind.sparse else f"its direction depends on {kind.needs}"
        raise ValueError(f"{name} can't have its state in two places: {why}. Use it without OffloadOptimizer")
    if split not in (None, "element", "parameter"):
        raise ValueError(f'expected split to be "element", "parameter" or None, got {split!r}')
    if split == "element" and kind is not None and kind.scope == "parameter":
        raise ValueError(f'{name} needs each full parameter: pass split="parameter", or leave split out')
    if split is not None:
        return split
    if kind is not None:
        return "element" if kind.scope == "element" else "parameter"
    raise ValueError(
        f'whether {name} updates each element by itself is not known: pass OffloadOptimizer(..., split="element") if '
        'it does, or split="parameter" if it updates each parameter by itself'
    )


def host_counts(sizes: Sequence[int], wanted: int, multiples: Sequence[int]) -> list[int]:
    """How many of each parameter's first elements have their state on the host: about `wanted` in all.

    The last parameters come first: their gradients are ready first in a backward pass, and their new values are needed
    last in the next forward. At most one parameter is split, at a multiple of its `multiple` (0: it can't be split).

        >>> host_counts([100, 100, 100], wanted=130, multiples=[1, 1, 1])
        [0, 30, 100]
        >>> host_counts([100, 100, 100], wanted=130, multiples=[64, 64, 64])
        [0, 0, 100]
        >>> host_counts([100, 100, 100], wanted=170, multiples=[0, 0, 0])
        [0, 100, 100]
    """
    counts = [0] * len(sizes)
    left = wanted
    for index in reversed(range(len(sizes))):
        size, multiple = sizes[index], multiples[index]
        if size <= left:
            counts[index] = size
        elif multiple:
            counts[index] = min(size, (left + multiple // 2) // multiple * multiple)
            break
        elif left > 0 and size < 2 * left:
            counts[index] = size  # nearer to `wanted` with it than without
            break
        left -= counts[index]
    return counts


def chunk_ranges(numel: int, most: int) -> list[tuple[int, int]]:
    """Ranges of at most `most` elements that make up `[0, numel)`; one if it is empty.

    >>> chunk_ranges(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    return [(start, min(start + most, numel)) for start in range(0, max(numel, 1), most)]
