"""`OffloadModel`: a sequential model whose parts stay on the host and are on the device while they compute.

Each part is a unit of scale-fsdp in a world of one rank: its parameters, gradients and optimizer state are on the host
(`move_params_to_cpu`). With `checkpoint_activation` a part keeps its inputs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import scale_fsdp
from scale_checkpoint import checkpoint_wrapper


class _OneRank:
    """Stands for a process group of one rank, also where torch.distributed has more."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class OffloadModel(nn.Module):
    """Runs a sequential model part by part, with the parameters of one part on the device at a time.

    In new code: `scale_fsdp.FullyShardedDataParallel(part, move_params_to_cpu=True)` around each part, on any number of
    ranks, and `scale_checkpoint.checkpoint_wrapper(part, offload_to_cpu=True)`.

        >>> import torch
        >>> from fairscale.experimental.nn import OffloadModel
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> model = OffloadModel(layers, device=torch.device("cpu"), num_slices=2, checkpoint_activation=True)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> len(model.model_slices)
        2

    Args:
        model: An `nn.Sequential`, or what `shard_model` returns; build the optimizer after this.
        device: Where it computes.
        offload_device: The host.
        num_slices: How many parts an `nn.Sequential` is divided into.
        checkpoint_activation: Keep the inputs of parts alone.
        num_microbatches: How many pieces a batch is run in; needs `checkpoint_activation`, as there.

    Raises:
        TypeError: No model, or none of these; no device.
        RuntimeError: Micro-batches without `checkpoint_activation`.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        offload_device: torch.device = torch.device("cpu"),  # noqa: B008  a value
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
    ) -> None:
        super().__init__()
        if not model:
            raise TypeError("`model` argument to `OffloadModel` cannot be None: expected an nn.Sequential or a list")
        if device is None:
            raise TypeError("`device` argument to `OffloadModel` cannot be None: expected where it computes")
        if not isinstance(model, nn.Sequential | list | tuple):
            raise TypeError(
                f"`model` must be of type `nn.Sequential`, or what shard_model returns, got {type(model).__name__}"
            )
        if num_microbatches > 1 and not checkpoint_activation:
            raise RuntimeError("We currently only support microbatches with activation checkpointing.")
        if torch.device(offload_device).type != "cpu":
            raise TypeError(f"`offload_device` must be the host, torch.device('cpu'), got {offload_device}")
        self.device, self.offload_device, self.num_microbatches = torch.device(device), offload_device, num_microbatches
        parts = _divide(list(model), num_slices) if isinstance(model, nn.Sequential) else list(model)
        for part in parts:
            if checkpoint_activation:
                checkpoint_wrapper(part)
        self.model_slices = nn.ModuleList(
            scale_fsdp.FullyShardedDataParallel(
                part,
                process_group=_OneRank(),
                move_params_to_cpu=True,
                compute_device=self.device,
            )
            if any(True for _ in part.parameters())
            else part
            for part in parts
        )

    def forward(self, *inputs: Any) -> Any:
        """Runs the parts, one after the other, on each micro-batch, and puts their outputs together along dim 0.

        Raises:
            ValueError: Tensors of different lengths along dim 0, or none, which are no micro-batches.
        """
        moved = [value.to(self.device) if isinstance(value, Tensor) else value for value in inputs]
        if self.num_microbatches == 1:
            return self._run(moved)
        shapes = [tuple(value.shape) for value in moved if isinstance(value, Tensor)]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise ValueError(
                f"num_microbatches={self.num_microbatches}: expected tensors of one length along dim 0, got the shapes "
                f"{shapes}; give tensors of one length, or OffloadModel(..., num_microbatches=1)"
            )
        chunks = [value.chunk(self.num_microbatches) if isinstance(value, Tensor) else None for value in moved]
        count = next(len(chunk) for chunk in chunks if chunk is not None)
        outputs = [
            self._run([value if chunk is None else chunk[number] for value, chunk in zip(moved, chunks, strict=True)])
            for number in range(count)
        ]
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

    def _run(self, inputs: Sequence[Any]) -> Any:
        values: Any = tuple(inputs)
        for part in self.model_slices:
            values = part(*values) if isinstance(values, tuple) else part(values)
        return values


def _divide(layers: Sequence[nn.Module], num_slices: int) -> list[nn.Sequential]:
    """Neighboring layers in parts of about equally many parameters; none is empty."""
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    num_slices = min(num_slices, len(layers))
    parts: list[list[nn.Module]] = [[]]
    filled, target = 0, sum(sizes) / num_slices
    for number, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        left = len(layers) - number
        is_full = filled >= target * len(parts) or left <= num_slices - len(parts)
        if parts[-1] and is_full and len(parts) < num_slices:
            parts.append([])
        parts[-1].append(layer)
        filled += size
    return [nn.Sequential(*part) for part in parts]


__all__ = ["OffloadModel"]
