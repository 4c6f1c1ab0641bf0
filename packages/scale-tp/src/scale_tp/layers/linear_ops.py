"""Functional column- and row-parallel linear layers, which the layers and the divided modules of this package share.

Into the region that is divided between ranks goes `to_region` and `column_parallel_linear`; out of it
`row_parallel_linear`. Modules that read one input bring it in together (`SharedInput`), so its gradient is summed once.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_core.compat import untraced
from scale_core.hooks.autograd import in_backward
from scale_core.hooks.module_parts import ForEachShardHook
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.async_tp.all_reduce_matmul import linear_all_reduce
from scale_tp.async_tp.collective_matmul import linear_scatter
from scale_tp.async_tp.lazy_input import DeferredInput, DeferredInputTensor
from scale_tp.comm import (
    RegionEntry,
    RegionExit,
    accumulation_dtype,
    apply,
    call_tag,
    copy_many_to_region,
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
)
from scale_tp.sequence_lengths import check_sequence_dim
from scale_tp.split import Split

SEQUENCE_DIM = 1
"""The dimension of the sequence between the modules of transformers: [batch, sequence, width]."""


def to_region(
    input: Tensor, group: Group, sequence_dim: int | None, overlap_pieces: int | None
) -> Tensor | DeferredInput:
    """Brings an input [..., features] into the divided region: copies it, or gathers the sequence along a dimension.

    With `overlap_pieces` the first product with it does that, while its communication runs.
    """
    if sequence_dim is not None:
        sequence_dim = check_sequence_dim("sequence_parallel=True", "sequence_dim", input.shape, sequence_dim)
    if group.size > 1 and overlap_pieces is not None and not torch.compiler.is_compiling():
        return DeferredInput(input, group, sequence_dim, overlap_pieces)
    if sequence_dim is None:
        return copy_to_region(input, group)
    return gather_sequence(input, group, sequence_dim)


def column_parallel_linear(
    input: Tensor | DeferredInput,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    split: Split,
    *,
    reader: nn.Module,
    transposed: bool = False,
) -> Tensor:
    """Returns [..., outputs of this rank] for an input [..., features] inside of the region.

    The weight is [outputs of this rank, features], or transposed; ranks with copies of one part sum its gradient.
    """
    if split.has_copies:
        weight = reduce_grads_of_copies(weight, group, split)
        bias = None if bias is None else reduce_grads_of_copies(bias, group, split)
    if isinstance(input, DeferredInputTensor):
        input = input.deferred
    if isinstance(input, DeferredInput):
        if input.is_fused_with(reader):
            return input.fused_linear(reader, weight.mT if transposed else weight, bias)
        input = input.gather()
    return linear(input, weight, bias, transposed=True) if transposed else F.linear(input, weight, bias)


def row_parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    *,
    sequence_dim: int | None,
    overlap_pieces: int | None,
    transposed: bool = False,
) -> Tensor:
    """Returns [..., outputs]: the sum over the ranks of the products of their features, and the bias once.

    The input is [..., features of this rank], the weight [outputs, features of this rank] or transposed. With a
    `sequence_dim` each rank gets its part of the sequence; with `overlap_pieces` sums overlap with products.
    """
    if sequence_dim is not None:
        sequence_dim = check_sequence_dim("sequence_parallel=True", "sequence_dim", input.shape, sequence_dim)
    if group.size > 1 and overlap_pieces is not None and not torch.compiler.is_compiling():
        factor = weight.mT if transposed else weight
        if sequence_dim is None:
            total = linear_all_reduce(input, factor, group, overlap_pieces)
        else:
            total = linear_scatter(input, factor, group, dim=sequence_dim, pieces=overlap_pieces)
    else:
        summand = linear(input, weight, None, transposed=True) if transposed else F.linear(input, weight)
        if sequence_dim is None:
            total = reduce_from_region(summand, group)
        else:
            total = reduce_scatter_sequence(summand, group, sequence_dim)
    if bias is None:
        return total
    if sequence_dim is not None:  # Each rank adds it to its own shard, so its gradient is a sum over the ranks.
        (bias,) = copy_many_to_region([bias], group)
    return total + bias


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    """A linear layer with a weight [outputs, features], or a transposed one."""
    if not transposed:
        return F.linear(input, weight, bias)
    # Autograd keeps the factor as it is: a plain one has this rank's shape in the checks of a checkpoint, too.
    rows, weight = input.reshape(-1, input.shape[-1]), local_tensor(weight)
    output = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return output.view(*input.shape[:-1], weight.shape[1])


class SharedInput(ForEachShardHook):
    """The input of several column-parallel modules, which is brought into the region once.

    Modes: "copy" an input that all ranks have; "gather" a divided sequence; "inside" if it is there already.
    """

    def __init__(
        self,
        group: Group,
        num_readers: int,
        mode: Literal["copy", "gather", "inside"],
        overlap_pieces: int | None = None,
    ) -> None:
        self.group, self.num_readers, self.mode, self.overlap_pieces = group, num_readers, mode, overlap_pieces
        self.sequence_dim = None if mode == "copy" else SEQUENCE_DIM
        self._inside: tuple[object, Tensor, Tensor | DeferredInput] | None = None
        self._num_left = 0
        self._first_readers: WeakSet[nn.Module] = WeakSet()  # of some input each, in the last forward

    def to_region(self, input: Tensor, reader: nn.Module) -> Tensor | DeferredInput:
        """Returns the input inside of the region; the same tensor for each module that brings the same input."""
        if self.mode == "inside":
            return input
        if self.num_readers == 1:
            return to_region(input, self.group, self.sequence_dim, self.overlap_pieces)
        # A tensor that was changed, or is used for another purpose, is another one.
        state = (input._version if not input.is_inference() else 0, torch.is_grad_enabled())
        entered, self._inside = self._inside, None
        # Where a checkpoint computes some readers again, each works as in the forward.
        is_first_again = in_backward() and reader in self._first_readers
        if entered is not None and entered[0] == state and entered[1] is input and not is_first_again:
            inside = entered[2]
            if not in_backward():
                self._first_readers.discard(reader)
        else:
            inside, self._num_left = self._bring_in(input, reader), self.num_readers
        self._num_left -= 1
        if self._num_left > 0:  # The last one leaves nothing behind.
            self._inside = (state, input, inside)
        return inside

    def reset(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the module that holds the readers: some of them may not have read."""
        self._inside = None

    def _bring_in(self, input: Tensor, reader: nn.Module) -> Tensor | DeferredInput:
        overlap_pieces = self.overlap_pieces
        if not in_backward():
            self._first_readers.add(reader)
        elif reader not in self._first_readers:  # A checkpoint of it alone: the forward did not overlap it either.
            overlap_pieces = None
        return to_region(input, self.group, self.sequence_dim, overlap_pieces)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_first_readers"}
        return {**state, "_inside": None, "_num_left": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _first_readers=WeakSet())


def region_groups(tensor: Tensor) -> list[Group]:
    """Returns the ranks of the regions that a tensor was computed in, back to where each was entered; mostly one."""
    groups: dict[Group, None] = {}
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", object)
        if issubclass(function, RegionEntry):
            groups[node.group] = None
        elif not issubclass(function, RegionExit):
            stack += [before for before, _ in node.next_functions]
    return list(groups)


@untraced
def check_in_region(what: str, tensor: Tensor, group: Group) -> bool:
    """Refuses a tensor that was never brought into the region, so that its gradient would not be summed.

    Returns whether it is known to be inside: one that needs no gradient, or is computed again, may be anything.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    if any(ranks.ranks == group.ranks for ranks in region_groups(tensor)):
        return True
    if tensor.grad_fn is None and in_backward():
        return False
    raise ValueError(
        f"{what}: input_is_inside=True, but the input {list(tensor.shape)} was not brought into the region of "
        f"{list(group.ranks)}: pass scale_tp.megatron.copy_to_tensor_model_parallel_region(input, group), or leave it "
        "out"
    )


def check_num_features(layer: str, input: Any, expected: int, *, fix: str = "") -> None:
    """Refuses a value that is not a tensor, and an input with a last dimension other than `expected`."""
    if not isinstance(input, Tensor | DeferredInput):
        raise TypeError(f"{layer}: expected a tensor [..., {expected}], got {type(input).__name__}")
    if not input.shape or input.shape[-1] != expected:
        hint = f": {fix}" if fix else ""
        raise ValueError(f"{layer}: expected an input [..., {expected}], got {list(input.shape)}{hint}")


@untraced
def check_parallel_input(
    layer: str, input: Tensor, group: Group, split: Split, checked_width: int | None, *, fix: str
) -> int:
    """Refuses an input of a row-parallel layer that is divided between other ranks, or in another way.

    Returns the number of features, which the caller passes as `checked_width` the next time. Only the first time all
    ranks ask each other: one rank alone, whose input has changed later, would wait in vain.
    """
    argument: object = input
    if not isinstance(argument, Tensor):
        raise TypeError(f"{layer}: expected a tensor [..., {split.sizes[group.rank]}], got {type(argument).__name__}")
    width = input.shape[-1] if input.dim() else 0
    if width == checked_width:
        return width
    others = [ranks for ranks in region_groups(input) if ranks.ranks != group.ranks]
    if others:
        raise ValueError(
            f"{layer}: the layer is divided between ranks {list(group.ranks)}, but its input comes from layers that "
            f"are divided between ranks {list(others[0].ranks)}: give both the same group, or let the layer before "
            "gather its output, and pass the full output to one with input_is_parallel=False"
        )
    asks = checked_width is None and group.backend != "fake"
    widths = [row[0] for row in exchange([width], group)] if asks else None
    expected = split.sizes
    if width != expected[group.rank] or (widths is not None and tuple(widths) != expected):
        raise ValueError(
            f"{layer}: expected the {split.total} input features to be divided as {list(expected)} between the ranks, "
            f"got {widths or width} of them: {fix}"
        )
    return width


# Parameters that some ranks hold copies of: key-value heads where there are fewer of them than ranks. Each rank with a
# copy computes with other query heads, so each has a summand of the gradient. They add in rank order, so that copies
# stay equal to the bit.


def reduce_grads_of_copies(param: Tensor, group: Group, split: Split) -> Tensor:
    """Identity of a parameter, with an all-reduce of its gradient over the ranks that hold a copy."""
    if group.size == 1 or not split.has_copies:
        return param
    holders = [rank for rank, ranges in enumerate(split.ranges) if ranges == split.ranges[group.rank]]
    summed: Tensor = apply(_ReduceCopies, param, group, holders)
    return summed


class _ReduceCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, group: Group, holders: list[int]) -> Tensor:
        ctx.group, ctx.holders = group, holders
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce_copies(grad, ctx.group, ctx.holders), None, None


def all_reduce_copies(tensor: Tensor, group: Group, holders: list[int]) -> Tensor:
    """Returns the sum over some ranks of the group, each with its own; all ranks of the group call it."""
    flat = tensor.contiguous().view(-1)
    others = [rank for rank in holders if rank != group.rank]
    sizes = [flat.numel() if rank in others else 0 for rank in range(group.size)]
    received, sent = flat.new_empty(sum(sizes)), flat.repeat(len(others))
    tag = call_tag("gradients of copies", flat.dtype, tuple(tensor.shape))
    all_to_all(received, sent, group, output_sizes=sizes, input_sizes=sizes, tag=tag).wait()
    parts = dict(zip(others, received.split(flat.numel()) if others else (), strict=True))
    parts[group.rank] = flat
    total = torch.zeros(flat.shape, dtype=accumulation_dtype(flat.dtype), device=flat.device)
    for rank in sorted(parts):
        total += parts[rank]
    return total.to(tensor.dtype).view(tensor.shape)
