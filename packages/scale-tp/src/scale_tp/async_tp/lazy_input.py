"""An input on its way into the divided region, which is multiplied while its communication runs.

Who divides a module that exists already can't tell it to multiply in another way, but knows which linear layer comes
first. So what goes into the region is not brought there at once: the first divided layer that reads it does that
together with its own product, beside which the communication runs (see `collective_matmul`). Whoever else reads it gets
what that layer has brought, or brings it as without overlap; so what is read by whom changes no number. Where a
checkpoint computes a reader again, it does what it did in the forward, whoever else is computed again with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from scale_core.autograd_hooks import in_backward
from scale_core.comm.group import Group
from scale_tp.async_tp.all_reduce_matmul import copied_linear
from scale_tp.async_tp.collective_matmul import cut_of_part, linear_of_gathered
from scale_tp.mappings import copy_to_model_parallel_region, gather_from_sequence_parallel_region


class Arrival:
    """An input of divided layers that are to overlap their communication.

    Args:
        outside: What comes: the same on all ranks or, with a dimension, this rank's part of the sequence.
        group: The ranks.
        sequence_dim: The dimension of the sequence, of which each rank has a part; None where all have all of it.
        pieces: Into how many each rank's part is cut.
    """

    def __init__(self, outside: Tensor, group: Group, sequence_dim: int | None, pieces: int) -> None:
        self.outside, self.group = outside, group
        self.cut = None if sequence_dim is None else cut_of_part("overlap", outside, group, sequence_dim, None, pieces)
        self.keeps_graph = torch.is_grad_enabled()
        self._inside: Tensor | None = None
        self._in_backward = self._began_in_backward = in_backward()
        self._first: nn.Module | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it will be inside."""
        shape = tuple(self.outside.shape)
        return shape if self.cut is None else self.cut.shape(shape, sum(self.cut.sizes))

    @property
    def has_arrived(self) -> bool:
        """Whether somebody has read it, in this pass: what the forward brought is no longer kept in a recomputation."""
        if self._in_backward != in_backward():
            self._in_backward, self._inside = in_backward(), None
        return self._inside is not None

    def whole(self) -> Tensor:
        """Returns the input inside of the region, for whoever does not multiply it."""
        if self.has_arrived and self._inside is not None:
            return self._inside
        with torch.set_grad_enabled(self.keeps_graph):
            if self.cut is None:
                self._inside = copy_to_model_parallel_region(self.outside, self.group)
            else:
                self._inside = gather_from_sequence_parallel_region(
                    self.outside, self.group, dim=self.cut.dim, sizes=self.cut.sizes
                )
            return self._inside

    def arrives_with(self, reader: nn.Module) -> bool:
        """Whether it arrives beside a reader's product: the first one's, if that keeps a graph as the input."""
        if in_backward() and not self._began_in_backward:
            return reader is self._first
        return not self.has_arrived and torch.is_grad_enabled() == self.keeps_graph

    def multiplied(self, reader: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns its product with a weight, beside which it arrives.

        Args:
            reader: The layer that multiplies, with which it has to arrive.
            weight: [outputs of this rank, features].
            bias: [outputs of this rank], or None.
        """
        assert self.arrives_with(reader), "what is here already is multiplied as any tensor"
        self._first = reader
        if self.cut is None:
            self._inside, output = copied_linear(self.outside, weight, bias, self.group)
        else:
            self._inside, output = linear_of_gathered(self.cut, self.outside, [weight], [bias], keeps=True)
        return output


class ArrivingTensor(Tensor):
    """An arrival in the place of a tensor, for a module that hands it on to divided layers.

    It has the shape of the whole. Whatever else is asked of it brings the whole here first.
    """

    arrival: Arrival

    @staticmethod
    def __new__(cls, arrival: Arrival) -> Self:
        outside = arrival.outside
        made = Tensor._make_wrapper_subclass(
            cls,
            arrival.shape,
            dtype=outside.dtype,
            device=outside.device,
            requires_grad=outside.requires_grad and arrival.keeps_graph,
        )
        with torch._C.DisableTorchFunctionSubclass():
            if made.requires_grad:
                made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        made.arrival = arrival
        found: Self = made
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers what the shape tells, and gives everything else the whole."""
        if func in _TOLD_BY_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(ArrivingTensor, _whole_of, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has it without the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nobody gets here who reads it through torch's functions."""
        raise RuntimeError(f"{func}{_TOLD_TO_OTHERS}")


_TOLD_BY_THE_SHAPE = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    ]
)
_TOLD_TO_OTHERS = (
    " was given the sequence before it was gathered: a module around divided layers hands its input to something that "
    "is no function of torch, to a reentrant checkpoint, or to a module with a hook of register_full_backward_hook: "
    "multiply it by 1 before, or pass overlap_pieces=None"
)


def _whole_of(tensor: ArrivingTensor) -> Tensor:
    return tensor.arrival.whole()


def _refuse_gradient(gradient: Tensor) -> Tensor:
    """A gradient of what only stands for the whole would go nowhere."""
    raise RuntimeError(f"a torch.autograd.Function{_TOLD_TO_OTHERS}")
