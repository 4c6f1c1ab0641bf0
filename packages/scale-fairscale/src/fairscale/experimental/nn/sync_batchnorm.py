"""`SyncBatchNorm`: torch's kernels on accelerators, and on the CPU, which torch's refuses, the same by all-reduces."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fairscale.internal.process_group import unwrap_process_group
from scale_core.comm.collectives import all_reduce
from scale_core.comm.group import Group, group_of


class SyncBatchNorm(nn.BatchNorm2d):
    """A batch norm of any number of dimensions, whose statistics are computed over the batches of all ranks.

    In new code: `torch.nn.SyncBatchNorm`.

        >>> import torch
        >>> from fairscale.experimental.nn import SyncBatchNorm
        >>> model = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
        >>> model(torch.randn(4, 3, 2)).shape
        torch.Size([4, 3, 2])

    Args:
        *args: As for `nn.BatchNorm2d`.
        process_group: The ranks; None is the default group.
        **kwargs: As for `nn.BatchNorm2d`.
    """

    def __init__(self, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input, [N, C, ...]; batches of ranks may differ in length."""
        if input.device.type != "cpu":
            output: Tensor = nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]  # with its attributes
            return output
        group = (
            group_of(unwrap_process_group(self.process_group)) if self.training and dist.is_initialized() else Group()
        )
        return _BatchNorm.forward(self, input) if group.size == 1 else self._over_all_ranks(input, group)

    def _over_all_ranks(self, input: Tensor, group: Group) -> Tensor:
        self._check_input_dim(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1, *(1 for _ in dims[1:])]
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        # In fp64, which counts any number of samples.
        count = values.new_full((1,), values.numel() // values.shape[1], dtype=torch.float64)
        sums = _sum_over_ranks(torch.cat([values.sum(dims, dtype=torch.float64), count]), group)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centered = values - mean.to(values.dtype).view(shape)
        variance = _sum_over_ranks(centered.square().sum(dims, dtype=torch.float64), group) / total
        self._update_statistics(mean.detach(), variance.detach() * (total / (total - 1)))
        normalized = centered * torch.rsqrt(variance + self.eps).to(values.dtype).view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)

    def _update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics towards the ones of this batch, the variance without bias, [C] each."""
        if not self.track_running_stats:
            return
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)

    def _check_input_dim(self, input: Tensor) -> None:
        nn.SyncBatchNorm._check_input_dim(self, input)  # type: ignore[arg-type]
        self._check_non_zero_input_channels(input)

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        nn.SyncBatchNorm._check_non_zero_input_channels(self, input)  # type: ignore[arg-type]

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Returns the module with each batch norm in it replaced by one of this class, with the same parameters.

        Args:
            module: What has batch norms, or is one.
            process_group: The ranks; None is the default group.
        """
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for part in converted.modules():
            if type(part) is nn.SyncBatchNorm:
                part.__class__ = cls  # type: ignore[assignment]  # It has the same attributes.
        return converted


class _SumOverRanks(torch.autograd.Function):
    """Each rank's loss depends on the sum, so that its gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(values.detach().clone(), group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.group).wait(), None


def _sum_over_ranks(values: Tensor, group: Group) -> Tensor:
    total: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return total


__all__ = ["SyncBatchNorm"]
