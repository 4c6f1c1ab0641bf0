"""Linear layers at the edges of the divided region: what the layers and the divided modules of this package compute.

Into the region goes a column parallel layer, `enter` and `column_product`; out of it a row parallel one, `row_total`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.group import Group
from scale_tp.arrivals import Arrival, ArrivingTensor
from scale_tp.copies import has_copies, sum_gradients_of_copies
from scale_tp.overlap import linear_scatter
from scale_tp.overlap_sums import linear_sum
from scale_tp.regions import (
    copy_all_to_model_parallel_region,
    copy_to_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from scale_tp.sequence_parts import sequence_dim_of
from scale_tp.split_sizes import Split, check_size


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
