"""Linear layers at the edges of the divided region: what the layers and the divided modules of this package compute.

Into the region goes a column parallel layer, `enter` and `column_product`; out of it a row parallel one, `row_total`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group
from scale_core.compat import untraced
from scale_tp.async_tp.all_reduce_matmul import linear_sum
from scale_tp.async_tp.collective_matmul import linear_scatter
from scale_tp.async_tp.lazy_input import Arrival, ArrivingTensor
from scale_tp.autograd_regions import entered_with
from scale_tp.mappings import (
    copy_all_to_model_parallel_region,
    copy_to_model_parallel_region,
    gather_from_sequence_parallel_region,
    has_copies,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    sum_gradients_of_copies,
)
from scale_tp.sequence_lengths import sequence_dim_of
from scale_tp.split import Split, check_size


def check_overlap(overlap_pieces: int | None) -> None:
    """Refuses a number of pieces that is none.

    Raises:
        TypeError: It is no integer.
        ValueError: It is below 1.
    """
    if overlap_pieces is not None:
        check_size("overlap_pieces", overlap_pieces, 1)


def enter(input: Tensor, group: Group, sequence_dim: int | None, overlap_pieces: int | None) -> Tensor | Arrival:
    """Brings an input into the divided region, or has it brought by the first product with it.

    Args:
        input: [..., features], the same on all ranks or, with a dimension of the sequence, this rank's part.
        group: The ranks.
        sequence_dim: The dimension of the sequence, of which all parts are gathered; None where all ranks have all.
        overlap_pieces: Into how many pieces each part is cut, to overlap the communication; None does not.

    Raises:
        TransferError: A rank did not take part.
        ValueError: There is no such dimension of a sequence.
    """
    if sequence_dim is not None:
        sequence_dim = sequence_dim_of("sequence_parallel=True", "sequence_dim", input.shape, sequence_dim)
    if group.size > 1 and overlap_pieces is not None and not torch.compiler.is_compiling():
        return Arrival(input, group, sequence_dim, overlap_pieces)
    if sequence_dim is None:
        return copy_to_model_parallel_region(input, group)
    return gather_from_sequence_parallel_region(input, group, dim=sequence_dim)


def column_product(
    inside: Tensor | Arrival,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    split: Split,
    *,
    reader: nn.Module,
    transposed: bool = False,
) -> Tensor:
    """Returns [..., outputs of this rank] for what has been brought into the divided region.

    Args:
        inside: [..., features].
        weight: [outputs of this rank, features]; ranks with copies of one part sum its gradient.
        bias: [outputs of this rank], or None.
        group: The ranks.
        split: Which outputs each rank has.
        transposed: Whether the weight is [features, outputs of this rank].
    """
    if has_copies(split):
        weight = sum_gradients_of_copies(weight, group, split)
        bias = None if bias is None else sum_gradients_of_copies(bias, group, split)
    if isinstance(inside, ArrivingTensor):
        inside = inside.arrival
    if isinstance(inside, Arrival):
        if inside.arrives_with(reader):
            return inside.multiplied(reader, weight.mT if transposed else weight, bias)
        inside = inside.whole()
    return product(inside, weight, bias, transposed=transposed)


def row_total(
    inside: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    *,
    sequence_dim: int | None,
    overlap_pieces: int | None,
    transposed: bool = False,
) -> Tensor:
    """Returns the sum over the ranks of what each rank's features give, [..., outputs], and a bias.

    Args:
        inside: [..., features of this rank].
        weight: [outputs, features of this rank].
        bias: [outputs], or None.
        group: The ranks.
        sequence_dim: The dimension of the sequence, of which each rank gets its part; None gives all ranks all.
        overlap_pieces: Into how many pieces the work is cut, to overlap the communication; None does not.
        transposed: Whether the weight is [features of this rank, outputs].

    Raises:
        TransferError: A rank did not take part.
        ValueError: There is no such dimension of a sequence.
    """
    if sequence_dim is not None:
        sequence_dim = sequence_dim_of("sequence_parallel=True", "sequence_dim", inside.shape, sequence_dim)
    overlaps = group.size > 1 and overlap_pieces is not None and not torch.compiler.is_compiling()
    if overlaps:
        assert overlap_pieces is not None
        factor = weight.mT if transposed else weight
        if sequence_dim is None:
            total = linear_sum(inside, factor, group, overlap_pieces)
        else:
            total = linear_scatter(inside, factor, group, dim=sequence_dim, pieces=overlap_pieces)
    else:
        summand = product(inside, weight, None, transposed=transposed)
        if sequence_dim is None:
            total = reduce_from_model_parallel_region(summand, group)
        else:
            total = reduce_scatter_to_sequence_parallel_region(summand, group, dim=sequence_dim)
    if bias is None:
        return total
    if sequence_dim is not None:  # Each rank adds it to its own part, so its gradient is a sum over the ranks.
        (bias,) = copy_all_to_model_parallel_region(bias, group=group)
    return total + bias


def product(input: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    """Computes a linear layer with a weight [outputs, features], or one that is transposed."""
    if not transposed:
        return F.linear(input, weight, bias)
    flat = input.reshape(-1, input.shape[-1])
    output = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return output.view(*input.shape[:-1], weight.shape[1])


def check_features(layer: str, input_: Any, expected: int, *, mend: str = "") -> None:
    """Refuses what is no tensor, and an input of another last dimension.

    Args:
        layer: In an error.
        input_: [..., features].
        expected: How many features there have to be.
        mend: What to write instead, in an error.

    Raises:
        TypeError: It is no tensor, and none on its way.
        ValueError: It has another last dimension.
    """
    if not isinstance(input_, Tensor | Arrival):
        raise TypeError(f"{layer}: expected a tensor [..., {expected}], got {type(input_).__name__}")
    if not input_.shape or input_.shape[-1] != expected:
        hint = f": {mend}" if mend else ""
        raise ValueError(f"{layer}: expected an input [..., {expected}], got {list(input_.shape)}{hint}")


@untraced
def check_parts(what: str, input_: Tensor, group: Group, split: Split, fitting: int | None, *, mend: str) -> int:
    """Refuses an input of a row parallel layer that other ranks have divided, or in another way.

    Args:
        what: The layer, in an error.
        input_: [..., features of this rank].
        group: The ranks that divide the layer.
        split: Which features each of them has.
        fitting: What this has returned for the layer before. Only the first time, all ranks ask each other: one rank
            alone, whose input has changed, would wait for the others in vain.
        mend: What to write instead, in an error.

    Returns:
        The number of features, which fits.

    Raises:
        TransferError: A rank did not answer.
        TypeError: The input is no tensor.
        ValueError: The input does not fit, on this rank or, the first time, on another one.
    """
    given: object = input_
    if not isinstance(given, Tensor):
        raise TypeError(f"{what}: expected a tensor [..., {split.sizes[group.rank]}], got {type(given).__name__}")
    width = input_.shape[-1] if input_.dim() else 0
    if width == fitting:
        return width
    others = [ranks for ranks in entered_with(input_) if ranks.ranks != group.ranks]
    if others:
        raise ValueError(
            f"{what}: the layer is divided between ranks {list(group.ranks)}, but its input comes "
            f"from layers that are divided between ranks {list(others[0].ranks)}: give both the same group, or let "
            "the layer before gather its output, and pass the whole to one with input_is_parallel=False"
        )
    asks = fitting is None and group.backend != "fake"
    widths = [row[0] for row in exchange([width], group)] if asks else None
    expected = split.sizes
    if width != expected[group.rank] or (widths is not None and tuple(widths) != expected):
        raise ValueError(
            f"{what}: expected the {split.total} input features to be divided as {list(expected)} between the ranks, "
            f"got {widths or width} of them: {mend}"
        )
    return width
