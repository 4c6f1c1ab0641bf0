"""Where the optimizer's state of each parameter stands, and how it looks as if it stood in one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core.optim.traits import KINDS
from scale_core.shard import title_of
from scale_core.streams import on_host
from scale_fsdp.offload.host_kernel import laid_out_as

_HOST = torch.device("cpu")


class Part:
    """The elements of a parameter whose state stands in one place.

    Args:
        param: The parameter.
        group: The parameter group that holds it: the live one, with its options of now.
        start: First element, in row-major order.
        stop: One past the last.
        on_host: Whether the state is on the host, or on the parameter's device.
        divisible: Whether the update can be done in pieces [n]: the optimizer is elementwise, and the parameter one
            range of memory.

    Attributes:
        numel: The number of its elements.
        is_whole: Whether it is all of the parameter.
        shape: The parameter's, or (stop - start,) where it is a part of one.
        state: What the optimizer remembers: tensors of `shape`, and numbers.
        target: What the parameter's new values are cast to, of the parameter's shape; None is nowhere.
    """

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
        self.target: Tensor | None = None
        self._next: dict[str, Any] = {}  # What the state gets when the last piece has made its step.

    @property
    def grad(self) -> Tensor:
        """The parameter's gradient, which it must have."""
        assert self.param.grad is not None, "a part is updated without a gradient"
        return self.param.grad

    def has_gradient(self) -> bool:
        """Whether there is a gradient to step on.

        Raises:
            RuntimeError: It is sparse, and would have to be cut or copied.
        """
        grad = self.param.grad
        if grad is not None and grad.is_sparse and (self.on_host or not self.is_whole):
            raise RuntimeError(
                f"the gradient of {title_of(self.param)} is sparse, and only dense ones go to the host: build the "
                "embedding with sparse=False, or give its parameters an optimizer of their own"
            )
        return grad is not None

    def stands_on_host(self) -> bool:
        """Whether the parameter itself is on the host, with all that its update needs, where that can be used."""
        return on_host(self.param) and is_dense(self.param) and (self.target is None or on_host(self.target))

    def of(self, tensor: Tensor) -> Tensor:
        """Returns its elements of a tensor of the parameter's shape, in its own shape; all are the tensor itself."""
        return tensor if self.is_whole else tensor.detach().reshape(-1)[self.start : self.stop]

    def state_of(self, start: int, stop: int) -> dict[str, Any]:
        """Returns the state of a piece [stop - start] of it, counted from its own start.

        All of it is the live state. Otherwise, the numbers are copies: each piece counts a step, but all of them
        together make one, so the last piece's numbers are kept.
        """
        if stop - start == self.numel:
            return self.state
        return {
            key: value.view(-1)[start:stop] if self._is_elementwise(value) else _copy(value)
            for key, value in self.state.items()
        }

    def keep(self, start: int, stop: int, state: dict[str, Any]) -> None:
        """Takes over the state of a piece after its step; pieces come in order, from first to last."""
        if state is self.state:
            return
        for key, value in state.items():
            if not (isinstance(value, Tensor) and value.dim() == 1 and value.numel() == stop - start):
                self._next[key] = value
                continue
            mine = self.state.get(key, self._next.get(key))
            if mine is None:
                mine = self._next[key] = torch.empty(self.shape, dtype=value.dtype, device=value.device)
            if not mine.view(-1)[start:stop].is_set_to(value):
                mine.view(-1)[start:stop].copy_(value)
        if stop == self.numel:
            self.state.update(self._next)
            self._next = {}

    def place(self, values: dict[str, Any]) -> None:
        """Takes over a state that was saved, or made elsewhere: tensors of the parameter's shape, and numbers."""
        self.state = {key: self._placed(key, value) for key, value in values.items()}

    def _placed(self, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        device = _HOST if self.on_host else self.param.device
        if not self.is_whole and value.shape == self.param.shape:
            return self.of(value).to(device, copy=True)
        if not self.is_whole:
            value = value.clone()  # Each part counts for itself.
        if key == "step" and not self.on_host and not (self.group.get("fused") or self.group.get("capturable")):
            return value  # torch keeps it where it is.
        value = value.to(device)
        return laid_out_as(self.param, value) if self.on_host and value.shape == self.param.shape else value

    def _is_elementwise(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self.shape


class Placement(NamedTuple):
    """How much optimizer state stands where: elements of parameters, and bytes of state that exists by now."""

    host_elements: int
    device_elements: int
    host_bytes: int
    device_bytes: int


class PlacedState(MutableMapping[Tensor, dict[str, Any]]):
    """An optimizer's `state`, by parameter: what is in two places is put together when it is asked for.

    The state of a parameter that stands in one place is the live one. That of a parameter that was cut is a copy, on
    the host; to change it, assign it.
    """

    def __init__(self) -> None:
        self._parts: dict[Tensor, tuple[Part, ...]] = {}
        self._others: dict[Any, Any] = {}

    def add(self, param: Tensor, parts: Sequence[Part]) -> None:
        """Begins to keep the state of a parameter."""
        self._parts[param] = tuple(parts)

    def parts(self) -> Iterator[Part]:
        """Yields all parts, in the order of the parameters."""
        for parts in self._parts.values():
            yield from parts

    def parts_of(self, param: Tensor) -> tuple[Part, ...]:
        """Returns the parts of a parameter; none, if it is not the optimizer's."""
        return self._parts.get(param, ())

    def placement(self) -> Placement:
        """Returns how much stands where."""
        counts = {True: [0, 0], False: [0, 0]}
        for part in self.parts():
            counts[part.on_host][0] += part.numel
            counts[part.on_host][1] += sum(v.nbytes for v in part.state.values() if isinstance(v, Tensor))
        return Placement(counts[True][0], counts[False][0], counts[True][1], counts[False][1])

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        parts = self._parts.get(param)
        if parts is None:
            found: dict[str, Any] = self._others[param]
            return found
        return parts[0].state if len(parts) == 1 else _joined(parts)

    def __setitem__(self, param: Tensor, values: dict[str, Any]) -> None:
        if param not in self._parts:
            self._others[param] = values
        for part in self.parts_of(param):
            part.place(values)

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
        """Forgets all state, and keeps where new state is to stand."""
        self._others.clear()
        for part in self.parts():
            part.state = {}


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that a tensor has if it is one range of memory, in the order of dimensions that it has."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one range of memory, in any order: fused kernels go through it as such."""
    return tensor.stride() == dense_strides(tensor)


def _joined(parts: Iterable[Part]) -> dict[str, Any]:
    first, *_ = parts = list(parts)
    joined = {}
    for key, value in first.state.items():
        if isinstance(value, Tensor) and value.shape == first.shape:
            value = torch.cat([part.state[key].to(_HOST) for part in parts]).view(first.param.shape)
        joined[key] = value
    return joined


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


Split = Literal["element", "parameter"]


def split_of(optim_cls: type[Optimizer], split: Split | None) -> Split:
    """Returns how the state of an optimizer may be divided.

    Args:
        optim_cls: Its class; a subclass may compute anything, so only the classes in the table are known.
        split: What the user says; needed for classes that are not in the table.

    Raises:
        TypeError: `optim_cls` is no optimizer class.
        ValueError: It can't be divided, not as the user says, or nobody knows how.
    """
    given: object = optim_cls
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        told = f"an {type(given).__name__} that is built already" if isinstance(given, Optimizer) else repr(given)
        raise TypeError(
            f"expected a class of optimizers, got {told}: pass the class first, and its arguments after the "
            "parameters, OffloadOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)"
        )
    name = optim_cls.__name__
    kind = KINDS.get(optim_cls)
    if kind is not None and (kind.scope == "all" or kind.sparse):
        why = "its gradients are sparse, and only dense ones are copied"
        why = why if kind.sparse else f"its direction depends on {kind.needs}"
        raise ValueError(f"{name} can't work in two places: {why}. Use it without OffloadOptimizer")
    if split not in (None, "element", "parameter"):
        raise ValueError(f'expected split to be "element", "parameter" or None, got {split!r}')
    if split == "element" and kind is not None and kind.scope == "parameter":
        raise ValueError(f'{name} needs each parameter as a whole: pass split="parameter", or leave split out')
    if split is not None:
        return split
    if kind is not None:
        return "element" if kind.scope == "element" else "parameter"
    raise ValueError(
        f"whether {name} updates each element by itself is not known: pass "
        'OffloadOptimizer(..., split="element") if it does, split="parameter" if it updates each parameter by itself; '
        "an optimizer that looks at several parameters together can't work in two places"
    )


# Which elements have their optimizer state on the host; integers only.
#
# The last parameters come first: their gradients are the first to be there in a backward pass, and their new values the
# last to be needed in the next forward.


def host_counts(sizes: Sequence[int], wanted: int, multiples: Sequence[int]) -> list[int]:
    """Returns how many of each parameter's first elements go to the host.

    At most one parameter is cut. The sum is `wanted`, up to half of that parameter's `multiple`; where parameters
    can't be cut, it is near to `wanted`, as whole ones allow.

        >>> host_counts([100, 100, 100], wanted=130, multiples=[1, 1, 1])
        [0, 30, 100]
        >>> host_counts([100, 100, 100], wanted=130, multiples=[64, 64, 64])
        [0, 0, 100]
        >>> host_counts([100, 100, 100], wanted=170, multiples=[0, 0, 0])
        [0, 100, 100]

    Args:
        sizes: Elements of each parameter.
        wanted: Elements on the host.
        multiples: Of what number of elements a cut must be a multiple, for each parameter; 0: it can't be cut.
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
            counts[index] = size  # Nearer to what is wanted with it than without.
            break
        left -= counts[index]
    return counts


def ranges(numel: int, most: int) -> list[tuple[int, int]]:
    """Returns `[0, numel)` in consecutive ranges of at most `most` elements; one, if it is empty.

    >>> ranges(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    return [(start, min(start + most, numel)) for start in range(0, max(numel, 1), most)]
