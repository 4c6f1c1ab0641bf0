"""An input whose communication into the divided region is deferred to the first product with it.

The forward of a module that exists already can't be changed where it is divided, but the first linear layer that reads
its input can overlap that input's gather with its own product (see `collective_matmul`). Other readers get what that
layer has gathered, or gather it without overlap, with the same numbers. Where a checkpoint computes a reader again, it
works as in the forward, whatever else is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from scale_core.comm.group import Group
from scale_core.hooks.autograd import in_backward
from scale_tp.async_tp.all_reduce_matmul import linear_with_grad_all_reduce
from scale_tp.async_tp.chunks import SequenceChunks
from scale_tp.async_tp.collective_matmul import all_gather_linear, chunk_sequence
from scale_tp.comm import copy_to_region, gather_sequence


class DeferredInput:
    """An input that is the same on all ranks or, with `sequence_dim`, this rank's part of the sequence."""

    def __init__(self, input: Tensor, group: Group, sequence_dim: int | None, pieces: int) -> None:
        self.input, self.group = input, group
        self.chunks: SequenceChunks | None = None
        if sequence_dim is not None:
            self.chunks = chunk_sequence("overlap", input, group, sequence_dim, None, pieces)
        self.keeps_graph = torch.is_grad_enabled()
        self._inside: Tensor | None = None
        self._in_backward = self._began_in_backward = in_backward()
        self._first: nn.Module | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape inside of the region."""
        shape = tuple(self.input.shape)
        return shape if self.chunks is None else self.chunks.shape(shape, sum(self.chunks.sizes))

    @property
    def is_available(self) -> bool:
        """Whether it was brought in in this pass: a recomputation does not keep the forward's input."""
        if self._in_backward != in_backward():
            self._in_backward, self._inside = in_backward(), None
        return self._inside is not None

    def gather(self) -> Tensor:
        """Returns the input inside of the region, for functions that do not multiply it."""
        if self.is_available and self._inside is not None:
            return self._inside
        with torch.set_grad_enabled(self.keeps_graph):
            if self.chunks is None:
                self._inside = copy_to_region(self.input, self.group)
            else:
                self._inside = gather_sequence(self.input, self.group, self.chunks.dim, self.chunks.sizes)
            return self._inside

    def is_fused_with(self, reader: nn.Module) -> bool:
        """Whether a reader's product brings it in: the first one's, if that keeps a graph as the input does."""
        if in_backward() and not self._began_in_backward:
            return reader is self._first
        return not self.is_available and torch.is_grad_enabled() == self.keeps_graph

    def fused_linear(self, reader: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product with a weight [outputs of this rank, features], which brings the input in meanwhile."""
        assert self.is_fused_with(reader), "an input that is here already is multiplied as any tensor"
        self._first = reader
        if self.chunks is None:
            self._inside, output = linear_with_grad_all_reduce(self.input, weight, bias, self.group)
        else:
            self._inside, output = all_gather_linear(self.chunks, self.input, [weight], [bias], keeps=True)
        return output


class DeferredInputTensor(Tensor):
    """A deferred input in the place of a tensor, for a module that hands it on to divided layers.

    It has the full shape, which such modules read; every other use gathers it first.
    """

    deferred: DeferredInput

    @staticmethod
    def __new__(cls, deferred: DeferredInput) -> Self:
        input = deferred.input
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            deferred.shape,
            dtype=input.dtype,
            device=input.device,
            requires_grad=input.requires_grad and deferred.keeps_graph,
        )
        with torch._C.DisableTorchFunctionSubclass():
            if wrapper.requires_grad:
                wrapper.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        wrapper.deferred = deferred
        lazy_input: Self = wrapper
        return lazy_input

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers questions of the shape, and gives every other function the gathered input."""
        if func in _KNOWN_FROM_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(cls, lambda each: each.deferred.gather(), (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has it without the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reads through torch's functions do not get here."""
        raise RuntimeError(f"{func}{_NOT_GATHERED}")


_KNOWN_FROM_SHAPE = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    ]
)
_NOT_GATHERED = (
    " was given the sequence before it was gathered: a module around divided layers hands its input to something that "
    "is not a function of torch, to a reentrant checkpoint, or to a module with a hook of register_full_backward_hook: "
    "multiply it by 1 before, or pass overlap_pieces=None"
)


def _refuse_gradient(gradient: Tensor) -> Tensor:
    """A gradient of this stand-in for the gathered input would be lost."""
    raise RuntimeError(f"a torch.autograd.Function{_NOT_GATHERED}")
