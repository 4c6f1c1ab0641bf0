"""Linear layers whose communication overlaps with their own matrix products (asynchronous tensor parallelism).

Where a sequence parallel layer gathers its input, this rank's shard is multiplied while the rest is sent; where it
scatters a sum, the parts of the other ranks are computed first, and sent while the rest is computed. So the work is cut
along the sequence: into one part for each rank, and the parts of other ranks into `pieces`. In the backward pass of the
first, the gradient of the input is sent while the gradient of the weight is computed. In the backward pass of the
second, the gradient is gathered, and multiplied as it comes. (Also called micro-pipelined tensor parallelism, or
decomposed collectives: Wang et al., ASPLOS 2023.)

The numbers are the same as without overlap, because sums have the same order: to the bit where the kernel of a matrix
product computes a row in the same way for any number of rows. Gradients of weights are one product, as without overlap.
Gradients of gradients do not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_core.compat import untraced
from scale_core.errors import TransferError
from scale_core.shard import on_local_tensors
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.async_tp.chunks import (
    ChunkRange,
    SequenceChunks,
    all_gather_chunks,
    matmul_into,
    product_dtype,
    reduce_scatter_chunks,
    to_rows,
    without_autocast,
)
from scale_tp.comm import (
    RegionEntry,
    RegionExit,
    apply,
    check_sizes,
    gather_sizes,
    start_all_gather,
    start_reduce_scatter,
)
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.sequence_lengths import check_sequence_dim, lengths_hint, record_lengths, shard_lengths
from scale_tp.split import check_size


@untraced
@checked_arguments
def gather_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    process_group: GroupLike = None,
    *,
    biases: Sequence[Tensor | None] | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    pieces: int = 1,
) -> tuple[Tensor, ...]:
    """Multiplies the full sequence, divided over the ranks, with several weights, as its parts arrive.

    The product of a column parallel layer under sequence parallelism; queries, keys and values take one gather
    together. The gathered input is not kept: in the backward pass it is gathered once more, during the product of its
    gradient.

    Args:
        input: [..., positions of this rank, ..., features].
        weights: [outputs of this rank, features] each.
        process_group: The ranks; None is the model axis.
        biases: [outputs of this rank] or None, for each weight; None is none at all.
        dim: The dimension of the sequence.
        sizes: How many positions each rank has; None is as the sequence was divided, and asks where it is not known.
        pieces: Into how many each rank's shard is cut.

    Returns:
        For each weight [..., all positions, ..., outputs of this rank].

    Raises:
        TransferError: A rank did not take part.
        ValueError: `pieces` is below 1, or `sizes`, `dim` or the dtypes do not fit.

    Examples:
        >>> import torch
        >>> from scale_tp.async_tp.collective_matmul import gather_linear
        >>> (output,) = gather_linear(torch.ones(6, 4), [torch.ones(3, 4)], pieces=2)
        >>> output.shape
        torch.Size([6, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    chunks = chunk_sequence("gather_linear", input, tensor_parallel_group(process_group), dim, sizes, pieces)
    return all_gather_linear(chunks, input, weights, [None] * len(weights) if biases is None else biases, keeps=False)


@untraced
@checked_arguments
def linear_scatter(
    input: Tensor,
    weight: Tensor,
    process_group: GroupLike = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    pieces: int = 1,
) -> Tensor:
    """Multiplies with a weight, and scatters the sum over the ranks along the sequence, each part when it is ready.

    The product of a row parallel layer under sequence parallelism. In the backward pass the gradient is gathered, and
    multiplied as its parts arrive.

    Args:
        input: [..., all positions, ..., features of this rank].
        weight: [outputs, features of this rank].
        process_group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: How many positions each rank gets; None is as even as it can be.
        pieces: Into how many each rank's shard is cut.

    Returns:
        [..., positions of this rank, ..., outputs]; summands are added in rank order, in fp32 at least.

    Raises:
        TransferError: A rank did not take part.
        ValueError: `pieces` is below 1, or `sizes`, `dim` or the dtypes do not fit.

    Examples:
        >>> import torch
        >>> from scale_tp.async_tp.collective_matmul import linear_scatter
        >>> linear_scatter(torch.ones(6, 4), torch.ones(3, 4)).shape  # on two ranks [3, 3]
        torch.Size([6, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ranks = tensor_parallel_group(process_group)
    check_size("pieces", pieces, 1)
    dim = check_sequence_dim("linear_scatter", "dim", input.shape, dim)
    lengths = tuple(check_sizes(input.shape[dim], ranks, sizes))
    record_lengths(ranks, lengths)
    compute = product_dtype(input, [weight])
    chunks = SequenceChunks(ranks, dim, lengths, pieces)
    output: Tensor = apply(_LinearReduceScatter, chunks, input.to(compute), weight.to(compute))
    return output


def chunk_sequence(
    what: str, input: Tensor, process_group: GroupLike, dim: int, sizes: Sequence[int] | None, pieces: int
) -> SequenceChunks:
    """Returns the cut of a sequence from this rank's part of it, [..., positions of this rank, ..., features]."""
    ranks = tensor_parallel_group(process_group)
    check_size("pieces", pieces, 1)
    dim = check_sequence_dim(what, "dim", input.shape, dim)
    lengths = shard_lengths(ranks, input, dim) if sizes is None else gather_sizes(input.shape[dim], ranks, sizes)
    return SequenceChunks(ranks, dim, tuple(lengths), pieces)


def all_gather_linear(
    chunks: SequenceChunks, part: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keeps: bool
) -> tuple[Tensor, ...]:
    """Multiplies a gathered sequence with weights: [..., all positions, ..., outputs of this rank] for each.

    With `keeps` the gathered input is kept for the backward pass, and returned first, for other readers.
    """
    compute = product_dtype(part, weights)
    factors = [weight.to(compute) for weight in weights]
    summands = [None if bias is None else bias.to(compute) for bias in biases]
    try:
        outputs: tuple[Tensor, ...] = apply(_AllGatherLinear, chunks, keeps, len(weights), part, *factors, *summands)
        return outputs
    except TransferError as error:
        error.add_note(lengths_hint(chunks.group.rank, part.shape[chunks.dim]))
        raise


class _AllGatherLinear(RegionEntry):
    @staticmethod
    def forward(
        ctx: Any, chunks: SequenceChunks, keeps: bool, num_weights: int, part: Tensor, *factors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = [factor for factor in factors[:num_weights] if factor is not None], factors[num_weights:]
        ctx.group, ctx.chunks, ctx.keeps, ctx.num_weights = chunks.group, chunks, keeps, num_weights
        ctx.set_materialize_grads(False)
        shape = chunks.shape(tuple(part.shape), sum(chunks.sizes))
        gathered = part.new_empty(shape) if keeps else None
        outputs = [part.new_empty((*shape[:-1], weight.shape[0]), dtype=weight.dtype) for weight in weights]

        def act(chunk: ChunkRange, piece: Tensor) -> None:
            if gathered is not None:
                chunks.at(gathered, chunk).copy_(piece)
            for output, weight, bias in zip(outputs, weights, biases, strict=True):
                matmul_into(to_rows(piece).to(weight.dtype), weight.mT, bias, chunks.at(output, chunk))

        with without_autocast(part):
            all_gather_chunks(chunks, part, act)
        # In the dtype of the products, as autocast keeps it.
        ctx.dtype, compute = part.dtype, outputs[0].dtype if outputs else part.dtype
        ctx.save_for_backward((part if gathered is None else gathered).to(compute), *map(local_tensor, weights))
        if gathered is None:
            return tuple(outputs)
        if not ctx.needs_input_grad[3]:
            ctx.mark_non_differentiable(gathered)
        return gathered, *outputs

    @staticmethod
    @once_differentiable
    @on_local_tensors
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chunks: SequenceChunks = ctx.chunks
        saved_input, *weights = ctx.saved_tensors
        total, output_grads = (grads[0], grads[1:]) if ctx.keeps else (None, grads)
        _, _, _, wants_part, *wants = ctx.needs_input_grad
        wants_weights, wants_biases = wants[: ctx.num_weights], wants[ctx.num_weights :]
        gathering = scattering = None
        with without_autocast(saved_input):
            if not ctx.keeps and any(wants_weights):
                gathering = start_all_gather(saved_input, chunks.group, chunks.dim, chunks.sizes)
            if wants_part:
                # In the order in which autograd adds the gradients of one tensor's readers: the last one first.
                for grad, weight in reversed(list(zip(output_grads, weights, strict=True))):
                    if grad is not None:
                        input_grad = (to_rows(grad) @ weight).to(ctx.dtype).view(*grad.shape[:-1], weight.shape[1])
                        total = input_grad if total is None else total + input_grad
                assert total is not None, "autograd asks for no gradients where there are none"
                scattering = start_reduce_scatter(total, chunks.group, chunks.dim, chunks.sizes)
            rows = to_rows(saved_input if gathering is None else gathering.wait())
            weight_grads = [
                to_rows(grad).mT @ rows.to(grad.dtype) if needs_grad and grad is not None else None
                for grad, needs_grad in zip(output_grads, wants_weights, strict=True)
            ]
            bias_grads = [
                to_rows(grad).sum(0) if needs_grad and grad is not None else None
                for grad, needs_grad in zip(output_grads, wants_biases, strict=True)
            ]
            part_grad = None if scattering is None else scattering.wait()
        return None, None, None, part_grad, *weight_grads, *bias_grads


class _LinearReduceScatter(RegionExit):
    @staticmethod
    def forward(ctx: Any, chunks: SequenceChunks, input: Tensor, weight: Tensor) -> Tensor:
        ctx.group, ctx.chunks = chunks.group, chunks
        ctx.save_for_backward(input, local_tensor(weight))

        def act(chunk: ChunkRange, summand: Tensor) -> None:
            matmul_into(to_rows(chunks.at(input, chunk)), weight.mT, None, summand)

        like = input.new_empty(chunks.shape(tuple(input.shape), 0, weight.shape[0]))
        with without_autocast(input):
            return reduce_scatter_chunks(chunks, like, act)

    @staticmethod
    @once_differentiable
    @on_local_tensors
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chunks: SequenceChunks = ctx.chunks
        input, weight = ctx.saved_tensors
        _, wants_input, wants_weight = ctx.needs_input_grad
        input_grad = torch.empty_like(input, memory_format=torch.contiguous_format) if wants_input else None
        gathered = grad.new_empty(chunks.shape(tuple(grad.shape), sum(chunks.sizes))) if wants_weight else None

        def act(chunk: ChunkRange, piece: Tensor) -> None:
            if gathered is not None:
                chunks.at(gathered, chunk).copy_(piece)
            if input_grad is not None:
                matmul_into(to_rows(piece), weight, None, chunks.at(input_grad, chunk))

        with without_autocast(input):
            all_gather_chunks(chunks, grad, act)
            weight_grad = None if gathered is None else to_rows(gathered).mT @ to_rows(input)
        return None, input_grad, weight_grad
