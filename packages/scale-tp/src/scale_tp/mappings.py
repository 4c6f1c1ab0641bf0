"""The mappings of `comm` under Megatron's names: they check their arguments, and know the ranks of the model axis."""

from __future__ import annotations

from torch import Tensor

from scale_core.comm.group import GroupLike
from scale_tp.comm import (
    Sizes,
    check_sizes,
    copy_many_to_region,
    copy_to_region,
    gather_from_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
    scatter_to_region,
)
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.sequence_lengths import record_lengths


def copy_to_tensor_model_parallel_region(input_: Tensor, process_group: GroupLike = None) -> Tensor:
    """Returns the input unchanged; its gradient is summed over the ranks, because each computes with its own part.

    Args:
        input_: [any shape], the same on all ranks.
        process_group: The ranks; None is the model axis.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import copy_to_tensor_model_parallel_region
        >>> copy_to_tensor_model_parallel_region(torch.ones(2, 3)).shape
        torch.Size([2, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return copy_to_region(_check_tensor(input_), tensor_parallel_group(process_group))


def copy_many_to_tensor_model_parallel_region(*inputs: Tensor, process_group: GroupLike = None) -> tuple[Tensor, ...]:
    """The same for several tensors, whose gradients are summed in one message: the small parameters of a norm.

    Args:
        *inputs: [any shapes] of one dtype and device, the same on all ranks.
        process_group: The ranks; None is the model axis.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_tp.mappings import copy_many_to_tensor_model_parallel_region
        >>> first, second = copy_many_to_tensor_model_parallel_region([torch.ones(2), torch.ones(3)], Group())

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return copy_many_to_region(inputs, tensor_parallel_group(process_group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: GroupLike = None) -> Tensor:
    """Returns the sum over the ranks; the gradient goes to each summand unchanged.

    Args:
        input_: [any shape]: a summand; of one shape on all ranks. It is not changed.
        process_group: The ranks; None is the model axis.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import reduce_from_tensor_model_parallel_region
        >>> reduce_from_tensor_model_parallel_region(torch.ones(2, 3)).sum()  # on two ranks 12
        tensor(6.)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return reduce_from_region(_check_tensor(input_), tensor_parallel_group(process_group))


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -1, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part along `dim`; the gradients of the parts are put together.

    Args:
        input_: [..., N, ...], the same on all ranks.
        process_group: The ranks; None is the model axis.
        dim: The dimension that is divided.
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import scatter_to_tensor_model_parallel_region
        >>> scatter_to_tensor_model_parallel_region(torch.ones(2, 6)).shape  # on two ranks [2, 3]
        torch.Size([2, 6])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return scatter_to_region(_check_tensor(input_, dim), tensor_parallel_group(process_group), dim, sizes)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -1, sizes: Sizes = None
) -> Tensor:
    """Returns the parts of all ranks along `dim`, in rank order; each gets its part of the gradient.

    Args:
        input_: [..., n of this rank, ...].
        process_group: The ranks; None is the model axis.
        dim: The dimension that is divided.
        sizes: n of each rank; None asks the others, in a message more.

    Raises:
        ValueError: This rank's n differs from `sizes`.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import gather_from_tensor_model_parallel_region
        >>> gather_from_tensor_model_parallel_region(torch.ones(2, 3)).shape  # on two ranks [2, 6]
        torch.Size([2, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return gather_from_region(_check_tensor(input_, dim), tensor_parallel_group(process_group), dim, sizes)


def scatter_to_sequence_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -2, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part of the sequence; the gradients of the parts are put together.

    Args:
        input_: [..., N, ...], the same on all ranks.
        process_group: The ranks; None is the model axis.
        dim: The dimension of the sequence: by default that before the last, as in [batch, sequence, features].
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import scatter_to_sequence_parallel_region
        >>> scatter_to_sequence_parallel_region(torch.ones(2, 6, 3)).shape  # on two ranks [2, 3, 3]
        torch.Size([2, 6, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ranks = tensor_parallel_group(process_group)
    lengths = check_sizes(_check_tensor(input_, dim).shape[dim], ranks, sizes)
    record_lengths(ranks, lengths)
    return scatter_to_region(input_, ranks, dim, lengths)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    process_group: GroupLike = None,
    *,
    dim: int = -2,
    sizes: Sizes = None,
    to_model_parallel: bool = True,
) -> Tensor:
    """Returns the full sequence from the ranks' parts.

    Args:
        input_: [..., n of this rank, ...].
        process_group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: n of each rank; None is as the sequence was divided, by one of these functions or by a layer.
        to_model_parallel: Whether each rank goes on with its own part of a layer, so that the gradients must be summed
            over the ranks. False is for a result that is the same on all ranks, for example a loss.

    Raises:
        ValueError: This rank's n differs from `sizes`.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import gather_from_sequence_parallel_region
        >>> gather_from_sequence_parallel_region(torch.ones(2, 5, 3)).shape  # on two ranks [2, 10, 3]
        torch.Size([2, 5, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ranks = tensor_parallel_group(process_group)
    return gather_sequence(_check_tensor(input_, dim), ranks, dim, sizes, to_model_parallel=to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -2, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part of the sequence of the sum over the ranks; the gradients are put together.

    Args:
        input_: [..., N, ...]: a summand; of one shape on all ranks. It is not changed.
        process_group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import reduce_scatter_to_sequence_parallel_region
        >>> reduce_scatter_to_sequence_parallel_region(torch.ones(2, 6, 3)).shape  # on two ranks [2, 3, 3]
        torch.Size([2, 6, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return reduce_scatter_sequence(_check_tensor(input_, dim), tensor_parallel_group(process_group), dim, sizes)


def _check_tensor(given: Tensor, dim: int | None = None) -> Tensor:
    is_tensor: bool = isinstance(given, Tensor)
    if not is_tensor:
        raise TypeError(f"expected a tensor to bring into the divided region or out of it, got {type(given).__name__}")
    if dim is not None and not -given.dim() <= dim < given.dim():
        raise ValueError(
            f"expected dim to be one of the {given.dim()} dimensions of the input {list(given.shape)}, got {dim}: "
            "pass the one that is divided, such as dim=0"
        )
    return given
