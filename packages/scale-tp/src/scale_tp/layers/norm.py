"""LayerNorm and RMSNorm for sequence parallelism: their gradients are all-reduced.

A norm works token by token, so each rank norms its own shard. Its parameters are the same on all ranks, and each rank
has only its tokens' share of their gradient. The shares are summed in the backward pass, in one message for all
parameters of a norm: after it every rank has the full gradient, which counts once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_tp.layers.base import ParallelModule, ParamSharding
from scale_tp.layers.module_swap import swap_class
from scale_tp.layers.replicated import GradAllReduceMixin
from scale_tp.parallel_state import tensor_parallel_group


class ParallelLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` for an input that is this rank's part of a sequence.

    Args:
        normalized_shape: As in `torch.nn.LayerNorm`, like all arguments but the last.
        process_group: The ranks that divide the sequence; None is the model axis, or only this process.

    Examples:
        >>> import torch
        >>> from scale_tp import ParallelLayerNorm
        >>> ParallelLayerNorm(8)(torch.randn(2, 5, 8)).shape  # 5 positions of this rank
        torch.Size([2, 5, 8])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    @checked_arguments
    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        process_group: GroupLike = None,
    ) -> None:
        ranks = tensor_parallel_group(process_group)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        register_grad_all_reduce(self, ranks)


class ParallelRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` for an input that is this rank's part of a sequence.

    Args:
        normalized_shape: As in `torch.nn.RMSNorm`, like all arguments but the last.
        process_group: The ranks that divide the sequence; None is the model axis, or only this process.

    Examples:
        >>> import torch
        >>> from scale_tp import ParallelRMSNorm
        >>> ParallelRMSNorm(8)(torch.randn(2, 5, 8)).shape  # 5 positions of this rank
        torch.Size([2, 5, 8])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    @checked_arguments
    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        process_group: GroupLike = None,
    ) -> None:
        ranks = tensor_parallel_group(process_group)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        register_grad_all_reduce(self, ranks)


def register_grad_all_reduce(module: nn.Module, process_group: GroupLike = None) -> nn.Module:
    """Has the gradients of a module's own parameters all-reduced over the ranks, because each has a part of its input.

    The module stays the same object, with the same names; its class becomes one that is made from it. Parameters of
    modules inside it are not meant.

    Args:
        module: For example a norm; the values of its parameters are the same on all ranks.
        process_group: The ranks that divide its input; None is the model axis, or only this process.

    Returns:
        The module.

    Raises:
        TypeError: It is not a module.
        ValueError: Its gradients are summed already, its parameters are divided or parametrized, or only modules inside
            it have some.

    Examples:
        >>> import torch
        >>> from scale_tp.layers.norm import register_grad_all_reduce
        >>> norm = register_grad_all_reduce(torch.nn.LayerNorm(8))  # a custom norm under sequence_parallel=True

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, such as a norm, got {type(module).__name__}")
    ranks = tensor_parallel_group(process_group)
    if isinstance(module, GradAllReduceMixin):
        raise ValueError(f"the gradients of this {type(module).__name__} are summed already: once is enough")
    if isinstance(module, ParallelModule):
        raise ValueError(
            f"expected a module whose parameters are the same on all ranks, got a {type(module).__name__} that is "
            "divided between them, and sums what has to be summed itself: leave it unchanged"
        )
    _check_own_parameters(module)
    if ranks.size > 1:
        named_params = module.named_parameters(recurse=False)
        swap_class(
            module, GradAllReduceMixin, ranks, {name: ParamSharding(tuple(param.shape)) for name, param in named_params}
        )
    return module


def _check_own_parameters(module: nn.Module) -> None:
    """Refuses a module whose parameters belong to modules in it, where their gradients would not be summed."""
    kind = type(module).__name__
    if is_parametrized(module):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type]  # a ModuleDict then
        raise ValueError(
            f"expected a module whose parameters are its own, got a {kind} whose {names} is parametrized: call "
            "torch.nn.utils.parametrize.remove_parametrizations(module, name) before, or sum its gradients yourself"
        )
    inner = [name for name, child in module.named_modules() if name and any(True for _ in child.parameters(False))]
    if inner and not any(True for _ in module.parameters(recurse=False)):
        raise ValueError(
            f"expected a module that has parameters of its own, got a {kind} that has them in "
            f"{', '.join(map(repr, inner))}: pass these, as in "
            f"register_grad_all_reduce(module.get_submodule({inner[0]!r}))"
        )
