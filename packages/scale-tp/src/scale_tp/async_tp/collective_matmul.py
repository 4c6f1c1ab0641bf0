"""Linear layers whose communication runs beside their own matrix products.

Where a sequence parallel layer gathers its input, what this rank has can be multiplied while the rest is on its way;
where it scatters a sum, what the others are to have is computed first, and travels while the rest is computed. So the
work is cut along the sequence: into the ranks' parts, and those of the others into `pieces`. In the backward pass of
the first, the gradient of the input travels while that of the weight is computed; in that of the second, the gradient
is gathered, and multiplied as it comes. (Known as asynchronous or micro-pipelined tensor parallelism, and as
decomposed collectives: Wang et al., ASPLOS 2023.)

The numbers are those of the layers without overlap, sums in the same order: to the bit where the kernel of a matrix
product treats a row alike however many rows there are. Gradients of weights are one product, as without.
Gradients of gradients do not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.comm.group import GroupLike
from scale_tp.async_tp.chunks import (
    Cut,
    Place,
    dtype_of_products,
    multiply,
    multiply_gathered,
    multiply_scattered,
    rows_of,
    without_autocast,
)
from scale_tp.autograd_regions import Entering, Leaving, cross, divides
from scale_tp.comm import begin_gather, begin_sum_scatter
from scale_tp.parallel_state import layer_group
from scale_tp.sequence_lengths import explained, parts_held, sequence_dim_of, tell_parts
from scale_tp.split import check_size, even_sizes


def gather_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    group: GroupLike = None,
    *,
    biases: Sequence[Tensor | None] | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    pieces: int = 1,
) -> tuple[Tensor, ...]:
    """Multiplies the whole sequence, of which each rank has a part, with several weights, as its parts arrive.

    What a column parallel layer does under sequence parallelism; queries, keys and values take one gather together. The
    gathered input is not kept: in the backward pass it is gathered once more, beside the product of its gradient.

    Args:
        input: [..., positions of this rank, ..., features].
        weights: [outputs of this rank, features] each.
        group: The ranks; None is the model axis.
        biases: [outputs of this rank] or None, for each weight; None is none at all.
        dim: The dimension of the sequence.
        sizes: How many positions each rank has; None is as the sequence was divided, and asks where it is not known.
        pieces: Into how many each rank's part is cut.

    Returns:
        For each weight [..., all positions, ..., outputs of this rank].

    Raises:
        TransferError: A rank did not take part.
        ValueError: `pieces` is below 1, or `sizes`, `dim` or the dtypes do not fit.
    """
    cut = cut_of_part("gather_linear", input, layer_group(group), dim, sizes, pieces)
    return linear_of_gathered(cut, input, weights, [None] * len(weights) if biases is None else biases, keeps=False)


def linear_scatter(
    input: Tensor,
    weight: Tensor,
    group: GroupLike = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    pieces: int = 1,
) -> Tensor:
    """Multiplies with a weight, and scatters the sum over the ranks along the sequence, part by part as it is computed.

    What a row parallel layer does under sequence parallelism. In the backward pass the gradient is gathered, and
    multiplied as its parts arrive.

    Args:
        input: [..., all positions, ..., features of this rank].
        weight: [outputs, features of this rank].
        group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: How many positions each rank gets; None is as even as it can be.
        pieces: Into how many each rank's part is cut.

    Returns:
        [..., positions of this rank, ..., outputs]; summands are added in rank order, in fp32 at least.

    Raises:
        TransferError: A rank did not take part.
        ValueError: `pieces` is below 1, or `sizes`, `dim` or the dtypes do not fit.
    """
    ranks = layer_group(group)
    check_size("pieces", pieces, 1)
    dim = sequence_dim_of("linear_scatter", "dim", input.shape, dim)
    known = even_sizes(input.shape[dim], ranks.size) if sizes is None else tuple(sizes)
    if len(known) != ranks.size or sum(known) != input.shape[dim]:
        raise ValueError(
            f"linear_scatter: expected the parts of {ranks.size} ranks, which add up to {input.shape[dim]} positions, "
            f"got {list(known)}"
        )
    tell_parts(ranks, known)
    compute = dtype_of_products(input, [weight])
    found: Tensor = cross(_LinearScatter, Cut(ranks, dim, known, pieces), input.to(compute), weight.to(compute))
    return found


def cut_of_part(what: str, input: Tensor, group: GroupLike, dim: int, sizes: Sequence[int] | None, pieces: int) -> Cut:
    """Returns how a sequence is cut of which this rank has a part [..., positions of this rank, ..., features].

    Raises:
        TransferError: The ranks had to ask each other, and one did not answer.
        ValueError: `pieces` is below 1, or `sizes` or `dim` do not fit.
    """
    ranks = layer_group(group)
    check_size("pieces", pieces, 1)
    dim = sequence_dim_of(what, "dim", input.shape, dim)
    known = parts_held(ranks, input, dim) if sizes is None else tuple(sizes)
    if len(known) != ranks.size or known[ranks.rank] != input.shape[dim]:
        raise ValueError(
            f"{what}: expected the sizes of {ranks.size} ranks, of which rank {ranks.rank} has the "
            f"{input.shape[dim]} positions of its input, got {list(known)}"
        )
    return Cut(ranks, dim, known, pieces)


def linear_of_gathered(
    cut: Cut, part: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keeps: bool
) -> tuple[Tensor, ...]:
    """What `gather_linear` does with a sequence that is cut.

    Args:
        cut: How.
        part: [..., positions of this rank, ..., features].
        weights: [outputs of this rank, features] each.
        biases: [outputs of this rank] or None, for each weight.
        keeps: Whether to keep the gathered input for the backward pass, and return it as well, for others to read.

    Returns:
        With `keeps` the gathered input, then for each weight [..., all positions, ..., outputs of this rank].

    Raises:
        TransferError: A rank did not take part.
        ValueError: The dtypes do not fit.
    """
    compute = dtype_of_products(part, weights)
    factors = [weight.to(compute) for weight in weights]
    summands = [None if bias is None else bias.to(compute) for bias in biases]

    def gather() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = cross(_GatherLinear, cut, keeps, len(weights), part, *factors, *summands)
        return found

    return explained(gather, cut.group, part, cut.dim, cut.sizes)


class _GatherLinear(Entering):
    @staticmethod
    def forward(
        ctx: Any, cut: Cut, keeps: bool, num_weights: int, part: Tensor, *factors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = factors[:num_weights], factors[num_weights:]
        ctx.ranks, ctx.cut, ctx.keeps, ctx.num_weights = cut.group, cut, keeps, num_weights
        ctx.set_materialize_grads(False)
        shape = cut.shape(tuple(part.shape), sum(cut.sizes))
        whole = part.new_empty(shape) if keeps else None
        outputs = [
            part.new_empty((*shape[:-1], weight.shape[0]), dtype=weight.dtype)
            for weight in weights
            if weight is not None
        ]

        def act(place: Place, piece: Tensor) -> None:
            if whole is not None:
                cut.at(whole, place).copy_(piece)
            for output, weight, bias in zip(outputs, weights, biases, strict=True):
                assert weight is not None
                multiply(rows_of(piece).to(weight.dtype), weight.mT, bias, cut.at(output, place))

        with without_autocast(part):
            multiply_gathered(cut, part, act)
        # In the dtype of the products, as autocast keeps it.
        ctx.dtype, compute = part.dtype, outputs[0].dtype if outputs else part.dtype
        ctx.save_for_backward((part if whole is None else whole).to(compute), *weights)
        if whole is None:
            return tuple(outputs)
        if not ctx.needs_input_grad[3]:
            ctx.mark_non_differentiable(whole)
        return whole, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cut: Cut = ctx.cut
        kept, *weights = ctx.saved_tensors
        total, of_outputs = (gradients[0], gradients[1:]) if ctx.keeps else (None, gradients)
        _, _, _, wants_part, *wants = ctx.needs_input_grad
        wants_weights, wants_biases = wants[: ctx.num_weights], wants[ctx.num_weights :]
        with without_autocast(kept):
            gathering = (
                None if ctx.keeps or not any(wants_weights) else begin_gather(kept, cut.group, cut.dim, cut.sizes)
            )
            scattering = None
            if wants_part:
                # In the order in which autograd adds what the readers of one tensor give: the last one first.
                for gradient, weight in reversed(list(zip(of_outputs, weights, strict=True))):
                    if gradient is not None:
                        product = rows_of(gradient) @ weight
                        of_input = product.to(ctx.dtype).view(*gradient.shape[:-1], weight.shape[1])
                        total = of_input if total is None else total + of_input
                assert total is not None, "nobody asks for gradients where there are none"
                scattering = begin_sum_scatter(total, cut.group, cut.dim, cut.sizes)
            whole = kept if gathering is None else gathering.wait()
            rows = rows_of(whole)
            of_weights = [
                rows_of(gradient).mT @ rows.to(gradient.dtype) if wanted and gradient is not None else None
                for gradient, wanted in zip(of_outputs, wants_weights, strict=True)
            ]
            of_biases = [
                rows_of(gradient).sum(0) if wanted and gradient is not None else None
                for gradient, wanted in zip(of_outputs, wants_biases, strict=True)
            ]
            of_part = None if scattering is None else scattering.wait()
        return None, None, None, of_part, *of_weights, *of_biases


class _LinearScatter(Leaving):
    @staticmethod
    def forward(ctx: Any, cut: Cut, input: Tensor, weight: Tensor) -> Tensor:
        ctx.ranks, ctx.cut = cut.group, cut
        ctx.save_for_backward(input, weight)

        def act(place: Place, summand: Tensor) -> None:
            multiply(rows_of(cut.at(input, place)), weight.mT, None, summand)

        like = input.new_empty(cut.shape(tuple(input.shape), 0, weight.shape[0]))
        with without_autocast(input):
            return divides(ctx, multiply_scattered(cut, like, act), cut.dim, cut.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cut: Cut = ctx.cut
        input, weight = ctx.saved_tensors
        _, wants_input, wants_weight = ctx.needs_input_grad
        of_input = torch.empty_like(input, memory_format=torch.contiguous_format) if wants_input else None
        whole = gradient.new_empty(cut.shape(tuple(gradient.shape), sum(cut.sizes))) if wants_weight else None

        def act(place: Place, piece: Tensor) -> None:
            if whole is not None:
                cut.at(whole, place).copy_(piece)
            if of_input is not None:
                multiply(rows_of(piece), weight, None, cut.at(of_input, place))

        with without_autocast(input):
            multiply_gathered(cut, gradient, act)
            of_weight = None if whole is None else rows_of(whole).mT @ rows_of(input)
        return None, of_input, of_weight
